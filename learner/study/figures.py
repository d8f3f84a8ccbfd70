"""What a study's records say: figures of a run, and their mean over seeds with a 95 % interval. Pure functions."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

from agent.simulate.recovery import interval
from learner.study.record import Record

SMOOTH = 10
"""Updates over which a reward is averaged where its height is asked."""

Figure = Callable[[Record, int], float]
"""From a run and the number of updates that count to a number; NaN where there is none."""


def mean_of(record: Record, name: str, start: int, stop: int) -> float:
    """The mean of a column over the updates after `start` up to `stop`."""
    found = [value for step, value in record.column(name) if start < step <= stop]
    return math.fsum(found) / len(found) if found else math.nan


def last_fifth(name: str) -> Figure:
    """The mean of a column over the last fifth of the updates."""
    return lambda record, updates: mean_of(record, name, updates - max(1, updates // 5), updates)


def all_updates(name: str) -> Figure:
    """The mean of a column over all updates."""
    return lambda record, updates: mean_of(record, name, -1, updates)


def at_the_end(name: str) -> Figure:
    """The last value of a column."""
    return lambda record, updates: next((v for step, v in reversed(record.column(name)) if step <= updates), math.nan)


def highest(name: str) -> Figure:
    """The highest value of a column."""
    return lambda record, updates: max((v for step, v in record.column(name) if step <= updates), default=math.nan)


def fell_at(record: Record, updates: int) -> float:
    """The update after which the reward, in means of `SMOOTH`, stayed below half of its highest; NaN: it did not."""
    found = [(step, value) for step, value in record.column("reward") if step <= updates]
    means = [math.fsum(v for _, v in found[i - SMOOTH : i]) / SMOOTH for i in range(SMOOTH, len(found) + 1)]
    if not means or means[-1] >= max(means) / 2:
        return math.nan
    last = max(i for i, mean in enumerate(means) if mean >= max(means) / 2)
    return float(found[min(last + SMOOTH, len(found) - 1)][0])


FIGURES: Mapping[str, tuple[Figure, str]] = {
    "reward, all updates": (all_updates("reward"), "{:.3f}"),
    "reward, last fifth": (last_fifth("reward"), "{:.3f}"),
    "held out, at the end": (at_the_end("held_out"), "{:.3f}"),
    "explained variance, last fifth": (last_fifth("explained_variance"), "{:.3f}"),
    "critic's gradient norm, last fifth": (last_fifth("critic_norm"), "{:.2f}"),
    "gated, highest": (highest("gated"), "{:.2%}"),
    "lag": (last_fifth("lag"), "{:.1f}"),
    "seconds an update": (all_updates("seconds"), "{:.2f}"),
}
"""The columns of a study's table."""


def common_updates(records: Mapping[str, Sequence[Record]]) -> int:
    """How many updates all of these runs have made."""
    return min((int(record.rows[-1]["step"]) for own in records.values() for record in own), default=0)


def with_interval(values: Sequence[float], form: str) -> str:
    """`mean [low, high]`; the mean alone for one value; "" for none."""
    known = [value for value in values if not math.isnan(value)]
    if not known:
        return ""
    mean, low, high = interval(known)
    return form.format(mean) if math.isnan(low) else f"{form} [{form}, {form}]".format(mean, low, high)
