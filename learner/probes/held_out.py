"""Safe learning: whether new weights may be published, and what they are asked before.

The question must not punish a policy for following its users: one that has learned to write in a single style finds
every other style unlikely, and that is no fault. So each held-out prompt has many sound answers, and what counts is
how likely the policy finds the one it likes best. A policy that knows only one of 32 sound answers scores 0, one that
knows all of them alike -log(32) / tokens (-0.35 a token for texts of ten tokens), and one that has forgotten how to
write scores below -2, whatever it prefers. `decide` decides; `learner.run.loop` does.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from agent.chat.renderer import ChatRenderer
from envs.core import Message
from learner.config import Recipe, RecipeError
from learner.data.traces import encode_trace, read_traces, script_for
from learner.model.forward import PolicyForward

_ROWS = 64


@dataclass(frozen=True)
class Decision:
    """`publish`: whether the candidate may be served. `best`: the score that the next one is held against."""

    publish: bool
    best: float
    reason: str


def decide(score: float, best: float | None, margin: float) -> Decision:
    """Whether a candidate with `score` may be published after weights whose best score was `best` (None: the first).

    It is held against the best and not against the one before: many small steps down must not add up. A score that
    is not finite never passes. Raises `ValueError` for a margin that is not above 0.
    """
    if not margin > 0:
        raise ValueError(f"margin is {margin}, expected more than 0")
    if not math.isfinite(score):
        return Decision(False, -math.inf if best is None else best, f"the held-out score is {score}")
    if best is None or score >= best:
        return Decision(True, score, "")
    fall = best - score
    if fall > margin:
        return Decision(False, best, f"the held-out score {score:.3f} is {fall:.3f} below the best, {best:.3f}")
    return Decision(True, best, "")


@dataclass(frozen=True)
class HeldOutProbe:
    """Rows of held-out answers: `rows[i]` are token ids int64[T] and the action mask of an answer to `prompts[i]`."""

    rows: list[tuple[Tensor, Tensor]]
    prompts: list[int]

    @classmethod
    def build(cls, recipe: Recipe, renderer: ChatRenderer) -> HeldOutProbe | None:
        """The recipe's probe, None where it has none; raises `RecipeError` for texts that cannot be used."""
        config = recipe.learner.held_out_probe
        if config is None:
            return None
        script = None if recipe.environments else script_for(recipe.env)
        if config.texts is not None:
            texts = read_traces(config.texts, "learner.held_out_probe.texts")
        elif script is not None and script.sound_texts is not None:
            texts = script.sound_texts(config.prompts)
        else:
            named = "several environments" if recipe.environments else recipe.env.id
            raise RecipeError(f"learner.held_out_probe.texts: no script writes texts for {named}; give a file")
        chosen = _by_prompt(texts, config.prompts, config.texts_per_prompt)
        return cls([encode_trace(messages, renderer) for messages, _ in chosen], [index for _, index in chosen])

    @torch.no_grad()
    def score(self, policy: PolicyForward) -> float:
        """The mean over prompts of the best answer's mean log-prob a token (nats; 0 is the most there is)."""
        best: dict[int, float] = {}
        device = next(policy.parameters()).device
        for start in range(0, len(self.rows), _ROWS):
            part = slice(start, start + _ROWS)
            ids = torch.nn.utils.rnn.pad_sequence([row for row, _ in self.rows[part]], batch_first=True)
            mask = torch.nn.utils.rnn.pad_sequence([mask for _, mask in self.rows[part]], batch_first=True)
            logprobs, _ = policy(ids.to(device), mask.to(device))
            means = (logprobs.sum(-1).cpu() / mask.sum(-1)).tolist()
            if any(math.isnan(mean) for mean in means):
                return math.nan
            for index, mean in zip(self.prompts[part], means, strict=True):
                best[index] = max(best.get(index, -math.inf), mean)
        return math.fsum(best.values()) / len(best)


def _by_prompt(texts: Sequence[list[Message]], prompts: int, texts_per_prompt: int) -> list[tuple[list[Message], int]]:
    """The conversations to score, each with the number of its prompt: what stands before its last answer."""
    numbers: dict[str, int] = {}
    counts: dict[int, int] = {}
    chosen = []
    for messages in texts:
        last = max(i for i, m in enumerate(messages) if m["role"] == "assistant")
        key = json.dumps([_said(m) for m in messages[:last]], sort_keys=True)
        if key not in numbers and len(numbers) == prompts:
            continue
        number = numbers.setdefault(key, len(numbers))
        if counts.get(number, 0) < texts_per_prompt:
            counts[number] = counts.get(number, 0) + 1
            chosen.append((messages[: last + 1], number))
    return chosen


def _said(message: Message) -> dict[str, Any]:
    return {key: message.get(key) for key in ("role", "content")}
