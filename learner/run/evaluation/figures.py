"""The figures of an evaluated set. Pure functions; names are `evaluation/figure`, or `evaluation/SET/figure`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from agent.episode import Episode
from agent.estimates import passes
from learner.config import HeldOutSet
from learner.run.pass_rates import mean_pass_at


def set_figures(chosen: HeldOutSet, episodes: Sequence[Episode], moved_from: int | None = None) -> dict[str, float]:
    """Of the episodes of one evaluation of the set, at least one.

    `moved_from`: the version that it began with, where engines could be given new weights meanwhile. Then the figures
    say from which versions its tokens came, and what share of them from that one.
    """
    count = len(episodes)
    figures = {
        "success": sum(e.reward > 0 for e in episodes) / count,
        "reward": sum(e.reward for e in episodes) / count,
        "reused_output": sum(bool(e.metrics.get("reused_output")) for e in episodes) / count,
        "action_tokens": sum(e.action_tokens for e in episodes) / count,
    }
    figures |= {f"pass_at_{k}": mean_pass_at(episodes, k) for k in passes(chosen.samples) if k > 1}
    if moved_from is not None:
        counts: Counter[int] = Counter()
        for version, tokens in (run for e in episodes for action in e.actions for run in action.versions.runs()):
            counts[version] += tokens
        figures["version_min"], figures["version_max"] = float(min(counts)), float(max(counts))
        figures["version_share"] = counts[moved_from] / counts.total()
    return {f"{chosen.prefix}/{name}": value for name, value in figures.items()}
