"""Traces of the scripted engineer: what a policy's cold start on the demo set learns from.

The scripts (`scripts.plan`) only decide; every observation and reward is the environment's own, from a real container.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass
from typing import Any

from envs.core import AsyncEnv
from envs.swe_bench.demo.scripts import SCRIPTS, plan
from envs.swe_bench.demo.source import DemoError

MakeEnv = Callable[[], AsyncEnv]


@dataclass(frozen=True, slots=True)
class Trace:
    """One episode: chat messages (content is text throughout), and the reward at its end."""

    task_id: str
    messages: list[dict[str, Any]]
    reward: float


async def play(env: AsyncEnv, task_id: str, actions: list[str]) -> Trace:
    """Carry out `actions` in one episode of `env`; the last one must end it. Raises `DemoError`, `EnvironmentFault`."""
    _, info = await env.areset(options={"task_id": task_id})
    messages: list[dict[str, Any]] = list(info["messages"])
    total = 0.0
    for number, action in enumerate(actions, start=1):
        messages.append({"role": "assistant", "content": action})
        _, reward, terminated, truncated, info = await env.astep(action)
        total += reward
        if terminated or truncated:
            if number < len(actions):
                raise DemoError(f"{task_id}: the episode ended after {number} of {len(actions)} actions")
            return Trace(task_id, messages, total)
        messages += [{"role": m["role"], "content": m["content"]} for m in info["messages"]]
    raise DemoError(f"{task_id}: the episode did not end with its last action")


async def write_traces(
    make_env: MakeEnv, count: int, *, seed: int = 0, error_rate: float = 0.0, concurrency: int = 2
) -> AsyncGenerator[Trace, None]:
    """Yield `count` traces, the repositories in turn, in an order that `seed` fixes; `concurrency` episodes at once.

    Few ways lead through so small a set, and one that was gone before is not gone again: its trace comes twice.
    """
    rng = random.Random(seed)
    names = list(SCRIPTS)
    plans = []
    for index in range(count):
        name = names[index % len(names)]
        plans.append((f"sao-demo__{name}-1", tuple(plan(name, rng, error_rate))))
    envs: asyncio.Queue[AsyncEnv] = asyncio.Queue()
    made: list[AsyncEnv] = []
    for _ in range(max(1, min(concurrency, count))):
        made.append(make_env())
        envs.put_nowait(made[-1])

    async def one(task_id: str, actions: tuple[str, ...]) -> Trace:
        env = await envs.get()
        try:
            return await play(env, task_id, list(actions))
        finally:
            envs.put_nowait(env)

    tasks: dict[tuple[str, tuple[str, ...]], asyncio.Task[Trace]] = {}
    try:
        for key in dict.fromkeys(plans):
            tasks[key] = asyncio.create_task(one(*key))
        for key in plans:
            yield await tasks[key]
    finally:
        for task in tasks.values():
            task.cancel()
        await asyncio.gather(*tasks.values(), return_exceptions=True)
        for env in made:
            await env.aclose()
