"""Moments that rest on the host must be beside their weights when they are needed, and only then.

No accelerator is needed for where tensors lie: torch's fake tensors know a device without having it.
"""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from learner.config import OptimizerConfig, RecipeError, load_recipe
from learner.model.optimizer import moments_at_hand, rest_moments
from learner.plan.memory import Architecture, Parameters, optimizer_bytes, resting_usage, update_usage
from learner.plan.phases import make_plan

MOMENTS = ("exp_avg", "exp_avg_sq")


def placed(optimizer: torch.optim.Optimizer) -> set[str]:
    return {state[key].device.type for state in optimizer.state.values() for key in MOMENTS}


def on_a_device(count: int = 2) -> torch.optim.Optimizer:
    weights = [nn.Parameter(torch.ones(3, 2, device="cuda")) for _ in range(count)]
    for weight in weights:
        weight.grad = torch.ones(3, 2, device="cuda")
    return torch.optim.AdamW(weights, foreach=False, fused=False)


def fails(*_: object) -> None:
    raise RuntimeError("the step failed")


def test_moments_travel_for_the_step_alone() -> None:
    with FakeTensorMode():
        optimizer = on_a_device()
        seen: list[set[str]] = []
        optimizer.register_step_pre_hook(lambda optimizer, *_: seen.append(placed(optimizer)))
        for _ in range(2):
            with moments_at_hand(optimizer, offload=True):
                optimizer.step()
            assert placed(optimizer) == {"cpu"}
        assert seen == [set(), {"cuda"}]  # there is none before the first step
        assert all(state["step"].device.type == "cpu" for state in optimizer.state.values())


def test_moments_rest_where_a_step_fails_and_when_a_checkpoint_brought_them() -> None:
    with FakeTensorMode():
        optimizer = on_a_device()
        optimizer.step()
        assert placed(optimizer) == {"cuda"}
        rest_moments(optimizer)
        assert placed(optimizer) == {"cpu"}
        optimizer.register_step_pre_hook(fails)
        with pytest.raises(RuntimeError, match="the step failed"), moments_at_hand(optimizer, offload=True):
            optimizer.step()
        assert placed(optimizer) == {"cpu"}


def test_without_the_key_nothing_moves() -> None:
    with FakeTensorMode():
        optimizer = on_a_device()
        with moments_at_hand(optimizer, offload=False):
            optimizer.step()
        assert placed(optimizer) == {"cuda"}


def test_the_plan_counts_moments_for_the_step_alone() -> None:
    parameters = Parameters(trained=10**6, frozen=0, largest_layer=10**5, outside_layers=10**4)
    model = Architecture(2, 8, 2, 1, 4, 8, 0, 0, 100, 1000)
    sizes = {"weight_bytes": 4, "shards": 1}
    update = {**sizes, "tokens": 1, "positions": 1, "value_bytes": 4, "recompute": False}
    moments = optimizer_bytes(parameters.trained, moment_bytes=4, shards=1)
    here = update_usage(parameters, model, **update)
    away = update_usage(parameters, model, **update, offload=True)
    assert (here.optimizer, away.optimizer) == (moments, 0)
    assert away.activations == here.activations + moments  # a short micro-batch: the step is the peak
    assert resting_usage(parameters, **sizes).total - resting_usage(parameters, **sizes, offload=True).total == moments
    long = {**update, "tokens": 10**6}
    assert update_usage(parameters, model, **long).total - update_usage(
        parameters, model, **long, offload=True
    ).total == (moments)


def test_a_plan_says_what_the_host_keeps_and_a_cpu_has_nothing_to_offload() -> None:
    words = ["hardware.learner_gpus=1", "hardware.memory_gib=8"]
    rows = {row.phase: row.usage.total for row in make_plan(load_recipe(None, words)).rows}
    away = make_plan(load_recipe(None, [*words, "learner.policy.offload=true", "learner.critic.offload=true"]))
    assert away.host > 0
    resting = [row for row in away.rows if row.phase.startswith("RL, ") and row.phase != "RL, loading"]
    assert resting
    assert all(row.usage.total < rows[row.phase] for row in resting)
    for key in ("learner.policy", "learner.critic", "sft.optimizer"):
        with pytest.raises(RecipeError, match=f"{key}.offload: on a CPU"):
            load_recipe(None, [f"{key}.offload=true"])


def test_small_moments_stay_where_they_are() -> None:
    with pytest.raises(ValueError, match="offload is for kind 'adamw'"):
        OptimizerConfig(lr=1.0, kind="adamw_8bit", offload=True)
    with pytest.raises(RecipeError, match="offload is for kind 'adamw'"):
        load_recipe(None, ["learner.policy.offload=true", "learner.policy.kind=adamw_8bit"])
