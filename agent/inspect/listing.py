"""The list of a run's episodes: which ones, in which order, as a table for the terminal."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from rich.table import Table
from rich.text import Text

from agent.store.protocol import EpisodeRow
from agent.store.reading import EpisodeFilter, EpisodeReader

SORTS: dict[str, Callable[[EpisodeRow], Any]] = {
    "finished": lambda row: row.finished_at,
    "reward": lambda row: row.reward,
    "tokens": lambda row: row.tokens,
    "turns": lambda row: row.turns,
    "latency": lambda row: row.finished_at - row.issued_at,
    "version": lambda row: row.oldest_version,
}
"""What a list can be sorted by."""

READ_AT_MOST = 10_000
"""Of more episodes that fit, the latest so many are read."""


@dataclass(frozen=True, slots=True)
class Listing:
    """`rows` are shown; `matching` episodes fit the filter, with `mean_reward` (None: there is none)."""

    rows: list[EpisodeRow]
    matching: int
    mean_reward: float | None

    @property
    def summary(self) -> str:
        """How many are shown of how many, in one line."""
        matching = f"{self.matching}{' (the latest)' if self.matching == READ_AT_MOST else ''}"
        mean = "" if self.mean_reward is None else f", mean reward {self.mean_reward:.3f}"
        return f"{len(self.rows)} of {matching} episodes{mean}"


def list_episodes(reader: EpisodeReader, wanted: EpisodeFilter, *, sort: str, ascending: bool, limit: int) -> Listing:
    """The first `limit` of the episodes that fit `wanted`, in the order of `sort` (a key of `SORTS`)."""
    matching = reader.list(wanted)
    rows = sorted(matching, key=SORTS[sort], reverse=not ascending)[: max(0, limit)]
    mean = sum(row.reward for row in matching) / len(matching) if matching else None
    return Listing(rows, len(matching), mean)


def list_table(rows: Sequence[EpisodeRow]) -> Table:
    """A table with one line an episode."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in ("episode", "kind", "status", "task", "stop reason"):
        table.add_column(name, overflow="fold")
    for name in ("reward", "turns", "tokens", "seconds", "versions"):
        table.add_column(name, justify="right")
    for row in rows:
        versions = f"{row.oldest_version}-{row.newest_version}"
        table.add_row(
            *(Text(value) for value in (row.id, row.kind, _status(row), row.task_id, row.stop_reason)),
            f"{row.reward:g}",
            str(row.turns),
            str(row.tokens),
            f"{row.finished_at - row.issued_at:.1f}",
            versions if row.oldest_version != row.newest_version else str(row.oldest_version),
        )
    return table


def _status(row: EpisodeRow) -> str:
    return row.status if row.gone is None else f"{row.status}, {row.gone}"
