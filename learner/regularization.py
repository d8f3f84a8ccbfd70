# ruff: noqa: F722
"""What a recipe may add to a method: a pull to a reference policy, and a bonus for entropy. Both are off by default.

Pure functions on torch tensors [B, T], with the masks, dtypes and denominators of `learner.losses`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from learner.maths.aggregation import Aggregation, aggregate
from learner.maths.tensors import as_mask, compute_dtype, read, require_shape

if TYPE_CHECKING:
    from jaxtyping import Float, Shaped

# As in `learner.losses`: beyond e^20 a ratio says only "elsewhere".
_MAX_LOG_RATIO = 20.0


def k3_divergence(
    logprobs: Float[Tensor, "B T"], reference_logprobs: Float[Tensor, "B T"], action_mask: Shaped[Tensor, "B T"]
) -> Float[Tensor, "B T"]:
    """An estimate of KL(pi || reference) from the sampled tokens alone, float[B,T], 0 off the mask.

        k3 = q - 1 - log q,    q = reference / pi

    Unbiased where the tokens come from pi, and never below 0 (Schulman, "Approximating KL divergence", 2020;
    DeepSeekMath, arXiv 2402.03300, equation 4). The gradient reaches `logprobs` alone. A token with a log-prob that
    is not finite counts as 0.
    """
    mask = as_mask(action_mask)
    require_shape(mask, logprobs=logprobs, reference_logprobs=reference_logprobs)
    usable = mask & logprobs.detach().isfinite() & reference_logprobs.detach().isfinite()
    dtype = compute_dtype(logprobs)
    log_q = read(reference_logprobs.detach(), usable, dtype) - read(logprobs, usable, dtype)
    return torch.expm1(log_q.clamp(max=_MAX_LOG_RATIO)) - log_q


def kl_loss(
    logprobs: Float[Tensor, "B T"],
    reference_logprobs: Float[Tensor, "B T"],
    action_mask: Shaped[Tensor, "B T"],
    *,
    normalizer: float | None = None,
    aggregation: Aggregation = "token_mean",
) -> Float[Tensor, ""]:
    """The mean of `k3_divergence` over action tokens or episodes: the term that GRPO adds to its loss. A scalar."""
    mask = as_mask(action_mask)
    return aggregate(k3_divergence(logprobs, reference_logprobs, mask), mask, mask, aggregation, normalizer)


def kl_penalized_rewards(
    rewards: Float[Tensor, "B T"],
    logprobs: Float[Tensor, "B T"],
    reference_logprobs: Float[Tensor, "B T"],
    action_mask: Shaped[Tensor, "B T"],
    *,
    coefficient: float,
) -> Float[Tensor, "B T"]:
    """Rewards less `coefficient` times the divergence of each action token, float[B,T] and detached.

    The place of InstructGPT's penalty (arXiv 2203.02155, equation 2), with k3 for its estimate. Off the mask rewards
    stay as they are.
    """
    mask = as_mask(action_mask)
    require_shape(mask, rewards=rewards)
    return rewards - coefficient * k3_divergence(logprobs.detach(), reference_logprobs, mask).to(rewards.dtype)


def entropy_loss(
    entropy: Float[Tensor, "B T"],
    action_mask: Shaped[Tensor, "B T"],
    *,
    normalizer: float | None = None,
    aggregation: Aggregation = "token_mean",
) -> Float[Tensor, ""]:
    """Minus the mean entropy of the distributions that the actions were drawn from (Williams and Peng 1991). A scalar.

    `entropy` float[B,T], with gradient; one that is not finite is left out.
    """
    mask = as_mask(action_mask)
    require_shape(mask, entropy=entropy)
    terms = -read(entropy, mask & entropy.detach().isfinite(), compute_dtype(entropy))
    return aggregate(terms, mask, mask, aggregation, normalizer)
