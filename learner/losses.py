# ruff: noqa: F722
"""Policy and value losses over action tokens.

Pure functions on torch tensors, [B, T] with one row an episode; `logprobs[b, t]` scores token t. Off the action mask
no input is read (it may be NaN) and gradients are 0. Advantages, returns and every ratio's denominator are constants.

`normalizer` is the number of action tokens (`token_mean`) or of episodes with one (`sequence_mean`) of the GLOBAL
batch, so that the losses of micro-batches add up to the loss of the whole; ranks whose gradients are averaged pass it
divided by the world size. None means of this call; an empty batch has loss 0, attached to the graph, so that no rank
skips a collective. `metrics` are counts that add up the same way. The loss has the dtype of `logprobs`, float32 if
that is narrower.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, NamedTuple

import torch
from torch import Tensor

from learner.maths.aggregation import Aggregation, aggregate
from learner.maths.tensors import as_mask, compute_dtype, read, require_shape

if TYPE_CHECKING:
    from jaxtyping import Bool, Float, Int8, Shaped

Denominator = Literal["action", "trusted"]

# Beyond e^20 a ratio says only "elsewhere"; holding it there keeps loss and gradient finite where nothing else does.
_MAX_LOG_RATIO = 20.0


@dataclass(frozen=True)
class PolicyLoss:
    """A scalar to call `backward` on, and counts that may be summed over micro-batches and ranks.

    `metrics` always holds `action_tokens`; `gated_low` and `gated_high`, the tokens whose ratio left the trusted range
    below or above and whose gradient is therefore 0; and `nonfinite`, the action tokens that were left out because a
    log-prob or an advantage of theirs is not finite (in neither gated count). `gate` says the same token by token.
    """

    loss: Float[Tensor, ""]
    metrics: dict[str, int]
    gate: Gate | None = None


@dataclass(frozen=True)
class LossInputs:
    """What a policy loss may depend on, float[B,T] and a mask [B,T]; `normalizer` as above.

    `old_logprobs`, the learner's own at the start of the step, are needed by the losses with an old policy.
    `trusted_normalizer` stands in for `normalizer` where only trusted tokens are counted: their number, or that of
    episodes for `sequence_mean`, in the global batch.
    """

    logprobs: Float[Tensor, "B T"]
    rollout_logprobs: Float[Tensor, "B T"]
    advantages: Float[Tensor, "B T"]
    action_mask: Shaped[Tensor, "B T"]
    old_logprobs: Float[Tensor, "B T"] | None = None
    normalizer: float | None = None
    trusted_normalizer: float | None = None


class Gate(NamedTuple):
    """Which action tokens are trusted, and why the others are not. Four masks of one shape, disjoint."""

    trusted: Bool[Tensor, "B T"]
    low: Bool[Tensor, "B T"]
    high: Bool[Tensor, "B T"]
    nonfinite: Bool[Tensor, "B T"]

    def codes(self) -> Int8[Tensor, "B T"]:
        """What happened to each token as one number: 0 trusted (or no action), -1 low, 1 high, 2 not finite."""
        return self.high.to(torch.int8) - self.low.to(torch.int8) + 2 * self.nonfinite.to(torch.int8)


def log_bounds(eps_low: float, eps_high: float) -> tuple[float, float]:
    """log(1 - eps_low) and log(1 + eps_high), the ends of the trusted interval of log-ratios.

    `eps_low` of 1 or more leaves the interval open below: -inf. `eps_high` may be inf. Raises `ValueError` if one is
    negative or NaN.
    """
    for name, eps in (("eps_low", eps_low), ("eps_high", eps_high)):
        if not eps >= 0:
            raise ValueError(f"{name} is {eps}, expected a number of at least 0")
    # 1 - 0.8 is 0.19999999999999996 in binary; rounding makes the bound the 0.2 that was asked for.
    low, high = round(1.0 - eps_low, 15), round(1.0 + eps_high, 15)
    return (math.log(low) if low > 0 else -math.inf), (math.log(high) if high < math.inf else math.inf)


def dis_gate(
    logprobs: Float[Tensor, "B T"],
    rollout_logprobs: Float[Tensor, "B T"],
    action_mask: Shaped[Tensor, "B T"],
    *,
    eps_low: float,
    eps_high: float,
) -> Gate:
    """The double-sided gate of DIS: trusted where log(1-eps_low) < log pi - log mu < log(1+eps_high).

    The interval is open at both ends and does not ask for the sign of the advantage (SAO, section 2.2). It is decided
    in log space, before any exponential. A token with an infinite or NaN log-prob on either side is `nonfinite`.
    """
    mask = as_mask(action_mask)
    require_shape(mask, logprobs=logprobs, rollout_logprobs=rollout_logprobs)
    low, high = log_bounds(eps_low, eps_high)
    dtype = compute_dtype(logprobs)
    log_ratio = read(logprobs.detach(), mask, dtype) - read(rollout_logprobs.detach(), mask, dtype)
    finite = mask & log_ratio.isfinite()
    below, above = finite & (log_ratio <= low), finite & (log_ratio >= high)
    return Gate(finite & ~below & ~above, below, above, mask & ~finite)


def dis_policy_loss(
    logprobs: Float[Tensor, "B T"],
    rollout_logprobs: Float[Tensor, "B T"],
    advantages: Float[Tensor, "B T"],
    action_mask: Shaped[Tensor, "B T"],
    *,
    eps_low: float,
    eps_high: float,
    normalizer: float | None = None,
    aggregation: Aggregation = "token_mean",
    denominator: Denominator = "action",
) -> PolicyLoss:
    """Direct double-sided importance sampling (SAO, section 2.2):

        L = -1/N * sum over trusted t of sg[r_t] * A_t * log pi_t,    r_t = pi_t / mu_t, trusted: 1-low < r_t < 1+high

    The ratio is a constant (with its gradient the first-order term would vanish) and its denominator is what the
    engine recorded as it sampled. N counts all action tokens, gated ones too: the equation's expectation. The paper's
    listing averages over the trusted tokens only, which is `denominator="trusted"`; a `normalizer` given with that is
    the number of trusted tokens of the global batch (`action_tokens - gated_low - gated_high - nonfinite`).

    Raises `ValueError` on shapes that do not match, negative bounds, or an unknown option.
    """
    mask = as_mask(action_mask)
    require_shape(mask, logprobs=logprobs, rollout_logprobs=rollout_logprobs, advantages=advantages)
    if denominator not in ("action", "trusted"):
        raise ValueError(f"denominator is {denominator!r}, expected 'action' or 'trusted'")
    dtype = compute_dtype(logprobs)
    usable = mask & advantages.detach().isfinite()
    gate = dis_gate(logprobs, rollout_logprobs, usable, eps_low=eps_low, eps_high=eps_high)
    log_ratio = read(logprobs.detach(), gate.trusted, dtype) - read(rollout_logprobs.detach(), gate.trusted, dtype)
    weight = read(log_ratio.clamp(max=_MAX_LOG_RATIO).exp(), gate.trusted, dtype)
    terms = -weight * read(advantages.detach(), gate.trusted, dtype) * read(logprobs, gate.trusted, dtype)
    loss = aggregate(terms, mask, gate.trusted if denominator == "trusted" else mask, aggregation, normalizer)
    return _judged(loss, mask, gate.low, gate.high, gate.nonfinite | (mask & ~usable))


def ppo_clip_loss(
    logprobs: Float[Tensor, "B T"],
    rollout_logprobs: Float[Tensor, "B T"],
    advantages: Float[Tensor, "B T"],
    action_mask: Shaped[Tensor, "B T"],
    old_logprobs: Float[Tensor, "B T"],
    *,
    eps_low: float,
    eps_high: float,
    normalizer: float | None = None,
    aggregation: Aggregation = "token_mean",
) -> PolicyLoss:
    """PPO's clipped surrogate, -min(r A, clip(r, 1-low, 1+high) A) (Schulman et al. 2017, equation 7).

    r = pi / pi_old, where `old_logprobs` are the learner's own at the start of the step. `rollout_logprobs` are not
    read: PPO has no correction for what the engine really sampled from, which is what breaks it when run
    asynchronously. The gradient goes through the ratio. A token counts as gated where the clip is active: high with
    A > 0, low with A < 0. Log-ratios above 20 are held at 20 (there PPO itself would overflow).
    """
    mask = as_mask(action_mask)
    require_shape(mask, logprobs=logprobs, rollout_logprobs=rollout_logprobs)
    require_shape(mask, advantages=advantages, old_logprobs=old_logprobs)
    usable = _usable(mask, advantages, logprobs, old_logprobs)
    dtype = compute_dtype(logprobs)
    log_ratio = read(logprobs, usable, dtype) - read(old_logprobs.detach(), usable, dtype)
    surrogate = _clipped_surrogate(log_ratio, read(advantages.detach(), usable, dtype), eps_low, eps_high)
    loss = aggregate(surrogate.terms, mask, mask, aggregation, normalizer)
    return _judged(loss, mask, surrogate.low, surrogate.high, mask & ~usable)


def gspo_loss(
    logprobs: Float[Tensor, "B T"],
    rollout_logprobs: Float[Tensor, "B T"],
    advantages: Float[Tensor, "B T"],
    action_mask: Shaped[Tensor, "B T"],
    old_logprobs: Float[Tensor, "B T"],
    *,
    eps_low: float,
    eps_high: float,
    normalizer: float | None = None,
    aggregation: Aggregation = "token_mean",
) -> PolicyLoss:
    """Group sequence policy optimisation: one ratio an episode (Zheng et al. 2025, equations 5-7 and 13).

        s_i = exp(mean over action tokens of (log pi - log pi_old)),    -min(s_i A, clip(s_i, 1-low, 1+high) A)

    The geometric mean of the token ratios, length-normalised, clips whole episodes. Written in its token form
    (s_it = sg[s_i] * pi_t / sg[pi_t]), which has the same value, the same gradient where an episode has one
    advantage, and allows one per token. `sequence_mean` is the paper's 1/G sum. `rollout_logprobs` are not read.
    The bounds are of another order than PPO's: 3e-4 and 4e-4. Gated counts are tokens of clipped episodes.
    """
    mask = as_mask(action_mask)
    require_shape(mask, logprobs=logprobs, rollout_logprobs=rollout_logprobs)
    require_shape(mask, advantages=advantages, old_logprobs=old_logprobs)
    usable = _usable(mask, advantages, logprobs, old_logprobs)
    dtype = compute_dtype(logprobs)
    current = read(logprobs, usable, dtype)
    drift = (current.detach() - read(old_logprobs.detach(), usable, dtype)).sum(1, keepdim=True)
    sequence_log_ratio = drift / usable.sum(1, keepdim=True).clamp(min=1)
    # `current - current.detach()` is 0 in value and gives each token its own gradient.
    log_ratio = sequence_log_ratio.clamp(max=_MAX_LOG_RATIO) + (current - current.detach())
    surrogate = _clipped_surrogate(log_ratio, read(advantages.detach(), usable, dtype), eps_low, eps_high)
    loss = aggregate(surrogate.terms, mask, mask, aggregation, normalizer)
    return _judged(loss, mask, surrogate.low, surrogate.high, mask & ~usable)


def icepop_loss(
    logprobs: Float[Tensor, "B T"],
    rollout_logprobs: Float[Tensor, "B T"],
    advantages: Float[Tensor, "B T"],
    action_mask: Shaped[Tensor, "B T"],
    old_logprobs: Float[Tensor, "B T"],
    *,
    eps_low: float,
    eps_high: float,
    alpha: float = 0.5,
    beta: float = 5.0,
    normalizer: float | None = None,
    aggregation: Aggregation = "token_mean",
) -> PolicyLoss:
    """IcePop: PPO's clipped term, weighted by a double-sided mask on the mismatch of the two engines (Ling Team 2025).

        -M(k) * min(r A, clip(r, 1-low, 1+high) A),    k = pi_old / mu, r = pi / pi_old

    with M(k) = k in [alpha, beta] and 0 elsewhere. `rollout_logprobs` are mu, the engine's; `old_logprobs` the
    learner's at the start of the step. The mask's interval is closed; its decision and its weight are constants.
    `gated_low` and `gated_high` count tokens that the mask drops; `clipped` those whose PPO clip is active on top.
    Raises `ValueError` unless 0 <= alpha <= beta.
    """
    mask = as_mask(action_mask)
    require_shape(mask, logprobs=logprobs, rollout_logprobs=rollout_logprobs)
    require_shape(mask, advantages=advantages, old_logprobs=old_logprobs)
    if not 0 <= alpha <= beta:
        raise ValueError(f"alpha is {alpha} and beta {beta}, expected 0 <= alpha <= beta")
    usable = _usable(mask, advantages, logprobs, rollout_logprobs, old_logprobs)
    dtype = compute_dtype(logprobs)
    old = read(old_logprobs.detach(), usable, dtype)
    mismatch = old - read(rollout_logprobs.detach(), usable, dtype)
    below = usable & (mismatch < (math.log(alpha) if alpha > 0 else -math.inf))
    above = usable & (mismatch > (math.log(beta) if beta > 0 else -math.inf))
    kept = usable & ~below & ~above
    weight = read(mismatch.clamp(max=_MAX_LOG_RATIO).exp(), kept, dtype)
    log_ratio = read(logprobs, kept, dtype) - read(old, kept, dtype)
    surrogate = _clipped_surrogate(log_ratio, read(advantages.detach(), kept, dtype), eps_low, eps_high)
    loss = aggregate(weight * surrogate.terms, mask, mask, aggregation, normalizer)
    return _judged(loss, mask, below, above, mask & ~usable, clipped=surrogate.low | surrogate.high)


def reinforce_loss(
    logprobs: Float[Tensor, "B T"],
    advantages: Float[Tensor, "B T"],
    action_mask: Shaped[Tensor, "B T"],
    *,
    normalizer: float | None = None,
    aggregation: Aggregation = "token_mean",
) -> PolicyLoss:
    """Plain policy gradient, -A * log pi (Williams 1992): nothing is gated.

    The rule of IMPALA, whose V-trace advantages already hold the truncated ratio, and of RLOO.
    """
    mask = as_mask(action_mask)
    require_shape(mask, logprobs=logprobs, advantages=advantages)
    usable = _usable(mask, advantages, logprobs)
    dtype = compute_dtype(logprobs)
    terms = -read(advantages.detach(), usable, dtype) * read(logprobs, usable, dtype)
    none = torch.zeros_like(mask)
    return _judged(aggregate(terms, mask, mask, aggregation, normalizer), mask, none, none, mask & ~usable)


def sequence_trust_loss(
    logprobs: Float[Tensor, "B T"],
    rollout_logprobs: Float[Tensor, "B T"],
    advantages: Float[Tensor, "B T"],
    action_mask: Shaped[Tensor, "B T"],
    *,
    max_divergence: float,
    normalizer: float | None = None,
    aggregation: Aggregation = "sequence_mean",
) -> PolicyLoss:
    """FlashREINFORCE: importance sampling by token without a clip, and whole episodes left out (NVIDIA 2026).

        L = -1/B sum_i [D_i <= max_divergence] 1/T_i sum_t sg[pi_t / mu_t] A_i log pi_t
        D_i = 1/T_i sum_t (mu_t log(mu_t / pi_t) + (1 - mu_t) log((1 - mu_t) / (1 - pi_t)))

    D is the divergence of "this token or another", mean over an episode's action tokens; probabilities are held in
    [1e-6, 1 - 1e-6] for it. B and T_i count what is left out as well. Gated counts are the tokens of such episodes, by
    the side on which each of them is. Raises `ValueError` for a `max_divergence` that is negative or NaN.
    """
    mask = as_mask(action_mask)
    require_shape(mask, logprobs=logprobs, rollout_logprobs=rollout_logprobs, advantages=advantages)
    if not max_divergence >= 0:
        raise ValueError(f"max_divergence is {max_divergence}, expected a number of at least 0")
    dtype = compute_dtype(logprobs)
    usable = _usable(mask, advantages, logprobs, rollout_logprobs)
    now, then = read(logprobs.detach(), usable, dtype), read(rollout_logprobs.detach(), usable, dtype)
    pi, mu = (x.exp().clamp(1e-6, 1 - 1e-6) for x in (now, then))
    divergence = mu * (mu.log() - pi.log()) + (1 - mu) * (torch.log1p(-mu) - torch.log1p(-pi))
    mean = read(divergence, usable, dtype).sum(1, keepdim=True) / mask.sum(1, keepdim=True).clamp(min=1)
    left_out = usable & (mean.clamp(min=0) > max_divergence)
    kept = usable & ~left_out
    weight = read((now - then).clamp(max=_MAX_LOG_RATIO).exp(), kept, dtype)
    terms = -weight * read(advantages.detach(), kept, dtype) * read(logprobs, kept, dtype)
    loss = aggregate(terms, mask, mask, aggregation, normalizer)
    return _judged(loss, mask, left_out & (now < then), left_out & (now >= then), mask & ~usable)


def masked_value_loss(
    values: Float[Tensor, "B T"],
    returns: Float[Tensor, "B T"],
    action_mask: Shaped[Tensor, "B T"],
    *,
    normalizer: float | None = None,
) -> Float[Tensor, ""]:
    """Mean of (V - R)^2 over action tokens, without a half and without clipping (SAO, section 1.2). A scalar.

    A value that is not finite makes the loss so: a critic that diverges must be seen, not skipped.
    """
    mask = as_mask(action_mask)
    require_shape(mask, values=values, returns=returns)
    dtype = compute_dtype(values)
    error = read(values, mask, dtype) - read(returns.detach(), mask, dtype)
    return aggregate(error**2, mask, mask, "token_mean", normalizer)


class _Surrogate(NamedTuple):
    terms: Float[Tensor, "B T"]
    low: Bool[Tensor, "B T"]
    high: Bool[Tensor, "B T"]


def _clipped_surrogate(
    log_ratio: Float[Tensor, "B T"], advantage: Float[Tensor, "B T"], eps_low: float, eps_high: float
) -> _Surrogate:
    """-min(r A, clip(r) A) and where the clip is what was chosen; the sign of A decides on which side it can be."""
    low, high = log_bounds(eps_low, eps_high)
    fixed = log_ratio.detach()
    clipped_low, clipped_high = (advantage < 0) & (fixed < low), (advantage > 0) & (fixed > high)
    ratio = log_ratio.clamp(max=_MAX_LOG_RATIO).exp()
    # Where the clip is active a constant stands in, not a product with 0: no gradient, whatever the ratio is.
    ratio = torch.where(
        clipped_low, math.exp(low), torch.where(clipped_high, math.exp(min(high, _MAX_LOG_RATIO)), ratio)
    )
    return _Surrogate(-ratio * advantage, clipped_low, clipped_high)


def _usable(mask: Bool[Tensor, "B T"], *inputs: Float[Tensor, "B T"]) -> Bool[Tensor, "B T"]:
    """Action tokens whose every input is finite."""
    for tensor in inputs:
        mask = mask & tensor.detach().isfinite()
    return mask


def _judged(
    loss: Float[Tensor, ""],
    mask: Bool[Tensor, "B T"],
    low: Bool[Tensor, "B T"],
    high: Bool[Tensor, "B T"],
    nonfinite: Bool[Tensor, "B T"],
    **others: Bool[Tensor, "B T"],
) -> PolicyLoss:
    """The loss with what it thought of every token, and counts of each mask, fetched in one transfer."""
    masks = {"action_tokens": mask, "gated_low": low, "gated_high": high, "nonfinite": nonfinite, **others}
    counts = torch.stack([m.sum() for m in masks.values()]).tolist()
    gate = Gate(mask & ~low & ~high & ~nonfinite, low, high, nonfinite)
    return PolicyLoss(loss, dict(zip(masks, counts, strict=True)), gate)
