"""PPO, GSPO, IcePop and plain policy gradient: the comparisons must be the methods they are named after."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from learner.losses import (
    PolicyLoss,
    dis_policy_loss,
    gspo_loss,
    icepop_loss,
    masked_value_loss,
    ppo_clip_loss,
    reinforce_loss,
    sequence_trust_loss,
)

NAN, INF = math.nan, math.inf
Loss = Callable[..., PolicyLoss]
EPS = {"eps_low": 0.2, "eps_high": 0.28}


def row(*numbers: float) -> Tensor:
    return torch.tensor([numbers], dtype=torch.float64)


def run(loss: Loss, logprobs: Tensor, old: Tensor, advantages: Tensor, **options: object) -> tuple[PolicyLoss, Tensor]:
    leaf = logprobs.clone().requires_grad_()
    arguments = {"rollout_logprobs": old, "action_mask": torch.ones_like(logprobs), **EPS, **options}
    out = loss(leaf, advantages=advantages, old_logprobs=old, **arguments)
    out.loss.backward()
    assert leaf.grad is not None
    return out, leaf.grad


def test_ppo_clips_one_side_only_and_keeps_the_gradient_of_the_other() -> None:
    ratio = row(0.5, 0.5, 1.0, 2.0, 2.0)
    advantages = row(1, -1, 1, 1, -1)
    out, gradient = run(ppo_clip_loss, ratio.log(), torch.zeros_like(ratio), advantages)
    assert out.loss.item() == pytest.approx(-(0.5 - 0.8 + 1.0 + 1.28 - 2.0) / 5)
    assert (-5 * gradient).tolist() == [pytest.approx([0.5, 0, 1.0, 0, -2.0])]
    assert out.metrics == {"action_tokens": 5, "gated_low": 1, "gated_high": 1, "nonfinite": 0}


def test_dis_gates_what_ppo_lets_through() -> None:
    """The difference that the method is about: a stale token far outside, on PPO's open side."""
    logprobs, old, advantages = row(math.log(8)), row(0.0), row(-1.0)
    _, through_ppo = run(ppo_clip_loss, logprobs, old, advantages)
    assert through_ppo.item() == pytest.approx(8.0)
    leaf = logprobs.clone().requires_grad_()
    dis_policy_loss(leaf, old, advantages, torch.ones(1, 1), eps_low=0.3, eps_high=5.0).loss.backward()
    assert leaf.grad is not None
    assert leaf.grad.item() == 0.0


def test_gspo_has_one_length_normalised_ratio_an_episode() -> None:
    logprobs = torch.tensor([[-1.0, -1.2, NAN], [-1.0, -1.0, -0.4]], dtype=torch.float64)
    old = torch.tensor([[-1.1, -1.0, NAN], [-1.0, -1.0, -1.0]], dtype=torch.float64)
    mask = torch.tensor([[1, 1, 0], [1, 1, 1]])
    advantages = torch.tensor([[2.0, 2.0, NAN], [1.0, 1.0, 1.0]], dtype=torch.float64)
    out, gradient = run(gspo_loss, logprobs, old, advantages, action_mask=mask, aggregation="sequence_mean",
                        eps_low=0.1, eps_high=0.15)  # fmt: skip
    s = [math.exp(-0.1 / 2), math.exp(0.6 / 3)]  # the second, 1.221, is clipped at 1.15
    assert out.loss.item() == pytest.approx(-(2 * s[0] + 1.15) / 2)
    each = -2 * s[0] / 2 / 2
    assert gradient.tolist() == [pytest.approx([each, each, 0]), [0, 0, 0]]
    assert out.metrics["gated_high"] == 3


def test_gspo_token_form_has_the_gradient_of_the_sequence_form() -> None:
    logprobs, old = row(-1, -1.3, -0.7), row(-1.1, -1.2, -0.8)
    leaf = logprobs.clone().requires_grad_()
    (-((leaf - old).mean().exp() * 1.7)).backward()
    _, gradient = run(gspo_loss, logprobs, old, torch.full_like(old, 1.7), aggregation="sequence_mean")
    assert leaf.grad is not None
    torch.testing.assert_close(gradient, leaf.grad)


def test_icepop_masks_the_mismatch_of_the_engines_on_a_closed_interval() -> None:
    mismatch = row(0.49, 0.5, 1.0, 5.0, 5.01)
    rollout = -mismatch.log()
    out, gradient = run(icepop_loss, torch.zeros_like(rollout), torch.zeros_like(rollout), torch.ones_like(rollout),
                        rollout_logprobs=rollout)  # fmt: skip
    assert (-5 * gradient).tolist() == [pytest.approx([0, 0.5, 1.0, 5.0, 0])]
    assert out.loss.item() == pytest.approx(-(0.5 + 1 + 5) / 5)
    expected = {"action_tokens": 5, "gated_low": 1, "gated_high": 1, "nonfinite": 0, "clipped": 0}
    assert out.metrics == expected


def test_icepop_without_mismatch_is_ppo() -> None:
    logprobs, old, advantages = row(-0.5, -2, -1.1), row(-1, -1, -1), row(1, -1, 2)
    ice, ice_gradient = run(icepop_loss, logprobs, old, advantages)
    ppo, ppo_gradient = run(ppo_clip_loss, logprobs, old, advantages)
    assert ice.loss.item() == pytest.approx(ppo.loss.item())
    torch.testing.assert_close(ice_gradient, ppo_gradient)
    assert ice.metrics["clipped"] == ppo.metrics["gated_low"] + ppo.metrics["gated_high"] == 2
    with pytest.raises(ValueError, match="alpha"):
        run(icepop_loss, logprobs, old, advantages, alpha=2.0, beta=1.0)


def test_plain_policy_gradient_has_no_ratio() -> None:
    leaf = row(-1, NAN, -2).requires_grad_()
    out = reinforce_loss(leaf, row(1, NAN, -1), torch.tensor([[1, 0, 1]]))
    out.loss.backward()
    assert out.loss.item() == pytest.approx((1 - 2) / 2)
    assert leaf.grad is not None
    assert leaf.grad.tolist() == [[-0.5, 0.0, 0.5]]


REFERENCED = [ppo_clip_loss, gspo_loss, icepop_loss]


@pytest.mark.parametrize("loss", [ppo_clip_loss, gspo_loss])
def test_the_engines_logprobs_are_not_read_where_the_method_has_no_use_for_them(loss: Loss) -> None:
    logprobs, old, advantages = row(-0.9, -1.1), row(-1, -1), row(1, -1)
    poisoned, _ = run(loss, logprobs, old, advantages, rollout_logprobs=row(NAN, INF))
    assert poisoned.loss.item() == run(loss, logprobs, old, advantages)[0].loss.item()
    assert poisoned.metrics["nonfinite"] == 0


@pytest.mark.parametrize("loss", REFERENCED)
@pytest.mark.parametrize("far", [1e3, -1e3, INF, -INF, NAN])
@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_far_and_infinite_ratios_stay_finite(loss: Loss, far: float, sign: float) -> None:
    """Cases A5 and A6, for the methods compared with."""
    for logprobs, old in ((row(-1, -1), row(-1, far)), (row(-1, far), row(-1, -1))):
        out, gradient = run(loss, logprobs, old, row(1, sign))
        assert out.loss.isfinite()
        assert gradient.isfinite().all()
        assert out.metrics["nonfinite"] == (0 if math.isfinite(far) else 1)


@pytest.mark.parametrize("loss", REFERENCED)
@pytest.mark.parametrize("aggregation", ["token_mean", "sequence_mean"])
def test_empty_batches_and_observations_give_exact_zeros(loss: Loss, aggregation: str) -> None:
    """Cases A7 and A22, for the methods compared with."""
    poison = row(NAN, INF)
    out, gradient = run(loss, poison, poison, poison, action_mask=torch.zeros(1, 2), aggregation=aggregation)
    assert out.loss.item() == 0.0
    assert gradient.tolist() == [[0.0, 0.0]]
    assert set(out.metrics.values()) == {0}


@st.composite
def batches(draw: st.DrawFn) -> dict[str, Tensor]:
    rows, length = draw(st.integers(2, 5)), draw(st.integers(1, 6))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))

    def numbers(scale: float, shift: float = 0.0) -> Tensor:
        return torch.randn(rows, length, generator=generator, dtype=torch.float64) * scale + shift

    return {
        "logprobs": numbers(0.7, -2),
        "rollout_logprobs": numbers(0.7, -2),
        "old_logprobs": numbers(0.7, -2),
        "advantages": numbers(1.0),
        "action_mask": torch.rand(rows, length, generator=generator) < 0.6,
    }


def call(loss: Loss, batch: dict[str, Tensor], **options: object) -> PolicyLoss:
    arguments = dict(batch)
    if loss in (dis_policy_loss, reinforce_loss):
        arguments.pop("old_logprobs")
    if loss is reinforce_loss:
        arguments.pop("rollout_logprobs")
        return loss(**arguments, **options)
    return loss(**arguments, eps_low=0.3, eps_high=0.5, **options)


ALL = [dis_policy_loss, *REFERENCED, reinforce_loss]


@pytest.mark.parametrize("loss", ALL)
@pytest.mark.parametrize("aggregation", ["token_mean", "sequence_mean"])
@given(batch=batches(), cut=st.integers(1, 4))
@settings(max_examples=15, deadline=None)
def test_losses_gradients_and_counts_of_pieces_add_up(
    loss: Loss, aggregation: str, batch: dict[str, Tensor], cut: int
) -> None:
    """Case A4, for any batch and any cut between episodes."""
    leaf = batch["logprobs"].clone().requires_grad_()
    batch = {**batch, "logprobs": leaf}
    whole = call(loss, batch, aggregation=aggregation)
    (expected,) = torch.autograd.grad(whole.loss, leaf)
    mask = batch["action_mask"]
    count = int(mask.sum() if aggregation == "token_mean" else mask.any(1).sum())
    pieces = [
        call(loss, {k: v[s] for k, v in batch.items()}, aggregation=aggregation, normalizer=count)
        for s in (slice(0, cut), slice(cut, None))
        if batch["logprobs"][s].numel()
    ]
    total = torch.stack([piece.loss for piece in pieces]).sum()
    assert total.item() == pytest.approx(whole.loss.item(), abs=1e-9)
    torch.testing.assert_close(torch.autograd.grad(total, leaf)[0], expected)
    for key, value in whole.metrics.items():
        assert sum(piece.metrics[key] for piece in pieces) == value
    assert not expected[~mask].any()


@pytest.mark.parametrize("loss", [ppo_clip_loss, icepop_loss])
@given(batch=batches())
@settings(max_examples=10, deadline=None)
def test_the_gradient_of_a_ratio_is_the_numerical_one(loss: Loss, batch: dict[str, Tensor]) -> None:
    leaf = batch["logprobs"].clone().requires_grad_()
    assert torch.autograd.gradcheck(lambda x: call(loss, {**batch, "logprobs": x}).loss, (leaf,))


@given(batch=batches())
@settings(max_examples=10, deadline=None)
def test_the_dis_gradient_is_minus_ratio_times_advantage(batch: dict[str, Tensor]) -> None:
    """Not the numerical one, for the ratio is a constant: it is compared with its equation."""
    leaf = batch["logprobs"].clone().requires_grad_()
    call(dis_policy_loss, {**batch, "logprobs": leaf}).loss.backward()
    ratio = (batch["logprobs"] - batch["rollout_logprobs"]).exp()
    mask = batch["action_mask"]
    trusted = mask & (ratio > 0.7) & (ratio < 1.5)
    expected = torch.where(trusted, -ratio * batch["advantages"], 0.0) / max(int(mask.sum()), 1)
    assert leaf.grad is not None
    torch.testing.assert_close(leaf.grad, expected)


@pytest.mark.parametrize("loss", ALL)
def test_advantages_and_references_are_constants(loss: Loss) -> None:
    batch = {key: row(-1.0, -1.2).requires_grad_() for key in
             ("logprobs", "rollout_logprobs", "old_logprobs", "advantages")}  # fmt: skip
    call(loss, {**batch, "action_mask": torch.ones(1, 2)}).loss.backward()
    assert batch["logprobs"].grad is not None
    assert all(batch[key].grad is None for key in batch if key != "logprobs")
    returns = row(1.0, 1.0).requires_grad_()
    masked_value_loss(row(0.0, 0.0).requires_grad_(), returns, torch.ones(1, 2)).backward()
    assert returns.grad is None


@pytest.mark.parametrize("loss", REFERENCED)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_dtypes_are_kept_or_widened(loss: Loss, dtype: torch.dtype) -> None:
    out, _ = run(loss, row(-1, -1).to(dtype), row(-1, -1).to(dtype), row(1, 2).to(dtype))
    assert out.loss.dtype == (torch.float32 if dtype == torch.bfloat16 else dtype)
    assert out.loss.item() == pytest.approx(-1.5)


@pytest.mark.parametrize("loss", REFERENCED)
def test_a_wrong_shape_is_named(loss: Loss) -> None:
    with pytest.raises(ValueError, match="old_logprobs has shape"):
        run(loss, row(-1, -1), row(-1), row(1, 1), rollout_logprobs=row(-1, -1))


def test_flash_reinforce_leaves_out_whole_episodes_and_keeps_their_place_in_the_mean() -> None:
    """By hand: row 0 has pi = mu; row 1 has one token that moved from .5 to .4 and one that did not; row 2 went from .5
    to .1. The binary divergences are 0, (.0204 + 0) / 2 and .5108, so at .0103 row 2 goes and row 1 stays."""
    now = torch.tensor([[0.5, 0.5], [0.4, 0.5], [0.1, 0.5]], dtype=torch.float64).log()
    then = torch.full((3, 2), 0.5, dtype=torch.float64).log()
    mask = torch.tensor([[1, 0], [1, 1], [1, 0]])
    advantages = torch.tensor([[1.0, NAN], [-2.0, -2.0], [1.0, NAN]], dtype=torch.float64)
    moved = 0.5 * math.log(0.5 / 0.4) + 0.5 * math.log(0.5 / 0.6)
    for limit, stays in ((moved / 2 * 1.001, True), (moved / 2 * 0.999, False)):
        leaf = now.clone().requires_grad_()
        out = sequence_trust_loss(leaf, then, advantages, mask, max_divergence=limit)
        out.loss.backward()
        assert leaf.grad is not None
        second = 2 * (0.8 * math.log(0.4) + math.log(0.5)) / 2 if stays else 0.0
        assert out.loss.item() == pytest.approx((-math.log(0.5) + second) / 3)
        assert leaf.grad.flatten().tolist() == pytest.approx([-1 / 3, 0, 0.8 / 3 * stays, 1 / 3 * stays, 0, 0])
        left_out = 1 if stays else 3
        assert out.metrics["gated_low"] + out.metrics["gated_high"] == left_out
        assert out.metrics["gated_low"] == (1 if stays else 2)  # what did not move counts as above


def test_flash_reinforce_with_nothing_stale_is_plain_policy_gradient_with_the_batch_mean() -> None:
    logprobs, advantages = row(0.3, 0.6, 0.2).log(), row(1.0, 1.0, 1.0)
    ours, gradient = run(sequence_trust_loss_without_eps, logprobs, logprobs, advantages, max_divergence=0.0)
    plain, expected = run(reinforce_without_eps, logprobs, logprobs, advantages)
    assert torch.allclose(gradient, expected)
    assert ours.loss.item() == pytest.approx(plain.loss.item())


def sequence_trust_loss_without_eps(logprobs: Tensor, **options: object) -> PolicyLoss:
    for name in ("eps_low", "eps_high", "old_logprobs"):
        options.pop(name)
    return sequence_trust_loss(logprobs, **options)  # type: ignore[arg-type]


def reinforce_without_eps(logprobs: Tensor, **options: object) -> PolicyLoss:
    for name in ("eps_low", "eps_high", "old_logprobs", "rollout_logprobs"):
        options.pop(name)
    return reinforce_loss(logprobs, aggregation="sequence_mean", **options)  # type: ignore[arg-type]
