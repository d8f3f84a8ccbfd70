"""The arena of `sao/StyleShift-v0`: prompts with the step, and so the style, that an attacker may know."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from envs.attack.arena import Arena, Source, Task
from envs.style_shift.env import StyleShift
from envs.style_shift.prompts import Language

STEPS = 10**4


@dataclass(frozen=True, slots=True)
class Mark:
    """A prompt as an attacker sees it, with the style that counts."""

    prompt: str
    topic: str
    language: Language
    style: str

    def __str__(self) -> str:
        return f"{self.prompt!r} ({self.style})"


def sources(seed: int, episodes: int, kwargs: Mapping[str, Any]) -> Sequence[Source[Mark]]:
    """English, Chinese and the tiny recipe's prompts, or `prompts` of `kwargs`; the styles in turn."""
    names = [kwargs["prompts"]] if "prompts" in kwargs else ["english", "chinese", "tiny"]
    return [_source(name, seed, episodes, kwargs) for name in names]


def _source(prompts: Any, seed: int, episodes: int, kwargs: Mapping[str, Any]) -> Source[Mark]:
    made = {**kwargs, "prompts": prompts}
    env = StyleShift(**made)
    name = prompts if isinstance(prompts, str) else "prompts"
    rng = random.Random(f"{name}/{seed}")
    tasks = []
    starts = [phase.start for phase in env.schedule.phases]
    for index in range(episodes):
        task_id = rng.choice(env.task_ids)
        task, step = env.task(task_id), starts[index % len(starts)]
        mark = Mark(task.prompt, task.topic, task.language, env.schedule.at(step).style)
        tasks.append(Task({"task_id": task_id, "step": step}, mark))
    return Source(name, made, tasks)


ARENA: Arena[Mark] = Arena("sao/StyleShift-v0", sources, episodes=24, most=4, concurrency=4)
