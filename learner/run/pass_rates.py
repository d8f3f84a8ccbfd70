"""pass@k by task family, from the episodes of an evaluation. Pure functions; see `learner.run.evaluation`."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from rich.table import Table

from agent.episode import Episode
from agent.estimates import pass_at, wilson_interval

EVERY_FAMILY = "all"


def mean_pass_at(episodes: Sequence[Episode], k: int) -> float:
    """pass@k, the mean over the tasks of `episodes`; NaN without any. An episode passes with a reward above 0."""
    tasks = _outcomes(episodes).values()
    return sum(pass_at(len(one), sum(one), k) for one in tasks) / len(tasks) if tasks else math.nan


def _outcomes(episodes: Sequence[Episode]) -> dict[str, list[bool]]:
    """By task, which of its samples passed."""
    tasks: dict[str, list[bool]] = {}
    for episode in episodes:
        tasks.setdefault(episode.task_id, []).append(episode.reward > 0)
    return tasks


@dataclass(frozen=True)
class PassRate:
    """pass@1 of one family: the mean over tasks of the mean over samples, with a 95 % interval over tasks.

    `reused`: the share of episodes in which a later tool call used an earlier output. `most`, `pass_at_most`: the
    largest k that every task has samples for, and its pass@k.
    """

    family: str
    tasks: int
    episodes: int
    success: float
    low: float
    high: float
    reused: float
    turns: float
    most: int = 1
    pass_at_most: float = math.nan


def pass_rates(episodes: Sequence[Episode]) -> list[PassRate]:
    """One `PassRate` a family, and first the one of all together (family "all").

    With one sample a task, or tasks that all fare alike, the interval is Wilson's over the tasks; else the normal one
    over their means.
    """
    families: dict[str, list[Episode]] = {EVERY_FAMILY: list(episodes)}
    for episode in episodes:
        families.setdefault(str(episode.metrics.get("family", episode.env_id)), []).append(episode)
    rates = []
    for family, members in families.items():
        tasks = _outcomes(members)
        means = [sum(outcomes) / len(outcomes) for outcomes in tasks.values()]
        most = min((len(outcomes) for outcomes in tasks.values()), default=1)
        count = max(len(means), 1)
        mean = sum(means) / count
        if len(members) == len(means) or len(set(means)) == 1:
            low, high = wilson_interval(sum(means), len(means))
        else:
            half = 1.96 * math.sqrt(sum((m - mean) ** 2 for m in means) / max(count - 1, 1) / count)
            low, high = max(0.0, mean - half), min(1.0, mean + half)
        size = max(len(members), 1)
        rates.append(
            PassRate(
                family,
                len(means),
                len(members),
                mean,
                low,
                high,
                sum(bool(e.metrics.get("reused_output")) for e in members) / size,
                sum(len(e.actions) for e in members) / size,
                most,
                mean_pass_at(members, most),
            )
        )
    return rates


def rates_of_sets(episodes: Mapping[str, Sequence[Episode]]) -> list[PassRate]:
    """The rates of each evaluation set, one after another; families of a set with a name are called after it too."""
    found = []
    for name, of_set in episodes.items():
        for rate in pass_rates(of_set):
            family = name if rate.family == EVERY_FAMILY else f"{name}: {rate.family}"
            found.append(replace(rate, family=family) if name else rate)
    return found


def pass_rate_table(rates: Sequence[PassRate]) -> Table:
    """The rates as a table for the terminal."""
    several = any(rate.most > 1 for rate in rates)
    wider = ["pass@k"] if several else []
    table = Table("family", "tasks", "episodes", "pass@1", "95 %", *wider, "reused output", "turns")
    for rate in rates:
        interval = f"{rate.low:.1%} - {rate.high:.1%}"
        cells = (
            rate.family,
            str(rate.tasks),
            str(rate.episodes),
            f"{rate.success:.1%}",
            interval,
            *([f"{rate.pass_at_most:.1%} (k {rate.most})"] if several else []),
            f"{rate.reused:.1%}",
            f"{rate.turns:.1f}",
        )
        table.add_row(*cells)
    return table
