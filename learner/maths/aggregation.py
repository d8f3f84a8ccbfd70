# ruff: noqa: F722
"""How the terms of a batch's tokens become one number, over micro-batches and ranks."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Literal, TypedDict

from torch import Tensor

if TYPE_CHECKING:
    from jaxtyping import Bool, Float

Aggregation = Literal["token_mean", "sequence_mean"]


class Denominators(TypedDict):
    """What every loss term of a batch is divided by; see `aggregate`."""

    normalizer: float | None
    aggregation: Aggregation


def aggregate(
    terms: Float[Tensor, "B T"],
    mask: Bool[Tensor, "B T"],
    counted: Bool[Tensor, "B T"],
    aggregation: str,
    normalizer: float | None,
) -> Float[Tensor, ""]:
    """Sum of `terms` over tokens, or of each row's mean over its `counted` tokens, divided by `normalizer`.

    `terms` float[B,T] are 0 off the mask. See `learner.losses` for `normalizer`; a scalar comes back.
    """
    if aggregation == "token_mean":
        total, here = terms.sum(), counted.sum()
    elif aggregation == "sequence_mean":
        total, here = (terms.sum(1) / counted.sum(1).clamp(min=1)).sum(), mask.any(1).sum()
    else:
        raise ValueError(f"aggregation is {aggregation!r}, expected 'token_mean' or 'sequence_mean'")
    if normalizer is None:
        return total / here.clamp(min=1)
    if not 0 <= normalizer < math.inf:
        raise ValueError(f"normalizer is {normalizer}, expected a finite count of at least 0")
    return total / normalizer if normalizer > 0 else total * 0.0
