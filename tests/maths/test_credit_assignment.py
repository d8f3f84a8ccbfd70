"""GAE over action tokens and turns, by the numbers worked out by hand and against a plain loop."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from learner.advantages import (
    length_adaptive_lambda,
    next_action_index,
    skip_observation_gae,
    step_level_gae,
    turn_counts,
    vtrace,
)

NAN = math.nan
MASK = torch.tensor([[1, 1, 0, 0, 1, 1]])


def row(*numbers: float) -> Tensor:
    return torch.tensor([numbers], dtype=torch.float64)


def close(actual: Tensor, *expected: float) -> None:
    torch.testing.assert_close(actual, row(*expected), rtol=0, atol=1e-6)


REWARD = row(0, 0, 0, 0, 0, 1)


@pytest.mark.parametrize("observation", [(9, 9), (-77, 1e6), (NAN, math.inf)])
def test_credit_crosses_an_observation_unread(observation: tuple[float, float]) -> None:
    """Case A9."""
    values = row(0.2, 0.4, *observation, 0.6, 0.5)
    rewards = row(0, 0, *observation, 0, 1)
    advantages, returns = skip_observation_gae(rewards, values, MASK, lam=0.5)
    close(advantages, 0.3375, 0.275, 0, 0, 0.15, 0.5)
    close(returns, 0.5375, 0.675, 0, 0, 0.75, 1.0)


@given(st.lists(st.floats(-1e3, 1e3), min_size=6, max_size=6))
@settings(max_examples=25, deadline=None)
def test_with_lambda_one_returns_are_the_reward_whatever_the_critic_says(values: list[float]) -> None:
    """Case A10."""
    close(skip_observation_gae(REWARD, row(*values), MASK, lam=1.0)[1], 1, 1, 0, 0, 1, 1)


def test_lambda_decays_once_a_token_not_over_the_observation() -> None:
    """Case A11."""
    advantages, _ = skip_observation_gae(REWARD, row(0.5, 0.5, 0.9, 0.1, 0.6, 0.6), MASK, lam=0.9)
    close(advantages, 0.3816, 0.424, 0, 0, 0.36, 0.4)


def test_an_episode_that_ends_on_an_observation_is_terminal_at_its_last_action() -> None:
    """Case A12."""
    mask, values, rewards = torch.tensor([[1, 1, 0, 0]]), row(0.5, 0.5, 0.9, 0.1), row(0, 1, 0, 0)
    close(skip_observation_gae(rewards, values, mask, lam=0.9)[0], 0.45, 0.5, 0, 0)
    close(skip_observation_gae(rewards, values, mask, lam=1.0)[1], 1, 1, 0, 0)


def test_adaptive_lambda_counts_action_tokens_only() -> None:
    """Case A13."""
    lam = length_adaptive_lambda(MASK.sum(1))
    assert lam.tolist() == pytest.approx([5 / 6], abs=1e-12)
    advantages, _ = skip_observation_gae(REWARD, row(0.2, 0.4, 9, 9, 0.6, 0.5), MASK, lam=lam)
    assert advantages[0, 0].item() == pytest.approx(0.586574, abs=1e-6)


def test_adaptive_lambda_stays_within_zero_and_one() -> None:
    """Case A13: l = 1 is 1/3, alpha * l < 1 is 0, and so is an episode without an action token."""
    assert length_adaptive_lambda(torch.tensor([1, 4, 0])).tolist() == pytest.approx([1 / 3, 5 / 6, 0])
    assert length_adaptive_lambda(torch.tensor([1, 2]), alpha=0.4).tolist() == [0.0, 0.0]
    assert 1 - length_adaptive_lambda(torch.tensor([40_000])).item() == pytest.approx(1 / 60_000, rel=1e-9)
    with pytest.raises(ValueError, match="alpha"):
        length_adaptive_lambda(torch.tensor([1]), alpha=0.0)


def test_a_truncated_episode_may_go_on_from_a_bootstrap() -> None:
    """Case A14."""
    values, rewards, mask = row(0.3, 0.4), row(0, 0), torch.ones(1, 2)
    advantages, returns = skip_observation_gae(rewards, values, mask, lam=1.0, bootstrap=torch.tensor([0.8]).double())
    close(advantages, 0.5, 0.4)
    close(returns, 0.8, 0.8)
    close(skip_observation_gae(rewards, values, mask, lam=1.0)[0], -0.3, -0.4)


def test_a_bootstrap_is_read_only_behind_a_last_action() -> None:
    mask = torch.tensor([[1, 1, 0], [0, 0, 0], [1, 0, 1]])
    values = torch.tensor([[0.3, 0.4, NAN], [NAN] * 3, [0.1, NAN, 0.2]], dtype=torch.float64)
    bootstrap = torch.tensor([0.8, NAN, 0.5], dtype=torch.float64)
    _, returns = skip_observation_gae(torch.zeros(3, 3), values, mask, lam=1.0, bootstrap=bootstrap)
    expected = torch.tensor([[0.8, 0.8, 0], [0, 0, 0], [0.5, 0, 0.5]], dtype=torch.float64)
    torch.testing.assert_close(returns, expected)


TURNS = dict(values=row(0.2, 0.4, NAN, 0.6, 0.8), action_mask=torch.tensor([[1, 1, 0, 1, 1]]))


def test_step_level_and_token_level_advantages_differ() -> None:
    """Case A18."""
    rewards, turn_ids = row(0, 0, NAN, 0, 1), torch.tensor([[0, 0, 99, 1, 1]])
    average = step_level_gae(rewards, turn_ids=turn_ids, lam=0.5, gamma=1.0, pooling="average", **TURNS)
    close(average, 0.55, 0.55, 0, 0.3, 0.3)
    last = step_level_gae(rewards, turn_ids=turn_ids, lam=0.5, gamma=1.0, pooling="last", **TURNS)
    close(last, 0.5, 0.5, 0, 0.2, 0.2)
    close(skip_observation_gae(rewards, lam=0.5, **TURNS)[0], 0.375, 0.35, 0, 0.3, 0.2)


def test_a_turns_rewards_are_summed_and_l_counts_turns() -> None:
    turn_ids = torch.tensor([[3, 3, 0, 7, 7]])
    rewards = row(0.25, 0.25, NAN, 0.5, 0.5)
    advantages = step_level_gae(rewards, turn_ids=turn_ids, lam=1.0, gamma=1.0, pooling="last", **TURNS)
    close(advantages, 1.5 - 0.4, 1.5 - 0.4, 0, 1 - 0.8, 1 - 0.8)
    assert turn_counts(TURNS["action_mask"], turn_ids).tolist() == [2]
    with_bootstrap = step_level_gae(
        rewards, turn_ids=turn_ids, lam=1.0, gamma=1.0, pooling="last", bootstrap=torch.tensor([2.0]), **TURNS
    )
    close(with_bootstrap, 3.1, 3.1, 0, 2.2, 2.2)


def test_adjacent_turns_without_an_observation_between_are_two() -> None:
    turn_ids, mask = torch.tensor([[0, 0, 1]]), torch.ones(1, 3)
    assert turn_counts(mask, turn_ids).tolist() == [2]
    assert turn_counts(torch.zeros(1, 3), turn_ids).tolist() == [0]


def test_an_unknown_pooling_is_named() -> None:
    with pytest.raises(ValueError, match="pooling"):
        step_level_gae(
            REWARD,
            REWARD,
            MASK,
            torch.zeros(1, 6),
            lam=1.0,
            gamma=1.0,
            pooling="first",  # type: ignore[arg-type]
        )


def test_next_action_index_bridges_the_observation() -> None:
    assert next_action_index(MASK).tolist() == [[1, 4, -1, -1, 5, -1]]
    assert next_action_index(torch.tensor([[0, 1, 0], [0, 0, 0], [1, 0, 0]])).tolist() == [[-1] * 3] * 3
    assert next_action_index(MASK.bool()).dtype == torch.int64
    assert next_action_index(torch.zeros(0, 4)).shape == (0, 4)
    assert next_action_index(torch.zeros(2, 0)).shape == (2, 0)


def test_a_mask_is_never_taken_for_a_prefix() -> None:
    """Case B3: [1,1,0,0,1,1] and [1,1,1,1,0,0] have four action tokens each and different advantages."""
    values = row(0.2, 0.4, 0.3, 0.1, 0.6, 0.5)
    segmented = skip_observation_gae(torch.zeros(1, 6), values, MASK, lam=0.5)[0]
    prefix = skip_observation_gae(torch.zeros(1, 6), values, torch.tensor([[1, 1, 1, 1, 0, 0]]), lam=0.5)[0]
    assert not torch.allclose(segmented, prefix)
    assert segmented[0, 2:4].tolist() == [0.0, 0.0]


def test_padding_that_shares_its_id_with_eos_is_off_the_mask() -> None:
    """Case B7: padding is known by the mask, not by its token, and longer padding changes nothing."""
    short = skip_observation_gae(REWARD, row(0.2, 0.4, 9, 9, 0.6, 0.5), MASK, lam=0.5)[0]
    pad = torch.full((1, 3), NAN, dtype=torch.float64)
    padded_mask = torch.cat([MASK, torch.zeros(1, 3, dtype=torch.int64)], 1)
    padded = skip_observation_gae(
        torch.cat([REWARD, pad], 1), torch.cat([row(0.2, 0.4, 9, 9, 0.6, 0.5), pad], 1), padded_mask, lam=0.5
    )[0]
    assert padded[:, :6].tolist() == short.tolist()
    assert padded[:, 6:].tolist() == [[0.0] * 3]


@pytest.mark.parametrize(
    ("given", "computed"),
    [(torch.float64, torch.float64), (torch.float32, torch.float32), (torch.bfloat16, torch.float32)],
)
def test_values_dtype_is_kept_or_widened(given: torch.dtype, computed: torch.dtype) -> None:
    values = row(0.2, 0.4, 9, 9, 0.6, 0.5).to(given)
    for mask in (MASK, MASK.bool(), MASK.float()):
        advantages, returns = skip_observation_gae(REWARD.to(given), values, mask, lam=0.5)
        assert advantages.dtype == returns.dtype == computed
        torch.testing.assert_close(advantages, row(0.3375, 0.275, 0, 0, 0.15, 0.5).to(computed), rtol=0, atol=3e-3)


def test_wrong_shapes_are_named() -> None:
    with pytest.raises(ValueError, match="values has shape"):
        skip_observation_gae(REWARD, REWARD[:, :5], MASK, lam=0.5)
    with pytest.raises(ValueError, match="lam has shape"):
        skip_observation_gae(REWARD, REWARD, MASK, lam=torch.ones(3))
    with pytest.raises(ValueError, match="bootstrap has shape"):
        skip_observation_gae(REWARD, REWARD, MASK, lam=1.0, bootstrap=torch.ones(1, 1))


@pytest.mark.parametrize("shape", [(0, 5), (3, 0), (2, 4)])
def test_batches_without_action_tokens_give_zeros(shape: tuple[int, int]) -> None:
    nothing = torch.full(shape, NAN)
    advantages, returns = skip_observation_gae(nothing, nothing, torch.zeros(shape), lam=0.9)
    steps = step_level_gae(nothing, nothing, torch.zeros(shape), torch.zeros(shape), lam=0.9, gamma=1.0)
    vs, policy = vtrace(nothing, nothing, nothing, nothing, torch.zeros(shape))
    for out in (advantages, returns, steps, vs, policy):
        assert out.shape == shape
        assert not out.any()


@st.composite
def episodes(draw: st.DrawFn) -> dict[str, Tensor]:
    """A batch of 1-4 episodes of up to 12 tokens, poisoned off the mask."""
    rows, length = draw(st.integers(1, 4)), draw(st.integers(1, 12))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    mask = torch.rand(rows, length, generator=generator) < draw(st.sampled_from([0.2, 0.5, 0.9, 1.0]))

    def numbers() -> Tensor:
        return torch.randn(rows, length, generator=generator, dtype=torch.float64).masked_fill(~mask, NAN)

    return {
        "mask": mask,
        "rewards": numbers(),
        "values": numbers(),
        "logprobs": numbers(),
        "rollout": numbers(),
        "lam": torch.rand(rows, generator=generator, dtype=torch.float64),
        "bootstrap": torch.randn(rows, generator=generator, dtype=torch.float64),
    }


def plain_gae(rewards: list[float], values: list[float], gamma: float, lam: float, bootstrap: float) -> list[float]:
    """The textbook loop over a sequence that has no observations."""
    out, following, advantage = [0.0] * len(values), bootstrap, 0.0
    for t in reversed(range(len(values))):
        advantage = rewards[t] + gamma * following - values[t] + gamma * lam * advantage
        out[t], following = advantage, values[t]
    return out


@given(episodes(), st.sampled_from([1.0, 0.9, 0.0]))
@settings(max_examples=60, deadline=None)
def test_skipping_observations_is_plain_gae_on_the_actions_alone(batch: dict[str, Tensor], gamma: float) -> None:
    mask = batch["mask"]
    advantages, returns = skip_observation_gae(
        batch["rewards"], batch["values"], mask, gamma=gamma, lam=batch["lam"], bootstrap=batch["bootstrap"]
    )
    for b in range(mask.shape[0]):
        here = mask[b]
        rewards, values = batch["rewards"][b][here].tolist(), batch["values"][b][here].tolist()
        expected = plain_gae(rewards, values, gamma, batch["lam"][b].item(), batch["bootstrap"][b].item())
        assert advantages[b][here].tolist() == pytest.approx(expected, abs=1e-9)
        assert returns[b][here].tolist() == pytest.approx([a + v for a, v in zip(expected, values, strict=True)])
        assert not advantages[b][~here].any()
        assert not returns[b][~here].any()


@given(episodes())
@settings(max_examples=40, deadline=None)
def test_following_next_action_index_gives_the_same_recursion(batch: dict[str, Tensor]) -> None:
    mask, following = batch["mask"], next_action_index(batch["mask"])
    lam = 0.7
    advantages, _ = skip_observation_gae(batch["rewards"], batch["values"], mask, lam=lam)
    for b, t in mask.nonzero().tolist():
        n = int(following[b, t])
        assert n == -1 or (n > t and mask[b, n] and not mask[b, t + 1 : n].any())
        value, ahead = (batch["values"][b, n], advantages[b, n]) if n >= 0 else (torch.zeros(()), torch.zeros(()))
        delta = batch["rewards"][b, t] + value - batch["values"][b, t]
        assert advantages[b, t].item() == pytest.approx((delta + lam * ahead).item(), abs=1e-9)


@given(episodes(), st.sampled_from([1.0, 0.9]), st.sampled_from([0.5, 1.0, 2.0, math.inf]))
@settings(max_examples=40, deadline=None)
def test_vtrace_is_the_recursion_of_its_paper(batch: dict[str, Tensor], gamma: float, bar: float) -> None:
    mask = batch["mask"]
    vs, policy = vtrace(
        batch["logprobs"], batch["rollout"], batch["rewards"], batch["values"], mask,
        gamma=gamma, rho_bar=bar, c_bar=1.0, bootstrap=batch["bootstrap"],
    )  # fmt: skip
    for b in range(mask.shape[0]):
        value_ahead = target_ahead = batch["bootstrap"][b].item()
        for t in reversed(mask[b].nonzero().squeeze(1).tolist()):
            ratio = math.exp(batch["logprobs"][b, t].item() - batch["rollout"][b, t].item())
            rho, c = min(bar, ratio), min(1.0, ratio)
            reward, value = batch["rewards"][b, t].item(), batch["values"][b, t].item()
            advantage = rho * (reward + gamma * target_ahead - value)
            target = value + rho * (reward + gamma * value_ahead - value) + gamma * c * (target_ahead - value_ahead)
            assert vs[b, t].item() == pytest.approx(target, rel=1e-9, abs=1e-9)
            assert policy[b, t].item() == pytest.approx(advantage, rel=1e-9, abs=1e-9)
            value_ahead, target_ahead = value, target


def test_on_policy_vtrace_is_gae_with_lambda_one() -> None:
    values, logprobs = row(0.2, 0.4, NAN, NAN, 0.6, 0.5), row(-1, -2, NAN, NAN, -1, -3)
    vs, policy = vtrace(logprobs, logprobs, REWARD, values, MASK)
    advantages, returns = skip_observation_gae(REWARD, values, MASK, lam=1.0)
    torch.testing.assert_close(vs, returns)
    torch.testing.assert_close(policy, advantages)


@pytest.mark.parametrize(("pi", "mu"), [(-1.0, -math.inf), (-math.inf, -1.0), (-math.inf, -math.inf), (1000.0, -1e3)])
def test_vtrace_is_finite_for_ratios_that_are_not(pi: float, mu: float) -> None:
    """Case A6, in V-trace."""
    for bar in (1.0, math.inf):
        vs, policy = vtrace(row(-1, pi), row(-1, mu), row(0, 1), row(0.5, 0.5), torch.ones(1, 2), rho_bar=bar)
        assert vs.isfinite().all()
        assert policy.isfinite().all()


@given(episodes())
@settings(max_examples=15, deadline=None)
def test_gradients_are_right_and_zero_off_the_mask(batch: dict[str, Tensor]) -> None:
    """The NaN of an observation must not come back through autograd."""
    mask, clean = batch["mask"], torch.where(batch["mask"], batch["values"], 0.0)
    turn_ids = torch.arange(mask.shape[1]).expand(mask.shape) // 3

    def everything(values: Tensor) -> tuple[Tensor, ...]:
        shared = (batch["rewards"], values, mask)
        return (
            *skip_observation_gae(*shared, lam=batch["lam"], bootstrap=batch["bootstrap"]),
            step_level_gae(*shared, turn_ids, gamma=0.9, lam=0.5),
            step_level_gae(*shared, turn_ids, gamma=0.9, lam=0.5, pooling="last"),
            *vtrace(batch["logprobs"], batch["rollout"], *shared),
        )

    assert torch.autograd.gradcheck(everything, clean.clone().requires_grad_())
    poisoned = batch["values"].clone().requires_grad_()
    torch.stack([out.sum() for out in everything(poisoned)]).sum().backward()
    assert poisoned.grad is not None
    assert poisoned.grad.isfinite().all()
    assert not poisoned.grad[~mask].any()


def test_a_hundred_thousand_tokens_are_summed_accurately_in_float32() -> None:
    """128K context: the terminal reward must reach the first token undamaged by rounding."""
    length = 131_072
    generator = torch.Generator().manual_seed(0)
    values = torch.rand(2, length, generator=generator)
    mask = torch.ones(2, length, dtype=torch.bool)
    rewards = torch.zeros(2, length)
    rewards[:, -1] = 1.0
    _, returns = skip_observation_gae(rewards, values, mask, lam=1.0)
    assert (returns - 1).abs().max() < 1e-5
    lam = length_adaptive_lambda(mask.sum(1))
    advantages, _ = skip_observation_gae(rewards, values, mask, lam=lam)
    first = values[0].double()
    delta = torch.cat([first[1:], torch.ones(1).double()]) - first
    expected = (delta * lam[0] ** torch.arange(length, dtype=torch.float64)).sum()
    assert advantages[0, 0].item() == pytest.approx(expected.item(), abs=1e-5)
