"""From a ratio rule's name to the function that makes its policy loss."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypedDict

from torch import Tensor

from learner.losses import (
    Aggregation,
    LossInputs,
    PolicyLoss,
    dis_policy_loss,
    gspo_loss,
    icepop_loss,
    ppo_clip_loss,
    reinforce_loss,
    sequence_trust_loss,
)
from learner.methods.algorithm import Algorithm
from learner.methods.inputs import given

_Rule = Callable[[Algorithm, LossInputs], PolicyLoss]

RATIO_RULES: dict[str, _Rule] = {}
"""From a ratio rule's name to the function that gives its loss."""


def _registered(name: str) -> Callable[[_Rule], _Rule]:
    def register(function: _Rule) -> _Rule:
        RATIO_RULES[name] = function
        return function

    return register


@_registered("none")
def _no_ratio(algorithm: Algorithm, inputs: LossInputs) -> PolicyLoss:
    return reinforce_loss(
        inputs.logprobs,
        inputs.advantages,
        inputs.action_mask,
        normalizer=inputs.normalizer,
        aggregation=algorithm.aggregation,
    )


@_registered("dis")
def _dis(algorithm: Algorithm, inputs: LossInputs) -> PolicyLoss:
    options = _loss_options(algorithm, inputs)
    if algorithm.denominator == "trusted":
        options["normalizer"] = inputs.trusted_normalizer
    return dis_policy_loss(*_loss_tensors(inputs), **options, denominator=algorithm.denominator)


@_registered("ppo_clip")
def _ppo_clip(algorithm: Algorithm, inputs: LossInputs) -> PolicyLoss:
    old = given(algorithm, "old_logprobs", inputs.old_logprobs)
    return ppo_clip_loss(*_loss_tensors(inputs), old, **_loss_options(algorithm, inputs))


@_registered("gspo")
def _gspo(algorithm: Algorithm, inputs: LossInputs) -> PolicyLoss:
    old = given(algorithm, "old_logprobs", inputs.old_logprobs)
    return gspo_loss(*_loss_tensors(inputs), old, **_loss_options(algorithm, inputs))


@_registered("icepop")
def _icepop(algorithm: Algorithm, inputs: LossInputs) -> PolicyLoss:
    old, (alpha, beta) = given(algorithm, "old_logprobs", inputs.old_logprobs), algorithm.mismatch
    return icepop_loss(*_loss_tensors(inputs), old, **_loss_options(algorithm, inputs), alpha=alpha, beta=beta)


@_registered("sequence_trust")
def _sequence_trust(algorithm: Algorithm, inputs: LossInputs) -> PolicyLoss:
    return sequence_trust_loss(
        *_loss_tensors(inputs),
        max_divergence=algorithm.max_divergence,
        normalizer=inputs.normalizer,
        aggregation=algorithm.aggregation,
    )


def _loss_tensors(inputs: LossInputs) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return inputs.logprobs, inputs.rollout_logprobs, inputs.advantages, inputs.action_mask


class _LossOptions(TypedDict):
    eps_low: float
    eps_high: float
    normalizer: float | None
    aggregation: Aggregation


def _loss_options(algorithm: Algorithm, inputs: LossInputs) -> _LossOptions:
    return {
        "eps_low": algorithm.eps_low,
        "eps_high": algorithm.eps_high,
        "normalizer": inputs.normalizer,
        "aggregation": algorithm.aggregation,
    }
