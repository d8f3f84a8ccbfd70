"""Texts for a cold start on `sao/StyleShift-v0` with tiny prompts, and sound ones for the held-out probe.

The grammar of `envs.style_shift.tiny` writes them: every style equally often, so that the cold start knows all of
them about equally and prefers none.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from typing import Any

from envs.style_shift import tiny
from envs.style_shift.prompts import tasks
from envs.style_shift.schedule import STYLES
from learner.traces import Message

ENV_ID = "sao/StyleShift-v0"
_DRAWS = 80  # a style has eight sound texts on a topic; so many draws miss one of them once in 5,000 prompts


def has_script(env_id: str, kwargs: Mapping[str, Any]) -> bool:
    """Whether the grammar can write for this environment."""
    return env_id == ENV_ID and kwargs.get("prompts") == "tiny"


def style_traces(count: int, *, bad: float, seed: int) -> Iterator[list[Message]]:
    """`count` conversations, a share `bad` of them with a text of bad quality."""
    for task, _, _, text in tiny.traces(count, bad=bad, seed=seed):
        yield [{"role": "user", "content": task.prompt}, {"role": "assistant", "content": text}]


def sound_texts(prompts: int, seed: int = 0) -> list[list[Message]]:
    """Every sound text that the grammar has for each of `prompts` prompts, in all styles."""
    rng = random.Random(seed)
    available = tasks("tiny")
    found = []
    for task in rng.sample(available, min(prompts, len(available))):
        texts = {tiny.write(style, task.topic, rng) for style in STYLES for _ in range(_DRAWS)}
        for text in sorted(texts):
            found.append([{"role": "user", "content": task.prompt}, {"role": "assistant", "content": text}])
    return found
