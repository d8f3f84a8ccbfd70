"""The shapes written in the signatures, checked against what goes in and what comes out."""

from __future__ import annotations

import inspect
import types
import typing
from collections.abc import Callable
from typing import Any

import jaxtyping
import pytest
import torch
from torch import Tensor

from learner import advantages, losses

B, T, N = 3, 5, 4
MASK = torch.tensor([[1, 1, 0, 1, 1], [1, 0, 0, 0, 0], [0, 0, 0, 0, 0]])


def floats(*shape: int) -> Tensor:
    return torch.rand(*shape, dtype=torch.float64) - 2


TOKENS = {"logprobs": floats(B, T), "rollout_logprobs": floats(B, T), "old_logprobs": floats(B, T),
          "advantages": floats(B, T), "rewards": floats(B, T), "values": floats(B, T), "returns": floats(B, T),
          "action_mask": MASK, "turn_ids": torch.zeros(B, T, dtype=torch.int64), "action_counts": MASK.sum(1),
          "group_ids": torch.tensor([0, 0, 1, 1]), "task_ids": ["a", "b", "a"], "episode_advantages": floats(B),
          "lam": torch.full((B,), 0.9).double(), "bootstrap": floats(B), "eps_low": 0.3, "eps_high": 5.0}  # fmt: skip

FUNCTIONS = [
    *(getattr(advantages, name) for name in advantages.__all__ if name[0].islower()),
    losses.dis_gate,
    losses.dis_policy_loss,
    losses.ppo_clip_loss,
    losses.gspo_loss,
    losses.icepop_loss,
    losses.reinforce_loss,
    losses.masked_value_loss,
]


def hints_of(thing: Any) -> dict[str, Any]:
    """Resolve annotations; the modules import jaxtyping for type checkers only."""
    module = inspect.getmodule(thing)
    return typing.get_type_hints(thing, globalns={**vars(module), **vars(jaxtyping), "Tensor": Tensor})


def matches(value: Any, hint: Any) -> bool:
    """Whether `value` is of `hint`, where that says something about tensors; binds axis names as it goes."""
    origin = typing.get_origin(hint)
    if origin in (typing.Union, types.UnionType):
        return any(matches(value, option) for option in typing.get_args(hint))
    if origin is tuple:
        return all(matches(v, h) for v, h in zip(value, typing.get_args(hint), strict=True))
    if isinstance(value, tuple) and hasattr(hint, "_fields"):
        return all(matches(getattr(value, f), h) for f, h in hints_of(hint).items())
    if isinstance(value, losses.PolicyLoss):
        return matches(value.loss, hints_of(losses.PolicyLoss)["loss"])
    if isinstance(value, Tensor):
        return isinstance(hint, type) and isinstance(value, hint)
    return not (isinstance(hint, type) and issubclass(hint, Tensor))


@pytest.mark.parametrize("function", FUNCTIONS, ids=lambda f: f.__name__)
def test_shapes_are_those_of_the_signature(function: Callable[..., Any]) -> None:
    arguments = {k: TOKENS[k] for k in inspect.signature(function).parameters if k in TOKENS}
    if "group" in function.__name__ or "leave_one_out" in function.__name__:
        arguments["rewards"] = floats(N)
    hints = hints_of(function)
    with jaxtyping.jaxtyped("context"):
        for name, value in arguments.items():
            assert matches(value, hints[name]), f"{name} is not {hints[name]}"
        assert matches(function(**arguments), hints["return"])


def test_this_check_can_fail() -> None:
    hints = hints_of(losses.masked_value_loss)
    with jaxtyping.jaxtyped("context"):
        assert matches(floats(B, T), hints["values"])
        assert not matches(floats(B, T + 1), hints["returns"])
        assert not matches(floats(B), hints["return"])


def test_positional_order_is_the_contract() -> None:
    def names(function: Callable[..., Any]) -> list[str]:
        parameters = inspect.signature(function).parameters.values()
        return [p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD]

    tokens = ["logprobs", "rollout_logprobs", "advantages", "action_mask"]
    assert names(losses.dis_policy_loss) == tokens
    for function in (losses.ppo_clip_loss, losses.gspo_loss, losses.icepop_loss):
        assert names(function) == [*tokens, "old_logprobs"]
    assert names(losses.masked_value_loss) == ["values", "returns", "action_mask"]
    assert names(advantages.skip_observation_gae) == ["rewards", "values", "action_mask"]
    assert names(advantages.step_level_gae) == ["rewards", "values", "action_mask", "turn_ids"]
    assert names(advantages.vtrace) == ["logprobs", "rollout_logprobs", "rewards", "values", "action_mask"]
    assert names(advantages.explained_variance) == ["returns", "values", "action_mask"]
