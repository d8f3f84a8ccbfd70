"""The double-sided gate and the DIS loss, by the numbers worked out by hand."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from learner.losses import PolicyLoss, dis_gate, dis_policy_loss, log_bounds

INF, NAN = math.inf, math.nan


def row(*numbers: float) -> Tensor:
    return torch.tensor([numbers], dtype=torch.float64)


def dis(
    logprobs: Tensor,
    rollout: Tensor,
    advantages: Tensor | None = None,
    mask: Tensor | None = None,
    eps: tuple[float, float] = (0.3, 5.0),
    **options: object,
) -> tuple[PolicyLoss, Tensor]:
    """The loss and its gradient for the log-probs."""
    leaf = logprobs.clone().requires_grad_()
    advantages = torch.ones_like(logprobs) if advantages is None else advantages
    mask = torch.ones_like(logprobs) if mask is None else mask
    out = dis_policy_loss(leaf, rollout, advantages, mask, eps_low=eps[0], eps_high=eps[1], **options)  # type: ignore[arg-type]
    out.loss.backward()
    assert leaf.grad is not None
    return out, leaf.grad


@pytest.mark.parametrize("signs", [(1, 1, 1, 1, 1), (-1, -1, -1, -1, -1), (1, -1, 1, -1, 1), (-1, 1, -1, 1, -1)])
def test_a_ratio_on_the_edge_is_gated_whatever_the_sign(signs: tuple[int, ...]) -> None:
    """Case A1."""
    ratio, advantages = row(0.5, 0.500001, 1, 3.999999, 4), row(*signs)
    out, gradient = dis(ratio.log(), torch.zeros_like(ratio), advantages, eps=(0.5, 3.0))
    weights = -gradient * 5 / advantages
    torch.testing.assert_close(weights, row(0, 0.500001, 1, 3.999999, 0), rtol=0, atol=1e-6)
    assert out.metrics == {"action_tokens": 5, "gated_low": 1, "gated_high": 1, "nonfinite": 0}


@pytest.mark.parametrize("eps", [(0.3, 5.0), (0.8, 3.0), (0.2, 0.28), (0.1, 0.1)])
def test_the_interval_is_open_at_the_decimal_that_was_asked_for(eps: tuple[float, float]) -> None:
    """Case A1, for bounds that binary cannot hold: 1 - 0.8 is 0.19999999999999996, and a ratio of 0.2 is outside."""
    edges = row(round(1 - eps[0], 6), round(1 + eps[1], 6)).log()
    gate = dis_gate(edges, torch.zeros_like(edges), torch.ones(1, 2), eps_low=eps[0], eps_high=eps[1])
    assert gate.low.tolist() == [[True, False]]
    assert gate.high.tolist() == [[False, True]]
    inside = edges + row(1e-9, -1e-9)
    assert dis_gate(inside, torch.zeros_like(inside), torch.ones(1, 2), eps_low=eps[0], eps_high=eps[1]).trusted.all()


def test_the_ratio_carries_no_gradient() -> None:
    """Case A2: with a gradient through the ratio the result would be exactly 0 at log pi = -1."""
    _, gradient = dis(row(-1.0), row(-1.5), row(2.0))
    assert gradient.item() == pytest.approx(-3.297443, abs=1e-6)


def test_the_denominator_counts_gated_tokens_too() -> None:
    """Case A3, and its published listing's other denominator as an option."""
    logprobs = row(-1, -1, -1, -1)
    rollout = logprobs - row(0.69, 0.8, 2, 6.01).log()
    assert dis(logprobs, rollout)[0].loss.item() == pytest.approx(0.7, abs=1e-6)
    assert dis(logprobs, rollout, denominator="trusted")[0].loss.item() == pytest.approx(1.4, abs=1e-6)
    assert dis(logprobs, rollout, denominator="trusted", normalizer=2)[0].loss.item() == pytest.approx(1.4, abs=1e-6)


A4 = (row(-1, -1, -1, -1), row(-1, -1.2, 8, 8))


def test_a_token_gated_for_the_engine_being_sure_gives_nothing() -> None:
    """Case A4."""
    out, gradient = dis(*A4)
    assert out.loss.item() == pytest.approx(0.555351, abs=1e-6)
    torch.testing.assert_close(gradient, row(-0.25, -0.305351, 0, 0), rtol=0, atol=1e-6)


@pytest.mark.parametrize("cuts", [(2, 2), (3, 1), (1, 1, 1, 1)])
@pytest.mark.parametrize("ranks", [1, 2])
def test_splitting_a_batch_does_not_change_its_gradient(cuts: tuple[int, ...], ranks: int) -> None:
    """Case A4: micro-batches add up under the global normalizer; averaged ranks pass it divided by their number."""
    pieces = [dis(p, q, normalizer=4 / ranks) for p, q in zip(*(x.split(cuts, 1) for x in A4), strict=True)]
    loss = sum(out.loss.item() for out, _ in pieces) / ranks
    assert loss == pytest.approx(0.555351, abs=1e-6)
    gradient = torch.cat([g for _, g in pieces], 1) / ranks
    torch.testing.assert_close(gradient, row(-0.25, -0.305351, 0, 0), rtol=0, atol=1e-6)
    assert sum(out.metrics["gated_low"] for out, _ in pieces) == 2


@pytest.mark.parametrize("options", [{}, {"denominator": "trusted"}, {"aggregation": "sequence_mean"}])
def test_a_micro_batch_of_gated_tokens_is_exactly_zero_and_still_backpropagates(options: dict[str, str]) -> None:
    """Cases A4 and A22: no NaN, and a gradient of zeros, so that no rank skips a collective."""
    out, gradient = dis(row(-1, -1), row(8, 8), **options)
    assert out.loss.item() == 0.0
    assert gradient.tolist() == [[0.0, 0.0]]
    assert out.metrics["gated_low"] == out.metrics["action_tokens"] == 2


@pytest.mark.parametrize("normalizer", [None, 0, 7])
@pytest.mark.parametrize("aggregation", ["token_mean", "sequence_mean"])
def test_a_batch_without_action_tokens_has_loss_zero(normalizer: float | None, aggregation: str) -> None:
    """Case A22, first half."""
    out, gradient = dis(row(-1, -1), row(-1, -1), mask=row(0, 0), normalizer=normalizer, aggregation=aggregation)
    assert out.loss.item() == 0.0
    assert gradient.tolist() == [[0.0, 0.0]]
    assert out.metrics["action_tokens"] == 0


def test_infinite_logprobs_are_counted_and_left_out() -> None:
    """Case A5."""
    out, gradient = dis(row(-INF, -1, -1), row(-1, -INF, -1))
    assert out.loss.item() == pytest.approx(1 / 3, abs=1e-6)
    torch.testing.assert_close(gradient, row(0, 0, -1 / 3), rtol=0, atol=1e-6)
    assert out.metrics == {"action_tokens": 3, "gated_low": 0, "gated_high": 0, "nonfinite": 2}


@pytest.mark.parametrize(
    ("logprob", "rollout", "advantage"),
    [(-INF, -INF, 1.0), (NAN, -1.0, 1.0), (-1.0, NAN, 1.0), (-1.0, -1.0, NAN), (-1.0, -1.0, INF), (INF, -1.0, 1.0)],
)
def test_no_value_that_is_not_finite_reaches_the_loss(logprob: float, rollout: float, advantage: float) -> None:
    """Case A5, its siblings."""
    out, gradient = dis(row(logprob, -1), row(rollout, -1), row(advantage, 1))
    assert out.loss.item() == pytest.approx(0.5)
    assert gradient.tolist() == [[0.0, -0.5]]
    assert out.metrics == {"action_tokens": 2, "gated_low": 0, "gated_high": 0, "nonfinite": 1}


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("eps", [(0.3, 5.0), (0.3, INF), (2.0, INF)])
@pytest.mark.parametrize("rollout", [-100.0, 1000.0, -1000.0])
def test_a_far_ratio_is_finite(rollout: float, eps: tuple[float, float], dtype: torch.dtype) -> None:
    """Case A6: never inf * 0, and not inf either where there is no upper bound."""
    out, gradient = dis(row(-1.0).to(dtype), row(rollout).to(dtype), row(1.0).to(dtype), eps=eps)
    assert out.loss.isfinite()
    assert gradient.isfinite().all()
    if eps == (0.3, 5.0):
        assert out.loss.item() == 0.0
        assert out.metrics["gated_high" if rollout < 0 else "gated_low"] == 1


@pytest.mark.parametrize("poison", [NAN, INF, -INF, 1e300])
@pytest.mark.parametrize("which", [0, 1, 2])
def test_an_observation_token_has_no_effect_at_all(poison: float, which: int) -> None:
    """Cases A7 and B5: observation tokens need no dummy log-prob, and none enters a metric."""
    inputs = [row(-1, -1, -2), row(-1.2, -1, -2), row(1, -1, 2)]
    clean, gradient = dis(*inputs, mask=row(1, 0, 1))
    inputs[which] = inputs[which].index_fill(1, torch.tensor(1), poison)
    out, poisoned = dis(*inputs, mask=row(1, 0, 1))
    assert out.loss.item() == clean.loss.item()
    assert poisoned.tolist() == gradient.tolist()
    assert poisoned[0, 1] == 0.0
    assert out.metrics == clean.metrics == {"action_tokens": 2, "gated_low": 0, "gated_high": 0, "nonfinite": 0}


def test_token_mean_and_sequence_mean_differ_by_length() -> None:
    """Case A8."""
    logprobs = torch.tensor([[-1.0, NAN, NAN], [-1.0, -1.0, -1.0]], dtype=torch.float64)
    advantages = torch.tensor([[1.0, NAN, NAN], [-1.0, -1.0, -1.0]], dtype=torch.float64)
    mask = torch.tensor([[1, 0, 0], [1, 1, 1]])
    assert dis(logprobs, logprobs, advantages, mask)[0].loss.item() == pytest.approx(-0.5, abs=1e-6)
    per_sequence, gradient = dis(logprobs, logprobs, advantages, mask, aggregation="sequence_mean")
    assert per_sequence.loss.item() == pytest.approx(0.0, abs=1e-6)
    expected = torch.tensor([[-0.5, 0, 0], [1 / 6, 1 / 6, 1 / 6]], dtype=torch.float64)
    torch.testing.assert_close(gradient, expected, rtol=0, atol=1e-6)
    halves = [
        dis(logprobs[i : i + 1], logprobs[i : i + 1], advantages[i : i + 1], mask[i : i + 1], normalizer=2,
            aggregation="sequence_mean")[0].loss.item()
        for i in (0, 1)
    ]  # fmt: skip
    assert halves == pytest.approx([0.5, -0.5])


def test_an_untempered_learner_sees_ratios_that_are_not_there() -> None:
    """Case A19: the arithmetic behind applying the rollout's temperature."""
    logits = torch.tensor([2.0, 0.0], dtype=torch.float64)
    engine = (logits / 0.5).log_softmax(0)[None]
    untempered = logits.log_softmax(0)[None]
    torch.testing.assert_close((untempered - engine).exp(), row(0.896929, 6.627462), rtol=0, atol=1e-6)
    assert dis(untempered, engine)[0].metrics["gated_high"] == 1
    assert dis(engine, engine)[0].metrics["gated_high"] == 0


def test_a_weight_swap_in_mid_turn_shows_per_token() -> None:
    """Case A20."""
    pi, mu = row(0.25, 0.25).log(), row(0.5, 0.25).log()
    _, gradient = dis(pi, mu, eps=(0.8, 3.0), normalizer=1)
    torch.testing.assert_close(-gradient, row(0.5, 1), rtol=0, atol=1e-6)


def test_bounds_are_those_of_the_log_ratio() -> None:
    assert log_bounds(0.5, 3.0) == (math.log(0.5), math.log(4.0))
    assert log_bounds(1.0, INF) == (-INF, INF)
    assert log_bounds(1.5, 0.0) == (-INF, 0.0)


@pytest.mark.parametrize("eps", [(-0.1, 5.0), (0.3, -1.0), (NAN, 5.0), (0.3, NAN)])
def test_impossible_bounds_are_refused(eps: tuple[float, float]) -> None:
    with pytest.raises(ValueError, match="eps_"):
        dis(row(-1), row(-1), eps=eps)


@pytest.mark.parametrize(
    ("option", "value"),
    [("aggregation", "mean"), ("denominator", "all"), ("normalizer", -1), ("normalizer", NAN), ("normalizer", INF)],
)
def test_an_unknown_option_is_named(option: str, value: object) -> None:
    with pytest.raises(ValueError, match=option):
        dis(row(-1), row(-1), **{option: value})


def test_a_shape_that_does_not_match_is_named_not_broadcast() -> None:
    with pytest.raises(ValueError, match=r"advantages has shape \(1, 1\), expected \(1, 2\)"):
        dis(row(-1, -1), row(-1, -1), row(1))
    with pytest.raises(ValueError, match="action_mask"):
        dis(row(-1, -1)[0], row(-1, -1)[0], row(1, 1)[0])


@pytest.mark.parametrize(
    ("given", "computed"),
    [(torch.float64, torch.float64), (torch.float32, torch.float32), (torch.bfloat16, torch.float32),
     (torch.float16, torch.float32)],
)  # fmt: skip
@pytest.mark.parametrize("mask_dtype", [torch.bool, torch.int64, torch.uint8])
def test_dtypes_are_kept_or_widened(given: torch.dtype, computed: torch.dtype, mask_dtype: torch.dtype) -> None:
    logprobs = row(-1, NAN).to(given)
    out, gradient = dis(logprobs, row(-1, 0).to(given), row(1, 0).to(given), row(1, 0).to(mask_dtype))
    assert out.loss.dtype == computed
    assert out.loss.item() == pytest.approx(1.0)
    assert gradient.tolist() == [[-1.0, 0.0]]
