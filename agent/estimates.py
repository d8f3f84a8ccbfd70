"""Estimates from samples of tasks, and how sure they are: pass@k, Wilson's interval, the bootstrap. Pure functions."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

RESAMPLES = 10_000
"""Of one bootstrap: its ends are then steady to about a hundredth of the interval's width."""
_DRAWS_AT_ONCE = 1 << 20  # bounds the memory of the bootstrap, whatever the number of tasks


def pass_at(samples: int, passed: int, k: int) -> float:
    """The unbiased estimate of pass@k from `samples` of one task, of which `passed` passed: the share of all choices
    of k samples that hold one which passed (Chen et al., arXiv 2107.03374, equation 1).

    Raises `ValueError` unless 1 <= k <= samples and 0 <= passed <= samples.
    """
    if not (1 <= k <= samples and 0 <= passed <= samples):
        raise ValueError(f"pass@{k} of {passed} in {samples} samples: needs at least k samples of each task")
    return 1.0 - math.comb(samples - passed, k) / math.comb(samples, k)


def passes(samples: int) -> tuple[int, ...]:
    """The k of the pass@k that so many samples a task give: 1, 2, 4, ... and `samples` itself."""
    return tuple(sorted({1 << i for i in range(samples.bit_length())} | {samples}))


def wilson_interval(successes: float, trials: int, z: float = 1.96) -> tuple[float, float]:
    """Wilson's confidence interval of a proportion; (nan, nan) without trials."""
    if trials == 0:
        return (math.nan, math.nan)
    p = successes / trials
    centre = (p + z * z / (2 * trials)) / (1 + z * z / trials)
    half = z * math.sqrt(p * (1 - p) / trials + z * z / (4 * trials * trials)) / (1 + z * z / trials)
    return (max(0.0, centre - half), min(1.0, centre + half))


def bootstrap_interval(
    values: Sequence[float], *, level: float = 0.95, resamples: int = RESAMPLES, seed: int = 0
) -> tuple[float, float]:
    """The percentile interval of the mean of `values`, drawn again with replacement; the same call gives the same.

    With one value a task it is clustered by task: samples of one task are drawn together or not at all. (nan, nan) for
    fewer than two values, which say nothing of how they scatter.
    """
    if len(values) < 2:
        return (math.nan, math.nan)
    drawn = np.asarray(values, dtype=np.float64)
    generator = np.random.default_rng(seed)
    at_once = max(1, _DRAWS_AT_ONCE // len(drawn))
    means = [
        drawn[generator.integers(len(drawn), size=(min(at_once, resamples - done), len(drawn)))].mean(axis=1)
        for done in range(0, resamples, at_once)
    ]
    tail = (1.0 - level) / 2
    low, high = np.quantile(np.concatenate(means), [tail, 1.0 - tail])
    return float(low), float(high)
