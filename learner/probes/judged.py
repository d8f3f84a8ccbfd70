"""A gate on judged conversations that are held out of training: would the new weights have pleased the same people?

Nobody has to be asked, and no engine has to hold the new weights: what people said about replies that were given says
how good a policy is that gives them more often or more seldom. With w_i = pi(reply_i) / mu(reply_i), where mu is what
sampled it, the value of pi is estimated by

    sum_i w_i r_i / sum_i w_i        (self-normalised importance sampling)

for the weights before and after a step on the same conversations, so most of its noise is in both. It holds while pi is
near mu: `effective` says how many conversations the estimate rests on, and below `least` nothing is decided.
"""

from __future__ import annotations

import hashlib
import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from agent.episode import Episode
from learner.data.batch import build_batch
from learner.model.forward import PolicyForward

_ROWS = 64
_PARTS = 1 << 32


@dataclass(frozen=True)
class Value:
    """An estimate of the mean reward, and on how many conversations it rests (Kish's effective number)."""

    reward: float
    effective: float


@dataclass(frozen=True)
class Change:
    """`publish`: whether the new weights may be served; `reason` says why not."""

    publish: bool
    reason: str


def value_of(log_ratios: Sequence[float], rewards: Sequence[float]) -> Value:
    """The value of a policy from log pi(reply) - log mu(reply) and the reward of each; NaN where there are none."""
    usable = [(ratio, reward) for ratio, reward in zip(log_ratios, rewards, strict=True) if math.isfinite(ratio)]
    if not usable:
        return Value(math.nan, 0.0)
    largest = max(ratio for ratio, _ in usable)
    weights = [math.exp(ratio - largest) for ratio, _ in usable]
    total = math.fsum(weights)
    reward = math.fsum(w * r for w, (_, r) in zip(weights, usable, strict=True)) / total
    return Value(reward, total**2 / math.fsum(w * w for w in weights))


def compare(before: Value, after: Value, *, tolerance: float, least: int) -> Change:
    """Whether weights of value `after` may follow those of value `before`: not where it fell by more than `tolerance`.

    Where fewer than `least` conversations carry either estimate, nothing is known and nothing is held up.
    """
    fall = before.reward - after.reward
    if min(before.effective, after.effective) < least or not fall > tolerance:
        return Change(True, "")
    return Change(
        False,
        f"on held-out verdicts its reward is {after.reward:.3f}, {fall:.3f} below the weights before it "
        f"({after.effective:.0f} conversations)",
    )


class JudgedGate:
    """The last `keep` held-out conversations. `share` of all are held out, which ones their ids decide.

    train = gate.split(episodes)          # keeps the others
    before = gate.value(policy, temperature)
    """

    def __init__(self, share: float, keep: int) -> None:
        self._share = share
        self._kept: deque[Episode] = deque(maxlen=keep)

    def split(self, episodes: Sequence[Episode]) -> list[Episode]:
        """What is trained of a batch, at least one; the rest is kept for the gate."""
        train = [episode for episode in episodes if not self._is_held_out(episode)] or list(episodes[:1])
        trained = {episode.id for episode in train}
        self._kept.extend(episode for episode in episodes if episode.id not in trained)
        return train

    def _is_held_out(self, episode: Episode) -> bool:
        digest = hashlib.blake2b(episode.id.encode(), digest_size=4).digest()
        return int.from_bytes(digest, "big") < self._share * _PARTS

    @torch.no_grad()
    def value(self, policy: PolicyForward, temperature: float) -> Value:
        """The value of `policy` by what is kept."""
        ratios: list[float] = []
        kept = list(self._kept)
        for start in range(0, len(kept), _ROWS):
            batch = build_batch(kept[start : start + _ROWS], truncation="terminal", temperature=temperature)
            device = next(policy.parameters()).device
            logprobs, _ = policy(batch.input_ids.to(device), batch.action_mask.to(device))
            found = torch.where(batch.action_mask, logprobs.cpu().float() - batch.rollout_logprobs, 0.0).sum(-1)
            per_episode = torch.zeros(len(kept[start : start + _ROWS])).index_add(0, batch.episodes, found)
            ratios += per_episode.tolist()
        return value_of(ratios, [episode.reward for episode in kept])
