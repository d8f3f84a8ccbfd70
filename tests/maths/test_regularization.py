"""The pull to a reference policy and the bonus for entropy, against what they are estimates of."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from learner.regularization import entropy_loss, k3_divergence, kl_loss, kl_penalized_rewards

logprob = st.floats(-8.0, 0.0)
MASK = torch.tensor([[1, 1, 0, 1]])


def row(values: list[float]) -> Tensor:
    return torch.tensor([values], dtype=torch.float64)


@given(own=st.lists(logprob, min_size=4, max_size=4), other=st.lists(logprob, min_size=4, max_size=4))
@settings(deadline=None)
def test_the_estimate_is_never_below_0_and_is_0_only_where_the_two_agree(own: list[float], other: list[float]) -> None:
    found = k3_divergence(row(own), row(other), MASK)
    assert (found >= 0).all()
    assert found[0, 2] == 0
    expected = [0.0 if t == 2 else torch.expm1(row(other) - row(own))[0, t] - (other[t] - own[t]) for t in range(4)]
    torch.testing.assert_close(found, row([float(value) for value in expected]))
    assert not k3_divergence(row(own), row(own), MASK).any()


@given(
    policy=st.lists(st.floats(-3, 3), min_size=3, max_size=3),
    reference=st.lists(st.floats(-3, 3), min_size=3, max_size=3),
)
@settings(deadline=None)
def test_its_mean_over_what_the_policy_samples_is_the_divergence(policy: list[float], reference: list[float]) -> None:
    pi, ref = (row(logits).log_softmax(-1) for logits in (policy, reference))
    expected = (pi.exp() * (pi - ref)).sum()
    estimate = (pi.exp() * k3_divergence(pi, ref, torch.ones(1, 3))).sum()
    torch.testing.assert_close(estimate, expected, atol=1e-9, rtol=1e-6)


@given(own=logprob, other=logprob)
@settings(deadline=None)
def test_its_gradient_pulls_to_the_reference_and_reaches_no_other(own: float, other: float) -> None:
    leaf, reference = row([own]).requires_grad_(), row([other]).requires_grad_()
    kl_loss(leaf, reference, torch.ones(1, 1)).backward()
    assert leaf.grad is not None
    assert reference.grad is None
    assert leaf.grad.item() == pytest.approx(1 - torch.tensor(other - own, dtype=torch.float64).exp().item(), abs=1e-9)


def test_off_the_mask_nothing_is_read_and_what_is_no_number_counts_as_0() -> None:
    nan, inf = torch.nan, torch.inf
    leaf = torch.tensor([[-1.0, nan, nan, -2.0]]).requires_grad_()
    found = k3_divergence(leaf, torch.tensor([[-1.5, -1.0, nan, -inf]]), MASK)
    assert found[0, 1:].tolist() == [0, 0, 0]
    found.sum().backward()
    assert leaf.grad is not None
    assert leaf.grad.isfinite().all()
    assert k3_divergence(torch.tensor([[-1e4]]), torch.zeros(1, 1), torch.ones(1, 1)).isfinite().all()
    entropy = torch.tensor([[1.0, nan, nan, inf]]).requires_grad_()
    loss = entropy_loss(entropy, MASK)
    assert loss.item() == pytest.approx(-1 / 3)
    loss.backward()
    torch.testing.assert_close(entropy.grad, torch.tensor([[-1 / 3, 0, 0, 0]]))


def test_rewards_lose_the_divergence_of_their_token() -> None:
    rewards, own, other = row([0.0, 0.0, 7.0, 1.0]), row([-1.0, -2.0, -3.0, -1.0]), row([-1.0, -1.0, -1.0, -1.0])
    found = kl_penalized_rewards(rewards, own.requires_grad_(), other, MASK, coefficient=0.5)
    assert not found.requires_grad
    assert found[0].tolist() == pytest.approx([0.0, -0.5 * (torch.e - 2), 7.0, 1.0])


@pytest.mark.parametrize("aggregation", ["token_mean", "sequence_mean"])
def test_micro_batches_add_up_to_the_whole(aggregation: str) -> None:
    generator = torch.Generator().manual_seed(1)
    own, other = (-torch.rand(4, 6, generator=generator) for _ in range(2))
    mask = torch.rand(4, 6, generator=generator) < 0.6
    count = float(mask.sum() if aggregation == "token_mean" else mask.any(1).sum())
    options = {"normalizer": count, "aggregation": aggregation}
    parts = [kl_loss(own[rows], other[rows], mask[rows], **options) for rows in ([0, 1], [2, 3])]  # type: ignore[arg-type]
    torch.testing.assert_close(sum(parts), kl_loss(own, other, mask, aggregation=aggregation))  # type: ignore[arg-type]
    parts = [entropy_loss(own[rows], mask[rows], **options) for rows in ([0, 1], [2, 3])]  # type: ignore[arg-type]
    torch.testing.assert_close(sum(parts), entropy_loss(own, mask, aggregation=aggregation))  # type: ignore[arg-type]
