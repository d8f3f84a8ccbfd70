"""What a recipe's optimiser is, and that its kernel does not change what is learned."""

from __future__ import annotations

import importlib.util

import pytest
import torch
from torch import nn

from learner.config import OptimizerConfig, RecipeError
from learner.model.memory import keep_freed_memory
from learner.model.optimizer import build_optimizer


@pytest.mark.parametrize("decay", [0.0, 0.1])
def test_the_fused_kernel_takes_the_steps_of_the_plain_one(decay: float) -> None:
    """Case P8: it is six times as fast on a CPU."""
    config = OptimizerConfig(lr=1e-3, weight_decay=decay)
    generator = torch.Generator().manual_seed(0)
    start = [torch.randn(50, 3, generator=generator), torch.randn(7, generator=generator)]
    weights = [[nn.Parameter(t.clone()) for t in start] for _ in range(2)]
    fused = build_optimizer(weights[0], config)
    plain = torch.optim.AdamW(
        weights[1], lr=config.lr, betas=config.betas, eps=config.eps, weight_decay=decay, foreach=False
    )
    assert fused.defaults["fused"]
    for _ in range(5):
        gradients = [torch.randn(t.shape, generator=generator) for t in start]
        for mine, optimizer in zip(weights, (fused, plain), strict=True):
            for weight, gradient in zip(mine, gradients, strict=True):
                weight.grad = gradient.clone()
            optimizer.step()
    for mine, other in zip(*weights, strict=True):
        torch.testing.assert_close(mine, other, atol=1e-7, rtol=3e-7)
    for mine, other in zip(*([s["exp_avg"] for s in o.state.values()] for o in (fused, plain)), strict=True):
        torch.testing.assert_close(mine, other, atol=1e-7, rtol=3e-7)


@pytest.mark.skipif(importlib.util.find_spec("torchao") is not None, reason="torchao is there")
def test_moments_of_eight_bits_name_the_package_that_is_missing() -> None:
    with pytest.raises(RecipeError, match="needs the package torchao: pip install torchao"):
        build_optimizer([nn.Parameter(torch.zeros(2))], OptimizerConfig(lr=1.0, kind="adamw_8bit"))


def test_memory_that_is_freed_is_kept_where_the_c_library_can() -> None:
    assert keep_freed_memory() in (True, False)
    assert keep_freed_memory() == keep_freed_memory()
