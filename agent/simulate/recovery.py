"""What a run of simulated users says about a method: pure functions of its interactions."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

BEFORE = 10
"""Steps before a shift whose mean reward is the one to recover."""

SMOOTH = 3
"""Steps over which the reward after a shift is averaged, so that one lucky batch is no recovery."""

SHARE = 0.8
"""How much of the earlier reward has to be back."""

LEAST = 0.1
"""A method whose reward before a shift was below this had nothing that it could recover."""

# Student's t, two-sided 95 %, by degrees of freedom; beyond the table the normal's is close enough.
_T = (
    12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131, 2.120,
    2.110, 2.101, 2.093, 2.086, 2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042,
)  # fmt: skip


@dataclass(frozen=True)
class Interaction:
    """One judged response. `step`: the global policy step when it was asked for; `version`: which weights answered."""

    index: int
    step: int
    version: int
    task_id: str
    style: str
    target: str
    quality: int
    reward: float
    seconds: float


def by_step(interactions: Sequence[Interaction], steps: int) -> list[float | None]:
    """The mean reward of every step from 0 to `steps` - 1; None where nobody asked."""
    return _means([(i.step, i.reward) for i in interactions], steps)


def share_by_step(interactions: Sequence[Interaction], style: str, steps: int) -> list[float | None]:
    """The share of responses in `style`, by step."""
    return _means([(i.step, float(i.style == style)) for i in interactions], steps)


def mean_reward(interactions: Sequence[Interaction], start: int, stop: int) -> float:
    """The mean reward of the steps from `start` to before `stop`, every interaction alike; NaN if there is none."""
    rewards = [i.reward for i in interactions if start <= i.step < stop]
    return math.fsum(rewards) / len(rewards) if rewards else math.nan


def steps_to_recover(
    rewards: Sequence[float | None],
    shift: int,
    stop: int,
    *,
    share: float = SHARE,
    before: int = BEFORE,
    smooth: int = SMOOTH,
) -> int | None:
    """Steps after `shift` until the reward is back at `share` of what it was before; None if not before `stop`, and
    if it was below `LEAST` before.

    Before: the mean of the last `before` steps. After: the mean of the last `smooth` steps since the shift, so the
    answer is at least `smooth`. Steps in which nobody asked are passed over. Raises `ValueError` if there is nothing
    before the shift.
    """
    earlier = [r for r in rewards[max(0, shift - before) : shift] if r is not None]
    if not earlier:
        raise ValueError(f"there is no reward in the {before} steps before step {shift}")
    goal = share * math.fsum(earlier) / len(earlier)
    if goal < share * LEAST:
        return None
    window: list[float] = []
    for step in range(shift, min(stop, len(rewards))):
        reward = rewards[step]
        if reward is None:
            continue
        window = [*window, reward][-smooth:]
        # A sum of equal numbers may come out a little below itself.
        if len(window) == smooth and math.fsum(window) / smooth >= goal - 1e-9:
            return step - shift + 1
    return None


def interval(values: Sequence[float]) -> tuple[float, float, float]:
    """(mean, low, high) with Student's 95 % interval of the mean; low and high are NaN for fewer than two values."""
    if not values:
        return math.nan, math.nan, math.nan
    mean = math.fsum(values) / len(values)
    if len(values) < 2:
        return mean, math.nan, math.nan
    deviation = math.sqrt(math.fsum((v - mean) ** 2 for v in values) / (len(values) - 1))
    quantile = _T[len(values) - 2] if len(values) - 2 < len(_T) else 1.96
    half = quantile * deviation / math.sqrt(len(values))
    return mean, mean - half, mean + half


def _means(points: Sequence[tuple[int, float]], steps: int) -> list[float | None]:
    sums, counts = [0.0] * steps, [0] * steps
    for step, value in points:
        if 0 <= step < steps:
            sums[step] += value
            counts[step] += 1
    return [total / count if count else None for total, count in zip(sums, counts, strict=True)]
