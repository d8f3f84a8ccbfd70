# ruff: noqa: F722
"""The table of algorithms: each is data, put together from the parts of `advantages` and `losses`.

`get_algorithm(name)` gives a preset, `dataclasses.replace(preset, eps_high=3.0)` a variant. The learner asks three
questions of it, whatever it is: `compute_value_targets`, `compute_advantages`, `policy_loss`. What a row may hold, and
the function behind each name of a baseline or a ratio rule, is in `learner/methods/`.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from torch import Tensor

from learner.advantages import CreditInputs, normalize_by_task, skip_observation_gae
from learner.losses import LossInputs, PolicyLoss
from learner.maths.tensors import as_mask
from learner.methods.algorithm import (
    Algorithm,
    Baseline,
    CriticSettings,
    Granularity,
    RatioRule,
    RunningMeanSettings,
    Trainable,
)
from learner.methods.credit import BASELINES, vtrace_of
from learner.methods.inputs import given, missing
from learner.methods.ratio_rules import RATIO_RULES

if TYPE_CHECKING:
    from jaxtyping import Float

__all__ = [
    "ALGORITHMS",
    "BASELINES",
    "RATIO_RULES",
    "Algorithm",
    "Baseline",
    "CriticSettings",
    "Granularity",
    "RatioRule",
    "RunningMeanSettings",
    "Trainable",
    "compute_advantages",
    "compute_value_targets",
    "get_algorithm",
    "policy_loss",
]

_FULL = CriticSettings(updates=1, trainable="all")
_SAO = Algorithm("sao", "SAO, arXiv 2607.07508", family="sao")
_GRPO = Algorithm(
    "grpo",
    "DeepSeekMath, arXiv 2402.03300, with DAPO's clip-higher, arXiv 2503.14476",
    baseline="group",
    ratio="ppo_clip",
    samples_per_prompt=8,
    critic=None,
    aggregation="sequence_mean",
    eps_low=0.2,
    eps_high=0.28,
)

ALGORITHMS: dict[str, Algorithm] = {
    a.name: a
    for a in (
        _SAO,
        replace(_SAO, name="sao_k1", source="SAO, table 3: without faster value updates", critic=CriticSettings(1)),
        replace(_SAO, name="sao_full_critic", source="SAO, table 3: full critic", critic=CriticSettings(2, "all")),
        replace(_SAO, name="sao_dis_only", source="SAO, table 1: DIS only", critic=_FULL),
        replace(_SAO, name="sao_step_average", source="SAO, table 5: step level, average", granularity="step_average"),
        replace(_SAO, name="sao_step_last", source="SAO, table 5: step level, last token", granularity="step_last"),
        replace(
            _SAO,
            name="sao_running_mean",
            source="SAO, table 4: running mean of the prompt's last 8 rewards",
            baseline="running_mean",
            critic=None,
            running_mean=RunningMeanSettings(),
        ),
        replace(
            _SAO,
            name="vapo",
            family="",
            source="VAPO, arXiv 2504.05118; SAO, table 4: without DIS",
            ratio="ppo_clip",
            critic=_FULL,
            eps_low=0.2,
            eps_high=0.28,
        ),
        replace(
            _SAO,
            name="ppo",
            family="",
            source="PPO, arXiv 1707.06347",
            ratio="ppo_clip",
            critic=_FULL,
            aggregation="sequence_mean",
            eps_low=0.2,
            eps_high=0.2,
            lam=0.95,
        ),
        _GRPO,
        replace(
            _GRPO,
            name="grpo_dis",
            source="SAO, table 1: GRPO with DIS",
            ratio="dis",
            aggregation="token_mean",
            eps_low=_SAO.eps_low,
            eps_high=_SAO.eps_high,
        ),
        # The log-prob of an episode is the sum over its tokens, so a long one is not divided by its length.
        replace(
            _GRPO,
            name="rloo",
            source="RLOO, arXiv 2402.14740",
            baseline="leave_one_out",
            ratio="none",
            aggregation="token_mean",
        ),
        replace(_GRPO, name="gspo", source="GSPO, arXiv 2507.18071", ratio="gspo", eps_low=3e-4, eps_high=4e-4),
        replace(_GRPO, name="icepop", source="IcePop, arXiv 2510.18855", ratio="icepop"),
        replace(
            _SAO,
            name="flash_reinforce",
            family="",
            source="FlashREINFORCE, github.com/yifanzhang-pro/FlashREINFORCE; in labs-molt and OpenRLHF's Molt backend",
            baseline="batch_mean",
            ratio="sequence_trust",
            critic=None,
            aggregation="sequence_mean",
        ),
        replace(
            _SAO,
            name="impala",
            family="",
            source="IMPALA, arXiv 1802.01561",
            baseline="vtrace",
            ratio="none",
            critic=_FULL,
        ),
        replace(
            _GRPO, name="agentrl", source="AgentRL, arXiv 2510.04206", aggregation="token_mean", normalize_task=True
        ),
    )
}


def get_algorithm(name: str) -> Algorithm:
    """The preset called `name`; raises `ValueError` with the names there are."""
    if name not in ALGORITHMS:
        raise ValueError(f"unknown algorithm {name!r}; there are {', '.join(ALGORITHMS)}")
    return ALGORITHMS[name]


def compute_value_targets(algorithm: Algorithm, inputs: CreditInputs) -> Float[Tensor, "B T"]:
    """What the critic is fitted to, [B, T] and detached: returns with lambda 1, or V-trace's vs.

    Called again before each of the K updates: with a bootstrap, or with V-trace, the targets follow the values.
    Raises `ValueError` for an algorithm without a critic, or where an input that it needs is missing.
    """
    if not algorithm.needs_critic:
        raise ValueError(f"{algorithm.name} has no critic, so there are no value targets")
    if algorithm.baseline == "vtrace":
        return vtrace_of(algorithm, inputs)[0]
    values = given(algorithm, "values", inputs.values).detach()
    _, returns = skip_observation_gae(
        inputs.rewards, values, inputs.action_mask, gamma=algorithm.gamma, lam=1.0, bootstrap=inputs.bootstrap
    )
    return returns


def compute_advantages(algorithm: Algorithm, inputs: CreditInputs) -> Float[Tensor, "B T"]:
    """The advantage of every action token of a batch, [B, T] and detached, by the algorithm's baseline.

    A `running_mean` sees the episodes in the order of the rows. Raises `ValueError` where an input is missing.
    """
    advantages = BASELINES[algorithm.baseline](algorithm, inputs)
    if algorithm.normalize_task:
        if inputs.task_ids is None:
            raise missing(algorithm, "task_ids")
        advantages = normalize_by_task(advantages, as_mask(inputs.action_mask), inputs.task_ids)
    return advantages


def policy_loss(algorithm: Algorithm, inputs: LossInputs) -> PolicyLoss:
    """The policy loss of the algorithm's ratio rule, with its bounds and aggregation; see `learner.losses`.

    A batch in one call may leave `normalizer` out; with `denominator="trusted"` it must, for a count of action tokens
    would silently undo that option. Of a batch in pieces that option wants `trusted_normalizer`.
    """
    if algorithm.denominator == "trusted" and inputs.normalizer is not None:
        raise ValueError(
            f"{algorithm.name}: denominator 'trusted' divides by trusted tokens, so it takes no normalizer that counts "
            "others; give trusted_normalizer where a batch comes in micro-batches or ranks"
        )
    return RATIO_RULES[algorithm.ratio](algorithm, inputs)
