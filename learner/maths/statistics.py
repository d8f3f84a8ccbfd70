# ruff: noqa: F722
"""Explained variance from statistics that merge exactly over micro-batches and ranks."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from learner.maths.tensors import require_shape

if TYPE_CHECKING:
    from jaxtyping import Float, Shaped


@dataclass(frozen=True)
class Moments:
    """Count, mean and sum of squared deviations of a set of numbers; merges without cancellation (Chan et al. 1979)."""

    count: float = 0.0
    mean: float = 0.0
    squares: float = 0.0

    @classmethod
    def of(cls, numbers: Float[Tensor, " N"]) -> Moments:
        """Moments of a flat tensor, in float64. Numbers that are all equal give exactly 0 squares."""
        if numbers.numel() == 0:
            return cls()
        wide = numbers.detach().to("cpu", torch.float64)
        # Shifting by a member, not by the mean, is what makes a constant set come out as exactly constant.
        shift = wide[0]
        offset = wide - shift
        centre = offset.mean()
        return cls(float(numbers.numel()), float(shift + centre), float(((offset - centre) ** 2).sum()))

    def merge(self, other: Moments) -> Moments:
        """Moments of the union of two disjoint sets."""
        if self.count == 0:
            return other
        if other.count == 0:
            return self
        count = self.count + other.count
        gap = other.mean - self.mean
        return Moments(
            count,
            self.mean + gap * other.count / count,
            self.squares + other.squares + gap * gap * self.count * other.count / count,
        )


@dataclass(frozen=True)
class EVStatistics:
    """What explained variance needs to know of a set of action tokens.

    A micro-batch makes one with `of`, `merge` joins them, and ranks exchange `to_tensor()` with an all-gather
    (`learner.parallel.collectives.merged`). The result is that of the whole global batch; the mean of micro-batch
    values is not (it rewards small batches and is undefined on constant ones).
    """

    returns: Moments = Moments()
    residuals: Moments = Moments()

    @classmethod
    def of(cls, returns: Float[Tensor, "*S"], values: Float[Tensor, "*S"], mask: Shaped[Tensor, "*S"]) -> EVStatistics:
        """Statistics over the tokens where `mask` is non-zero; the rest is never read. Three equal shapes."""
        require_shape(mask, returns=returns, values=values)
        chosen = mask != 0
        target = returns.detach()[chosen].double().cpu()
        return cls(Moments.of(target), Moments.of(target - values.detach()[chosen].double().cpu()))

    def merge(self, other: EVStatistics) -> EVStatistics:
        """Statistics of the union of two disjoint sets of tokens."""
        return EVStatistics(self.returns.merge(other.returns), self.residuals.merge(other.residuals))

    @classmethod
    def merge_all(cls, parts: Iterable[EVStatistics]) -> EVStatistics:
        """Statistics of the union of any number of disjoint sets."""
        total = cls()
        for part in parts:
            total = total.merge(part)
        return total

    def to_tensor(self) -> Float[Tensor, " 6"]:
        """float64[6], to be gathered (not summed) over ranks."""
        r, e = self.returns, self.residuals
        return torch.tensor([r.count, r.mean, r.squares, e.count, e.mean, e.squares], dtype=torch.float64)

    @classmethod
    def from_tensor(cls, rows: Float[Tensor, "W 6"]) -> EVStatistics:
        """Merge what `to_tensor` gave on each rank; rows of shape [W, 6], or [6] for one."""
        return cls.merge_all(cls(Moments(*row[:3]), Moments(*row[3:])) for row in rows.reshape(-1, 6).tolist())

    def value(self) -> float:
        """1 - Var(R - V) / Var(R); NaN for no token or constant returns, where it is undefined."""
        if self.returns.count == 0 or self.returns.squares == 0:
            return math.nan
        return 1.0 - self.residuals.squares / self.returns.squares


def explained_variance(
    returns: Float[Tensor, "B T"], values: Float[Tensor, "B T"], action_mask: Shaped[Tensor, "B T"]
) -> float:
    """Share of the variance of `returns` that `values` explain, over action tokens; NaN where undefined.

    EV = 1 - Var(R - V) / Var(R) (SAO, section 5.3). 1 is a perfect critic, 0 no better than a constant, negative
    worse than one. For a global batch in several pieces merge `EVStatistics` instead.
    """
    return EVStatistics.of(returns, values, action_mask).value()
