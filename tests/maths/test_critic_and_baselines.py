"""Value loss, explained variance, running means and group baselines."""

from __future__ import annotations

import json
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from learner.advantages import (
    RunningMeanBaseline,
    episode_rewards,
    explained_variance,
    group_advantages,
    leave_one_out_advantages,
    normalize_by_task,
    skip_observation_gae,
    spread_over_actions,
)
from learner.losses import masked_value_loss
from learner.maths.statistics import EVStatistics

NAN = math.nan


def row(*numbers: float) -> Tensor:
    return torch.tensor([numbers], dtype=torch.float64)


def test_the_advantage_reads_the_critic_after_all_its_updates() -> None:
    """Case A15: values 0, .2, .36; the loss has no half and is not clipped, and targets are constants."""
    weight = torch.zeros((), dtype=torch.float64, requires_grad=True)
    optimizer = torch.optim.SGD([weight], lr=0.1)
    reward, mask, seen = row(1.0), torch.ones(1, 1), [0.0]
    for _ in range(2):
        values = weight.expand(1, 1)
        _, returns = skip_observation_gae(reward, values, mask, lam=1.0)
        optimizer.zero_grad()
        masked_value_loss(values, returns, mask).backward()
        optimizer.step()
        seen.append(weight.item())
    assert seen == pytest.approx([0.0, 0.2, 0.36], abs=1e-6)
    advantages, _ = skip_observation_gae(reward, weight.detach().expand(1, 1), mask, lam=1.0)
    assert advantages.item() == pytest.approx(0.64, abs=1e-6)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_the_value_loss_reads_action_tokens_only(dtype: torch.dtype) -> None:
    """Case A7, for the critic; narrow dtypes are computed in float32."""
    values = row(1.0, NAN, 3.0).to(dtype).requires_grad_()
    loss = masked_value_loss(values, row(0.0, math.inf, 1.0).to(dtype), torch.tensor([[1, 0, 1]]))
    loss.backward()
    assert loss.item() == pytest.approx((1 + 4) / 2)
    assert loss.dtype == (dtype if dtype != torch.bfloat16 else torch.float32)
    assert values.grad is not None
    assert values.grad.tolist() == [[1.0, 0.0, 2.0]]


def test_value_losses_of_micro_batches_add_up() -> None:
    """Case A4, for the critic."""
    values, returns, mask = row(1, 2, 3, 4), row(0, 0, 1, 1), torch.ones(1, 4)
    whole = masked_value_loss(values, returns, mask).item()
    pieces = [masked_value_loss(values[:, s], returns[:, s], mask[:, s], normalizer=4) for s in (slice(3), slice(3, 4))]
    assert sum(p.item() for p in pieces) == pytest.approx(whole)


def test_a_batch_whose_policy_tokens_are_gated_still_trains_the_critic_and_an_empty_one_does_not() -> None:
    """Case A22."""
    values = row(0.5, 0.5).requires_grad_()
    masked_value_loss(values, row(1, 1), torch.ones(1, 2)).backward()
    assert values.grad is not None
    assert values.grad.all()
    empty = masked_value_loss(values, row(1, 1), torch.zeros(1, 2))
    assert empty.item() == 0.0
    assert empty.requires_grad
    assert masked_value_loss(values, row(1, 1), torch.zeros(1, 2), normalizer=0).item() == 0.0


def test_a_critic_that_diverged_is_seen() -> None:
    assert masked_value_loss(row(NAN), row(1), torch.ones(1, 1)).isnan()


def test_explained_variance_of_a_whole_batch() -> None:
    """Case A16."""
    returns, values, mask = row(1, NAN, 1, 1, 0), row(0.5, NAN, 0.7, 0.9, 0.4), torch.tensor([[1, 0, 1, 1, 1]])
    assert explained_variance(returns, values, mask) == pytest.approx(0.403333, abs=1e-6)


@pytest.mark.parametrize("constant", [0.0, 1.0, 0.1, 1 / 3])
def test_constant_returns_are_undefined_not_zero(constant: float) -> None:
    """Case A16: NaN in the log, also where the mean of equal numbers rounds away from them."""
    for size in (1, 3, 7, 1000):
        returns = torch.full((1, size), constant, dtype=torch.float64)
        assert math.isnan(explained_variance(returns, torch.rand(1, size), torch.ones(1, size)))
    assert math.isnan(explained_variance(row(1, 0), row(0, 0), row(0, 0)))
    pieces = [EVStatistics.of(torch.full((1, n), constant), torch.rand(1, n), torch.ones(1, n)) for n in (3, 0, 5)]
    assert math.isnan(EVStatistics.merge_all(pieces).value())


@given(st.integers(0, 2**31), st.lists(st.integers(0, 6), min_size=1, max_size=6), st.sampled_from([0.0, 1e6]))
@settings(max_examples=50, deadline=None)
def test_explained_variance_does_not_depend_on_how_a_batch_is_cut(seed: int, sizes: list[int], offset: float) -> None:
    """Case A16: from sufficient statistics, over micro-batches and over ranks, far from zero too."""
    generator = torch.Generator().manual_seed(seed)
    total = sum(sizes) + 2
    returns = torch.randn(1, total, generator=generator, dtype=torch.float64) + offset
    values = returns + 0.5 * torch.randn(1, total, generator=generator, dtype=torch.float64)
    mask = torch.ones(1, total)
    residual = returns - values
    expected = 1 - (residual.var(correction=0) / returns.var(correction=0)).item()
    cuts = [*sizes, 2]
    parts = [
        EVStatistics.of(r, v, m)
        for r, v, m in zip(returns.split(cuts, 1), values.split(cuts, 1), mask.split(cuts, 1), strict=True)
    ]
    assert EVStatistics.merge_all(parts).value() == pytest.approx(expected, abs=1e-6)
    gathered = torch.stack([part.to_tensor() for part in parts])
    assert EVStatistics.from_tensor(gathered).value() == pytest.approx(expected, abs=1e-6)


def test_the_mean_of_micro_batch_values_is_another_number() -> None:
    """Case A16: what must not be logged."""
    returns, values, mask = row(1, 1, 1, 0), row(0.5, 0.7, 0.9, 0.4), torch.ones(1, 4)
    halves = [explained_variance(returns[:, s], values[:, s], mask[:, s]) for s in (slice(2), slice(2, 4))]
    assert math.isnan(halves[0])
    assert halves[1] != pytest.approx(0.403333, abs=0.1)


def test_running_mean_excludes_or_includes_the_present_reward() -> None:
    """Case A17."""
    for include_current, expected in ((False, 1.0), (True, 127 / 128)):
        baseline = RunningMeanBaseline(128, per_prompt=False, include_current=include_current)
        for _ in range(200):
            assert baseline.advantage(0.0) == 0.0
        assert baseline.advantage(1.0) == pytest.approx(expected, abs=1e-12)


def test_running_mean_forgets_what_left_the_window_and_keeps_prompts_apart() -> None:
    """Case A17: the last 8 of the same prompt."""
    baseline = RunningMeanBaseline(8, per_prompt=True)
    assert baseline.advantage(1.0, "a") == 1.0  # an empty history is a baseline of 0
    assert [baseline.advantage(0.0, "a") for _ in range(8)][-1] == pytest.approx(-1 / 8)
    assert baseline.advantage(0.0, "a") == 0.0  # the 1 has left
    assert baseline.advantage(0.0, "b") == 0.0
    assert RunningMeanBaseline(8, per_prompt=True, include_current=True).advantage(1.0, "a") == 0.0


def test_running_mean_goes_on_where_its_checkpoint_was() -> None:
    first = RunningMeanBaseline(3, per_prompt=True)
    for reward in (1.0, 0.0, 1.0, 1.0):
        first.advantage(reward, "a")
    second = RunningMeanBaseline(3, per_prompt=True)
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    assert [first.advantage(r, "a") for r in (0.0, 1.0)] == [second.advantage(r, "a") for r in (0.0, 1.0)]
    with pytest.raises(ValueError, match="window is 4 here and 3"):
        RunningMeanBaseline(4, per_prompt=True).load_state_dict(first.state_dict())


def test_running_mean_refuses_what_would_poison_it() -> None:
    baseline = RunningMeanBaseline(8, per_prompt=True)
    with pytest.raises(ValueError, match="prompt_id"):
        baseline.advantage(1.0)
    with pytest.raises(ValueError, match="nan"):
        baseline.advantage(NAN, "a")
    with pytest.raises(ValueError, match="window"):
        RunningMeanBaseline(0, per_prompt=False)


def test_a_group_of_equal_rewards_has_no_advantage() -> None:
    """Case A21."""
    assert group_advantages(torch.ones(4), torch.zeros(4)).tolist() == [0.0] * 4
    assert leave_one_out_advantages(torch.ones(4), torch.zeros(4)).tolist() == [0.0] * 4


def test_group_advantages_use_the_population_deviation() -> None:
    rewards = torch.tensor([1, 0, 0, 0], dtype=torch.float64)
    groups = torch.zeros(4, dtype=torch.int64)
    root = math.sqrt(3)
    assert group_advantages(rewards, groups).tolist() == pytest.approx([root, *[-1 / root] * 3], abs=1e-6)
    assert group_advantages(rewards, groups, normalize=False).tolist() == pytest.approx([0.75, *[-0.25] * 3])
    assert leave_one_out_advantages(rewards, groups).tolist() == pytest.approx([1.0, *[-1 / 3] * 3])


def test_groups_are_told_apart_by_any_id_in_any_order() -> None:
    rewards = torch.tensor([1.0, 5.0, 0.0, 3.0])
    for ids in (torch.tensor([7, 2, 7, 2]), ["x", "y", "x", "y"]):
        assert group_advantages(rewards, ids).tolist() == pytest.approx([1, 1, -1, -1], abs=1e-5)
        assert leave_one_out_advantages(rewards, ids).tolist() == pytest.approx([1, 2, -1, -2])


@pytest.mark.parametrize("function", [group_advantages, leave_one_out_advantages])
def test_a_group_of_one_is_an_error_that_names_it(function: object) -> None:
    """Case A21: a group is released only whole."""
    with pytest.raises(ValueError, match="group q2 has one episode"):
        function(torch.ones(3), ["q1", "q2", "q1"])  # type: ignore[operator]
    with pytest.raises(ValueError, match="group_ids has 2 entries, expected 3"):
        function(torch.ones(3), ["q1", "q2"])  # type: ignore[operator]


def test_episode_numbers_go_to_action_tokens_and_back() -> None:
    mask = torch.tensor([[1, 0, 1], [0, 1, 0]])
    rewards = torch.tensor([[0.5, NAN, 0.5], [NAN, 2.0, NAN]])
    assert episode_rewards(rewards, mask).tolist() == [1.0, 2.0]
    assert spread_over_actions(torch.tensor([1.0, 2.0]), mask).tolist() == [[1, 0, 1], [0, 2, 0]]


def test_task_normalisation_gives_each_task_unit_scale_over_its_tokens() -> None:
    mask = torch.tensor([[1, 1, 0], [1, 0, 1], [1, 1, 1], [1, 1, 1]])
    advantages = torch.tensor([[1, 1, NAN], [3, NAN, 3], [10, 10, 10], [10, 10, 10]], dtype=torch.float64)
    out = normalize_by_task(advantages, mask, ["math", "math", "shell", "shell"])
    expected = [[-1, -1, 0], [1, 0, 1], [0, 0, 0], [0, 0, 0]]
    torch.testing.assert_close(out, torch.tensor(expected, dtype=torch.float64), rtol=0, atol=1e-6)
