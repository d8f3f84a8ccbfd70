"""A short history of the live figures, so that a page that is opened late has its charts filled."""

from __future__ import annotations

from typing import Any

_KEPT = 360  # a line on a chart is hardly wider, and a client may have a limit for the size of one event


class Samples:
    """At most `limit` samples over the whole life of the server: when they are too many, every second one goes and
    from then on half as many are taken."""

    def __init__(self, limit: int = _KEPT) -> None:
        self.rows: list[dict[str, Any]] = []
        self._limit, self._stride, self._seen = limit, 1, 0

    def add(self, row: dict[str, Any]) -> None:
        """Keep `row`, if it is its turn."""
        if self._seen % self._stride == 0:
            self.rows.append(row)
        self._seen += 1
        if len(self.rows) > self._limit:
            self.rows = self.rows[::2]
            self._stride *= 2


def sample_of(at: float, figures: dict[str, Any]) -> dict[str, Any]:
    """What the charts show of one `status`. `at`: seconds since 1970. A figure that nobody knows yet is None."""
    learner = figures.get("learner_metrics", {})
    return {
        "at": round(at, 2),
        "reward": figures["reward_mean"],
        "styles": figures["style_share"],
        "phase": figures["phase"],
        "version": figures["version"],
        "episodes_per_minute": figures["episodes_per_minute"],
        "queue": figures.get("store", {}).get("ready"),
        "lag": learner.get("lag/mean"),
        "gated": learner.get("gate/share"),
    }
