# ruff: noqa: F722
"""From a baseline's name to the function that makes its advantages; each reads what it needs of its inputs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from learner.advantages import (
    CreditInputs,
    episode_rewards,
    group_advantages,
    leave_one_out_advantages,
    length_adaptive_lambda,
    skip_observation_gae,
    spread_over_actions,
    step_level_gae,
    turn_counts,
    vtrace,
)
from learner.maths.tensors import as_mask, first_rows
from learner.methods.algorithm import Algorithm
from learner.methods.inputs import given

if TYPE_CHECKING:
    from jaxtyping import Float, Int

_Rule = Callable[[Algorithm, CreditInputs], "Float[Tensor, 'B T']"]

BASELINES: dict[str, _Rule] = {}
"""From a baseline's name to the function that gives its advantages [B,T]."""


def _registered(name: str) -> Callable[[_Rule], _Rule]:
    def register(function: _Rule) -> _Rule:
        BASELINES[name] = function
        return function

    return register


@_registered("critic")
def _critic_advantages(algorithm: Algorithm, inputs: CreditInputs) -> Float[Tensor, "B T"]:
    mask, values = as_mask(inputs.action_mask), given(algorithm, "values", inputs.values).detach()
    if algorithm.granularity == "token":
        return skip_observation_gae(
            inputs.rewards,
            values,
            mask,
            gamma=algorithm.gamma,
            lam=_policy_lambda(algorithm, mask.sum(1)),
            bootstrap=inputs.bootstrap,
        )[0]
    turn_ids = given(algorithm, "turn_ids", inputs.turn_ids)
    return step_level_gae(
        inputs.rewards,
        values,
        mask,
        turn_ids,
        gamma=algorithm.gamma,
        lam=_policy_lambda(algorithm, turn_counts(mask, turn_ids)),
        pooling="average" if algorithm.granularity == "step_average" else "last",
        bootstrap=inputs.bootstrap,
    )


@_registered("vtrace")
def _vtrace_advantages(algorithm: Algorithm, inputs: CreditInputs) -> Float[Tensor, "B T"]:
    return vtrace_of(algorithm, inputs)[1]


@_registered("group")
def _group_advantages(algorithm: Algorithm, inputs: CreditInputs) -> Float[Tensor, "B T"]:
    return _compared(algorithm, inputs, partial(group_advantages, normalize=algorithm.normalize_group))


@_registered("leave_one_out")
def _leave_one_out_advantages(algorithm: Algorithm, inputs: CreditInputs) -> Float[Tensor, "B T"]:
    return _compared(algorithm, inputs, leave_one_out_advantages)


@_registered("running_mean")
def _running_mean_advantages(algorithm: Algorithm, inputs: CreditInputs) -> Float[Tensor, "B T"]:
    rewards, baseline = _episode_rewards(inputs), given(algorithm, "running_mean", inputs.running_mean)
    prompts: Sequence[str | int | None] = [None] * len(rewards) if inputs.prompt_ids is None else inputs.prompt_ids
    if len(prompts) != len(rewards):
        raise ValueError(f"prompt_ids has {len(prompts)} entries, expected {len(rewards)}: one an episode")
    mask = as_mask(inputs.action_mask)
    found, counts = rewards.tolist(), mask.any(1).tolist()
    first, row_of = _one_row_an_episode(inputs)
    # An episode that was dropped has no place in the history either.
    per_episode = {row: baseline.advantage(found[row], prompts[row]) if counts[row] else 0.0 for row in first}
    return spread_over_actions(rewards.new_tensor([per_episode[row] for row in row_of]), mask)


@_registered("batch_mean")
def _batch_mean_advantages(algorithm: Algorithm, inputs: CreditInputs) -> Float[Tensor, "B T"]:
    """Each episode's reward less the mean of the batch; a dropped episode is in no mean, branches count once."""
    rewards, mask = _episode_rewards(inputs), as_mask(inputs.action_mask)
    first, row_of = _one_row_an_episode(inputs)
    stayed = [row for row in first if bool(mask[row].any())]
    mean = rewards[stayed].mean() if stayed else rewards.new_zeros(())
    return spread_over_actions((rewards - mean)[row_of], mask)


def _policy_lambda(algorithm: Algorithm, counts: Int[Tensor, " B"]) -> float | Float[Tensor, " B"]:
    return length_adaptive_lambda(counts, algorithm.alpha) if algorithm.lam is None else algorithm.lam


def _episode_rewards(inputs: CreditInputs) -> Float[Tensor, " B"]:
    return episode_rewards(inputs.rewards, as_mask(inputs.action_mask))


def _one_row_an_episode(inputs: CreditInputs) -> tuple[list[int], list[int]]:
    """The row that stands for each episode, and for every row the one that stands for its episode."""
    given_ids, rows = inputs.episodes, inputs.action_mask.shape[0]
    if given_ids is None:
        return list(range(rows)), list(range(rows))
    episodes: list[Hashable] = given_ids.tolist() if isinstance(given_ids, Tensor) else list(given_ids)
    if len(episodes) != rows:
        raise ValueError(f"episodes has {len(episodes)} entries, expected {rows}: one a row")
    first = first_rows(episodes)
    standing = {episodes[row]: row for row in first}
    return first, [standing[episode] for episode in episodes]


def _compared(
    algorithm: Algorithm, inputs: CreditInputs, compare: Callable[[Tensor, Sequence[Hashable]], Tensor]
) -> Float[Tensor, "B T"]:
    """`compare(rewards[N], group_ids[N])` of the episodes with an action token, given to each of their tokens.

    An episode with branches is one of its group, not as many as it has rows. A dropped episode (an empty mask) is in no
    mean. What it leaves alone in its group has nothing to be compared with, and advantage 0; a group that came with one
    episode only is an error still.
    """
    ids, mask = given(algorithm, "group_ids", inputs.group_ids), as_mask(inputs.action_mask)
    groups: list[Hashable] = ids.tolist() if isinstance(ids, Tensor) else list(ids)
    if len(groups) != mask.shape[0]:
        raise ValueError(f"group_ids has {len(groups)} entries, expected {mask.shape[0]}: one an episode")
    counts = mask.any(1).tolist()
    first, row_of = _one_row_an_episode(inputs)
    came, stayed = Counter(groups[row] for row in first), Counter(groups[row] for row in first if counts[row])
    rows = [row for row in first if came[groups[row]] < 2 or (counts[row] and stayed[groups[row]] > 1)]
    rewards = _episode_rewards(inputs)
    per_episode = torch.zeros_like(rewards)
    per_episode[rows] = compare(rewards[rows], [groups[row] for row in rows])
    return spread_over_actions(per_episode[row_of], mask)


def vtrace_of(algorithm: Algorithm, inputs: CreditInputs) -> tuple[Float[Tensor, "B T"], Float[Tensor, "B T"]]:
    return vtrace(
        given(algorithm, "logprobs", inputs.logprobs),
        given(algorithm, "rollout_logprobs", inputs.rollout_logprobs),
        inputs.rewards,
        given(algorithm, "values", inputs.values).detach(),
        inputs.action_mask,
        gamma=algorithm.gamma,
        rho_bar=algorithm.rho_bar,
        c_bar=algorithm.c_bar,
        bootstrap=inputs.bootstrap,
    )
