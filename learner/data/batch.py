"""Episodes become a batch: one row a chain of an episode, tokens as sampled, masks from segments.

Eligibility is decided here, once; everything downstream takes the mask as given.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import msgspec
import numpy as np
import torch
from torch import Tensor

from agent.episode import Branch, Episode, StopReason
from agent.packed import LogProbs, TokenIds, Versions
from learner.advantages import CreditInputs, episode_rewards
from learner.faults import LearnerFault
from learner.maths.tensors import first_rows

PAD = 0  # any valid id will do: padding sits behind the last token, where causal attention never looks


PER_TOKEN = ("input_ids", "action_mask", "rollout_logprobs", "versions", "rewards", "turn_ids")
"""The columns of a batch that have a number for every token."""


@dataclass(frozen=True)
class Batch:
    """B rows of at most T tokens, padded on the right. Built on the CPU.

    A row is an episode, or one chain of it where it has branches: its main chain, and behind that each branch.
    `episodes` int64[B] says of which episode of the whole batch each row is; rows of one episode stand side by side.

    input_ids int64[B,T]; action_mask bool[B,T]; rollout_logprobs float32[B,T] and versions int64[B,T] (0 and -1
    off the mask); rewards float32[B,T] (each turn's reward on the turn's last action token); turn_ids int64[B,T]
    (0,1,... inside a row's actions, -1 elsewhere); lengths int64[B]; truncated bool[B]; group_ids int64[B].
    experts int16[B,T,layers,k] or None: those that the engine chose for token t as it stood in its input, -1 where
    that is not known.
    """

    input_ids: Tensor
    action_mask: Tensor
    rollout_logprobs: Tensor
    versions: Tensor
    rewards: Tensor
    turn_ids: Tensor
    lengths: Tensor
    truncated: Tensor
    group_ids: Tensor
    episodes: Tensor
    episode_ids: tuple[str, ...]
    task_ids: tuple[str, ...]
    families: tuple[str, ...]  # the kind of task: a family of problems of an environment
    experts: Tensor | None = None

    @property
    def size(self) -> int:
        """How many rows."""
        return len(self.episode_ids)

    @property
    def width(self) -> int:
        return self.input_ids.shape[1]

    @property
    def action_tokens(self) -> int:
        return int(self.action_mask.sum())

    def to(self, device: torch.device) -> Batch:
        """The same batch with its tokens on `device`; `lengths`, by which it is cut, stay on the CPU, and `experts`,
        which are large and read by micro-batch."""
        names = (*PER_TOKEN, "truncated", "group_ids", "episodes")
        return replace(self, **{name: getattr(self, name).to(device) for name in names})

    @classmethod
    def blank(cls) -> Batch:
        """Two rows of two tokens, none of which counts, of one group: what a rank runs that was dealt no episode."""
        ids = torch.full((2, 2), PAD, dtype=torch.int64)
        return cls(
            input_ids=ids,
            action_mask=torch.zeros(2, 2, dtype=torch.bool),
            rollout_logprobs=torch.zeros(2, 2),
            versions=torch.full_like(ids, -1),
            rewards=torch.zeros(2, 2),
            turn_ids=torch.full_like(ids, -1),
            lengths=torch.full((2,), 2),
            truncated=torch.zeros(2, dtype=torch.bool),
            group_ids=torch.zeros(2, dtype=torch.int64),
            episodes=torch.arange(2),
            episode_ids=("", ""),
            task_ids=("", ""),
            families=("", ""),
        )

    @property
    def policy_inputs(self) -> tuple[Tensor, ...]:
        """What a `PolicyForward` is called with."""
        return (self.input_ids, self.action_mask) + (() if self.experts is None else (self.experts,))

    def up_to_last_actions(self) -> Batch:
        """The same with `lengths` up to each row's last action, of two tokens at least: what a row holds behind that
        has no part in any loss, value or advantage, and so is not computed."""
        positions = torch.arange(1, self.width + 1, device=self.action_mask.device)
        ends = torch.where(self.action_mask, positions, 0).amax(-1).clamp(min=2)
        return replace(self, lengths=torch.minimum(self.lengths, ends.to(self.lengths.device)))

    def without_actions(self) -> Batch:
        """The same tokens, none of which counts: what a rank runs that has no micro-batch left."""
        return replace(self, action_mask=torch.zeros_like(self.action_mask))

    def dummy(self) -> Batch:
        """The first two tokens of the first row, neither of them an action: what a rank runs that has no micro-batch
        left. `whole[[0], : dummy.width]` is its part of a tensor [B,T]."""
        first = self.rows([0])
        cut = {name: getattr(first, name)[:, :2] for name in PER_TOKEN}
        cut["action_mask"] = torch.zeros_like(cut["action_mask"])
        if first.experts is not None:
            cut["experts"] = first.experts[:, :2]
        return replace(first, **cut, lengths=first.lengths.clamp(max=2))

    def bootstrap(self, next_values: Tensor) -> Tensor:
        """What truncated episodes are taken to be worth from where they were cut, [B]; 0 for those that ended.

        `next_values[b,t]` is the value of the state after token t; that after the last action is the bootstrap.
        """
        positions = torch.arange(self.width, device=next_values.device)
        last_action = torch.where(self.action_mask, positions, 0).amax(-1, keepdim=True)
        value = next_values.gather(1, last_action).squeeze(1)
        return torch.where(self.truncated & self.action_mask.any(-1), value, 0.0)

    def credit_inputs(self, **computed: Any) -> CreditInputs:
        """What this batch holds of them, and what has been `computed` by name: values, logprobs, bootstrap..."""
        return CreditInputs(
            rewards=self.rewards,
            action_mask=self.action_mask,
            turn_ids=self.turn_ids,
            rollout_logprobs=self.rollout_logprobs,
            group_ids=self.group_ids,
            episodes=self.episodes,
            prompt_ids=self.task_ids,
            task_ids=self.families,
            **computed,
        )

    def rows(self, index: Sequence[int]) -> Batch:
        """The sub-batch of these rows, cut to its own longest one."""
        rows = torch.as_tensor(index, dtype=torch.int64)
        width = int(self.lengths[rows].max()) if len(index) else 0
        return Batch(
            **{name: getattr(self, name)[rows, :width] for name in PER_TOKEN},
            lengths=self.lengths[rows],
            truncated=self.truncated[rows],
            group_ids=self.group_ids[rows],
            episodes=self.episodes[rows],
            episode_ids=tuple(self.episode_ids[i] for i in index),
            task_ids=tuple(self.task_ids[i] for i in index),
            families=tuple(self.families[i] for i in index),
            experts=None if self.experts is None else self.experts[rows, :width],
        )


class SamplingMismatch(LearnerFault):
    """An episode that was sampled otherwise than the learner computes its log-probs."""


def require_sampling(episodes: Sequence[Episode], temperature: float) -> None:
    """Raise `SamplingMismatch` unless every episode was sampled at `temperature` from the whole distribution.

    The learner scores at one temperature and knows no top-p or top-k: every ratio of such an episode would be wrong.
    """
    for episode in episodes:
        used = episode.sampling
        if not (math.isclose(used.temperature, temperature, rel_tol=1e-6) and used.top_p == 1.0 and used.top_k < 1):
            raise SamplingMismatch(
                f"episode {episode.id} of {episode.worker or 'an unknown runtime'} was sampled at temperature "
                f"{used.temperature:g}, top_p {used.top_p:g}, top_k {used.top_k}, and the learner computes log-probs "
                f"at temperature {temperature:g} of the whole distribution: every ratio would be wrong. Set "
                "runtime.sampling here and in the runtime alike; a store that holds such episodes is for a run that "
                "samples so"
            )


def family_of(episode: Episode) -> str:
    """Which kind of task an episode is of: what its environment says its problem belongs to, or the environment."""
    family = episode.metrics.get("family")
    environment = episode.environment or episode.env_id
    return f"{environment}: {family}" if family else environment


def _prompt_of(episode: Episode) -> str:
    """The name of an episode's prompt, which tasks of two environments do not share."""
    return f"{episode.environment}: {episode.task_id}" if episode.environment else episode.task_id


def is_trained(episode: Episode, truncation: str) -> bool:
    """Whether an episode teaches anything, under the recipe's `learner.truncation`."""
    return episode.stop_reason.trainable and not (truncation == "drop" and episode.stop_reason.truncated)


def rows_of(episodes: Sequence[Episode]) -> list[tuple[int, Branch]]:
    """The rows of a batch of `episodes`: every chain, with the index of its episode."""
    return [(index, chain) for index, episode in enumerate(episodes) for chain in episode.chains]


def places_of_rows(episodes: Sequence[Episode], chosen: Sequence[int]) -> list[int]:
    """Which rows of a batch of `episodes` are of the `chosen` ones."""
    wanted = set(chosen)
    return [row for row, (index, _) in enumerate(rows_of(episodes)) if index in wanted]


def build_batch(
    episodes: Sequence[Episode],
    *,
    truncation: str = "terminal",
    temperature: float | None = None,
    routing: bool = False,
) -> Batch:
    """Lay episodes out as rows, one for every chain.

    With `truncation="drop"` the action mask of a truncated episode is empty; with `routing` the batch holds the experts
    that the episodes carry, if any does.

    `temperature`: the one that log-probs are computed at, for `require_sampling`; None asks nothing.

    Rewards go on the last token of the action they followed. An action without tokens (an empty completion would
    have been an engine fault) hands its reward to the action before it, so that no reward is lost. Where an episode has
    branches, the last action of each row also gets the rewards that stand on the other chains: the rewards of every row
    sum up to the episode's.
    """
    if temperature is not None:
        require_sampling(episodes, temperature)
    chains = rows_of(episodes)
    size = len(chains)
    lengths = [chain.tokens for _, chain in chains]
    width = max(lengths, default=0)
    input_ids = np.full((size, width), PAD, np.int64)
    action_mask = np.zeros((size, width), np.bool_)
    rollout_logprobs = np.zeros((size, width), np.float32)
    versions = np.full((size, width), -1, np.int64)
    rewards = np.zeros((size, width), np.float32)
    turn_ids = np.full((size, width), -1, np.int64)
    groups: dict[str, int] = {}
    for row, (index, chain) in enumerate(chains):
        episode, length = episodes[index], lengths[row]
        input_ids[row, :length] = TokenIds.join([s.token_ids for s in chain.segments]).array()
        if not is_trained(episode, truncation):
            continue
        actions, counts = chain.actions, np.array([len(s.token_ids) for s in chain.segments], np.int64)
        acts = np.array([s.kind == "action" for s in chain.segments], np.bool_)
        mask, acted = np.repeat(acts, counts), counts[acts]
        action_mask[row, :length] = mask
        rollout_logprobs[row, :length][mask] = LogProbs.join([s.logprobs for s in actions]).array()
        versions[row, :length][mask] = Versions.join([s.versions for s in actions]).array()
        turn_ids[row, :length][mask] = np.repeat(np.arange(len(actions)), acted)
        # How many action tokens there are up to the end of each turn: the last one of them is where its reward goes.
        ends = acted.cumsum()
        places = np.flatnonzero(mask)[ends[ends > 0] - 1]
        np.add.at(rewards[row], places, np.array(chain.turn_rewards)[ends > 0])
        if episode.branches and len(places):
            rewards[row, places[-1]] += episode.reward - math.fsum(chain.turn_rewards)
    of = [episodes[index] for index, _ in chains]
    return Batch(
        input_ids=torch.from_numpy(input_ids),
        action_mask=torch.from_numpy(action_mask),
        rollout_logprobs=torch.from_numpy(rollout_logprobs),
        versions=torch.from_numpy(versions),
        rewards=torch.from_numpy(rewards),
        turn_ids=torch.from_numpy(turn_ids),
        lengths=torch.tensor(lengths, dtype=torch.int64),
        truncated=torch.tensor([e.stop_reason.truncated for e in of], dtype=torch.bool),
        group_ids=torch.tensor([groups.setdefault(e.group_id or e.id, len(groups)) for e in of], dtype=torch.int64),
        episodes=torch.tensor([index for index, _ in chains], dtype=torch.int64),
        episode_ids=tuple(episode.id for episode in of),
        task_ids=tuple(_prompt_of(episode) for episode in of),
        families=tuple(family_of(episode) for episode in of),
        experts=_experts([chain for _, chain in chains], width) if routing else None,
    )


def without_constant_groups(batch: Batch) -> tuple[Batch, float]:
    """The batch with empty action masks where all episodes of a group have the same reward; the share of such groups.

    What such a group is compared by gives advantage 0 already; so it counts in no denominator either (DAPO, arXiv
    2503.14476, section 3.2, without sampling others in its place). Episodes that are dropped are compared with nobody.
    """
    rewards, present = episode_rewards(batch.rewards, batch.action_mask).tolist(), batch.action_mask.any(1).tolist()
    seen: dict[int, set[float]] = {}
    groups = batch.group_ids.tolist()
    for row in first_rows(batch.episodes.tolist()):
        seen.setdefault(groups[row], set()).update([rewards[row]] if present[row] else [])
    constant = {group for group, different in seen.items() if len(different) < 2}
    kept = torch.tensor([group not in constant for group in groups], dtype=torch.bool)
    return replace(batch, action_mask=batch.action_mask & kept[:, None]), len(constant) / max(len(seen), 1)


def _experts(chains: Sequence[Branch], width: int) -> Tensor | None:
    shapes = {(s.experts.layers, s.experts.top_k) for chain in chains for s in chain.segments if s.experts}
    if not shapes:
        return None
    if len(shapes) > 1:
        raise LearnerFault(f"episodes of one batch carry experts of different models: (layers, top-k) {sorted(shapes)}")
    experts = torch.full((len(chains), width, *shapes.pop()), -1, dtype=torch.int16)
    for row, chain in enumerate(chains):
        start = 0
        for segment in chain.segments:
            if segment.experts:
                known = torch.from_numpy(segment.experts.array().astype("int16"))
                experts[row, start : start + len(known)] = known
            start += len(segment.token_ids)
    return experts


def shuffled_rewards(episodes: Sequence[Episode], seed: int) -> list[Episode]:
    """The control: each episode gets the total reward of another one of the batch, after its last action."""
    totals = [episode.reward for episode in episodes]
    random.Random(seed).shuffle(totals)
    return [
        msgspec.structs.replace(
            episode,
            turn_rewards=(0.0,) * (len(episode.turn_rewards) - 1) + (total,),
            branches=tuple(
                msgspec.structs.replace(branch, turn_rewards=(0.0,) * len(branch.turn_rewards))
                for branch in episode.branches
            ),
        )
        if episode.turn_rewards
        else episode
        for episode, total in zip(episodes, totals, strict=True)
    ]


def stopped_by(episodes: Sequence[Episode]) -> dict[str, int]:
    """How many episodes ended for which reason."""
    return {reason.value: sum(e.stop_reason is reason for e in episodes) for reason in StopReason}
