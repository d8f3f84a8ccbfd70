# ruff: noqa: F722
"""The small things that functions of the maths need: masks, dtypes, checked shapes, the rows of an episode."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from jaxtyping import Bool, Shaped


def compute_dtype(tensor: Tensor) -> torch.dtype:
    """float32 and float64 are kept; everything narrower, and integers, is computed in float32."""
    return tensor.dtype if tensor.dtype in (torch.float32, torch.float64) else torch.float32


def scan_dtype(device: torch.device) -> torch.dtype:
    """The dtype in which recurrences over 100K tokens are summed: float64 where the device has it."""
    return torch.float32 if device.type == "mps" else torch.float64


def require_shape(like: Tensor, **tensors: Tensor) -> None:
    """Raise `ValueError`, naming the tensor, unless each has the shape of `like`."""
    for name, tensor in tensors.items():
        if tensor.shape != like.shape:
            raise ValueError(f"{name} has shape {tuple(tensor.shape)}, expected {tuple(like.shape)}")


def require_rows(name: str, tensor: Tensor, rows: int) -> None:
    """Raise `ValueError` unless `tensor` has shape [rows]: one number an episode."""
    if tensor.shape != (rows,):
        raise ValueError(f"{name} has shape {tuple(tensor.shape)}, expected ({rows},): one number an episode")


def as_mask(action_mask: Shaped[Tensor, "B T"]) -> Bool[Tensor, "B T"]:
    """The action mask as bool. Accepts bool, integer or float masks of shape [B, T]; non-zero is an action token."""
    if action_mask.dim() != 2:
        raise ValueError(f"action_mask has shape {tuple(action_mask.shape)}, expected [B, T]: one row an episode")
    return action_mask if action_mask.dtype == torch.bool else action_mask != 0


def read(tensor: Tensor, mask: Bool[Tensor, "B T"], dtype: torch.dtype) -> Tensor:
    """`tensor` where `mask`, 0 elsewhere. What is off the mask, NaN included, reaches neither value nor gradient."""
    return torch.where(mask, tensor.to(dtype), torch.zeros((), dtype=dtype, device=tensor.device))


def first_rows(episodes: Sequence[Hashable]) -> list[int]:
    """The first row of each episode, given of which one each row is."""
    first: dict[Hashable, int] = {}
    for row, episode in enumerate(episodes):
        first.setdefault(episode, row)
    return list(first.values())
