"""Episodes become a batch: one row an episode, tokens as sampled, masks from segments.

Eligibility is decided here, once; everything downstream takes the mask as given.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec
import torch
from torch import Tensor

from agent.episode import Episode, StopReason

PAD = 0  # any valid id will do: padding sits behind the last token, where causal attention never looks


@dataclass(frozen=True)
class Batch:
    """B episodes of at most T tokens, padded on the right. All tensors are on the CPU until a bucket is taken.

    input_ids int64[B,T]; action_mask bool[B,T]; rollout_logprobs float32[B,T] and versions int64[B,T] (0 and -1
    off the mask); rewards float32[B,T] (each turn's reward on the turn's last action token); turn_ids int64[B,T]
    (0,1,... inside actions, -1 elsewhere); lengths int64[B]; truncated bool[B]; group_ids int64[B].
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
    episode_ids: tuple[str, ...]
    task_ids: tuple[str, ...]
    env_ids: tuple[str, ...]

    @property
    def size(self) -> int:
        return len(self.episode_ids)

    @property
    def action_tokens(self) -> int:
        return int(self.action_mask.sum())

    def rows(self, index: Sequence[int]) -> Batch:
        """The sub-batch of these rows, cut to its own longest episode."""
        rows = torch.as_tensor(index, dtype=torch.int64)
        width = int(self.lengths[rows].max()) if len(index) else 0
        cut = {
            name: getattr(self, name)[rows, :width]
            for name in ("input_ids", "action_mask", "rollout_logprobs", "versions", "rewards", "turn_ids")
        }
        return Batch(
            **cut,
            lengths=self.lengths[rows],
            truncated=self.truncated[rows],
            group_ids=self.group_ids[rows],
            episode_ids=tuple(self.episode_ids[i] for i in index),
            task_ids=tuple(self.task_ids[i] for i in index),
            env_ids=tuple(self.env_ids[i] for i in index),
        )


def build_batch(episodes: Sequence[Episode], *, truncation: str = "terminal") -> Batch:
    """Lay episodes out as rows. With `truncation="drop"` the action mask of a truncated episode is empty.

    Rewards go on the last token of the action they followed. An action without tokens (an empty completion would
    have been an engine fault) hands its reward to the action before it, so that no reward is lost.
    """
    size = len(episodes)
    lengths = [sum(len(s.token_ids) for s in episode.segments) for episode in episodes]
    width = max(lengths, default=0)
    input_ids = torch.full((size, width), PAD, dtype=torch.int64)
    action_mask = torch.zeros(size, width, dtype=torch.bool)
    rollout_logprobs = torch.zeros(size, width)
    versions = torch.full((size, width), -1, dtype=torch.int64)
    rewards = torch.zeros(size, width)
    turn_ids = torch.full((size, width), -1, dtype=torch.int64)
    groups: dict[str, int] = {}
    for row, episode in enumerate(episodes):
        trained = episode.stop_reason.trainable and not (truncation == "drop" and episode.stop_reason.truncated)
        start, turn, last_action = 0, 0, -1
        for segment in episode.segments:
            stop = start + len(segment.token_ids)
            input_ids[row, start:stop] = torch.tensor(segment.token_ids, dtype=torch.int64)
            if segment.kind == "action":
                if stop > start:
                    last_action = stop - 1
                if trained and stop > start:
                    action_mask[row, start:stop] = True
                    rollout_logprobs[row, start:stop] = torch.tensor(segment.logprobs)
                    versions[row, start:stop] = torch.tensor(segment.versions, dtype=torch.int64)
                    turn_ids[row, start:stop] = turn
                if trained and last_action >= 0:
                    rewards[row, last_action] += episode.turn_rewards[turn]
                turn += 1
            start = stop
    return Batch(
        input_ids=input_ids,
        action_mask=action_mask,
        rollout_logprobs=rollout_logprobs,
        versions=versions,
        rewards=rewards,
        turn_ids=turn_ids,
        lengths=torch.tensor(lengths, dtype=torch.int64),
        truncated=torch.tensor([e.stop_reason.truncated for e in episodes], dtype=torch.bool),
        group_ids=torch.tensor(
            [groups.setdefault(e.group_id or e.id, len(groups)) for e in episodes], dtype=torch.int64
        ),
        episode_ids=tuple(episode.id for episode in episodes),
        task_ids=tuple(episode.task_id for episode in episodes),
        env_ids=tuple(episode.env_id for episode in episodes),
    )


def shuffled_rewards(episodes: Sequence[Episode], seed: int) -> list[Episode]:
    """The control: each episode gets the total reward of another one of the batch, after its last action."""
    totals = [episode.reward for episode in episodes]
    random.Random(seed).shuffle(totals)
    return [
        msgspec.structs.replace(episode, turn_rewards=(0.0,) * (len(episode.turn_rewards) - 1) + (total,))
        if episode.turn_rewards
        else episode
        for episode, total in zip(episodes, totals, strict=True)
    ]


def bucket_by_length(lengths: Sequence[int], *, max_tokens: int, max_padding: float) -> list[list[int]]:
    """Group row indices into micro-batches of like length.

    Sorted by length and cut greedily: a bucket holds at most `max_tokens` tokens with padding (an episode longer
    than that gets a bucket of its own), and padding is at most the share `max_padding` of it. Every index appears
    exactly once.
    """
    order = sorted(range(len(lengths)), key=lambda i: -lengths[i])
    buckets: list[list[int]] = []
    used = 0
    for i in order:
        if buckets:
            longest, count = lengths[buckets[-1][0]], len(buckets[-1]) + 1
            padded = longest * count
            if padded <= max_tokens and padded - used - lengths[i] <= max_padding * padded:
                buckets[-1].append(i)
                used += lengths[i]
                continue
        buckets.append([i])
        used = lengths[i]
    return buckets


def padding_share(lengths: Sequence[int], buckets: Sequence[Sequence[int]]) -> float:
    """The share of tokens in the buckets' rectangles that is padding."""
    padded = sum(max(lengths[i] for i in bucket) * len(bucket) for bucket in buckets if bucket)
    return 1.0 - sum(lengths) / padded if padded else 0.0


def stopped_by(episodes: Sequence[Episode]) -> dict[str, int]:
    """How many episodes ended for which reason."""
    return {reason.value: sum(e.stop_reason is reason for e in episodes) for reason in StopReason}
