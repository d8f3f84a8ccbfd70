"""The optimiser that a recipe asks for, by name."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from learner.config import OptimizerConfig, RecipeError
from learner.parallel.sharding import by_mesh


def build_optimizer(parameters: list[nn.Parameter], config: OptimizerConfig) -> Any:
    """AdamW over `parameters`; `RecipeError` where the package of its kind is missing."""
    settings: dict[str, Any] = {
        "lr": config.lr,
        "betas": config.betas,
        "eps": config.eps,
        "weight_decay": config.weight_decay,
    }
    if config.kind == "adamw":
        if any(isinstance(p, DTensor) for p in parameters):  # one kernel takes no tensors of different meshes
            return torch.optim.AdamW(by_mesh(parameters), **settings)
        return torch.optim.AdamW(parameters, fused=True, **settings)
    try:
        from torchao.optim import AdamW8bit
    except ImportError as error:
        raise RecipeError(
            f"optimizer kind {config.kind!r} needs the package torchao: pip install torchao, or choose 'adamw'"
        ) from error
    return AdamW8bit(parameters, bf16_stochastic_round=True, **settings)


@contextlib.contextmanager
def moments_at_hand(optimizer: Any, *, offload: bool) -> Iterator[None]:
    """With `offload` moments are beside their weights within the block, and in the host's memory before and after it.

    An optimiser that has not stepped yet makes them on the weights' device.
    """
    if not offload:
        yield
        return
    _move_moments(optimizer, None)
    try:
        yield
    finally:
        rest_moments(optimizer)


def rest_moments(optimizer: Any) -> None:
    """Have moments, which a checkpoint may just have filled, in the host's memory."""
    _move_moments(optimizer, torch.device("cpu"))


def _move_moments(optimizer: Any, device: torch.device | None) -> None:
    """To `device`, None: to that of the weight. What is no moment (a count of steps) stays."""
    for weight, state in optimizer.state.items():
        for key, value in state.items():
            if isinstance(value, Tensor) and value.shape == weight.shape and value.dim():
                state[key] = value.to(device or weight.device)
