"""Carrying attempts out: through `areset` and `astep` of the environment itself, many episodes on one event loop."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from envs.attack.arena import Arena, Attempt, Policy, Source, Task
from envs.attack.report import Row
from envs.core import AsyncEnv, EnvironmentFault
from envs.making import make_core

EXAMPLES = 3
"""Attempts that a row keeps to show: earning ones of an attacker, refused ones of an honest policy."""

MakeCore = Callable[[str, Mapping[str, Any]], AsyncEnv]


def _make(env_id: str, kwargs: Mapping[str, Any]) -> AsyncEnv:
    return make_core(env_id, **kwargs)


class _Tally:
    """What came of one policy's episodes in one source."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self.earned: list[str] = []
        self.refused: list[str] = []
        self.faults: list[str] = []

    def row(self, arena: Arena[Any], source: Source[Any], policy: Policy[Any]) -> Row:
        shown = self.faults or (self.refused if policy.honest else self.earned)
        return Row(
            arena.env_id, source.name, policy.name, policy.honest, self.counts["episodes"], self.counts["earned"],
            self.counts["faults"], tuple(shown[:EXAMPLES]),
        )  # fmt: skip


async def play(
    arena: Arena[Any],
    seeds: Sequence[int],
    *,
    episodes: int | None = None,
    kwargs: Mapping[str, Any] | None = None,
    make: MakeCore = _make,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> list[Row]:
    """Play every policy of `arena` against its sources; one row for each policy and source, all seeds together.

    An episode that raises `EnvironmentFault` is counted as a fault and earns nothing. Raises what making an
    environment or loading its tasks raises.
    """
    tallies: dict[tuple[str, str], tuple[Source[Any], Policy[Any], _Tally]] = {}
    jobs: list[tuple[Source[Any], list[tuple[Task[Any], Attempt, _Tally]]]] = []
    for seed in seeds:
        for source in arena.sources(seed, episodes or arena.episodes, kwargs or {}):
            planned = []
            for policy in arena.policies:
                tally = tallies.setdefault((source.name, policy.name), (source, policy, _Tally()))[2]
                planned += [(task, attempt, tally) for task, attempt in arena.plan(source, policy, seed)]
            jobs.append((source, planned))
    total, done = sum(len(planned) for _, planned in jobs), 0

    def one_done() -> None:
        nonlocal done
        done += 1
        progress(done, total)

    for source, planned in jobs:
        await _play_source(arena, source, planned, make, one_done)
    return [tally.row(arena, source, policy) for source, policy, tally in tallies.values() if tally.counts["episodes"]]


async def _play_source(
    arena: Arena[Any],
    source: Source[Any],
    planned: Sequence[tuple[Task[Any], Attempt, _Tally]],
    make: MakeCore,
    one_done: Callable[[], None],
) -> None:
    queue: Iterator[tuple[Task[Any], Attempt, _Tally]] = iter(planned)

    async def drain() -> None:
        core = make(arena.env_id, source.kwargs)
        try:
            for task, attempt, tally in queue:
                await _play_one(core, source, task, attempt, tally)
                one_done()
        finally:
            await core.aclose()

    try:
        async with asyncio.TaskGroup() as group:
            for _ in range(min(arena.concurrency, len(planned))):
                group.create_task(drain())
    except BaseExceptionGroup as failed:
        raise failed.exceptions[0] from None  # the first one; the others were cancelled for it


async def _play_one(core: AsyncEnv, source: Source[Any], task: Task[Any], attempt: Attempt, tally: _Tally) -> None:
    tally.counts["episodes"] += 1
    try:
        reward = await episode_reward(core, task.options, attempt)
    except EnvironmentFault as fault:
        tally.counts["faults"] += 1
        tally.faults.append(f"{_told(task, attempt)}: {fault}")
        return
    earned = reward > source.reward_for_nothing
    tally.counts["earned"] += earned
    (tally.earned if earned else tally.refused).append(_told(task, attempt))


async def episode_reward(core: AsyncEnv, options: Mapping[str, Any], attempt: Attempt) -> float:
    """All that one episode pays. One that has not ended by itself is truncated: what it leaves is graded too."""
    await core.areset(seed=0, options=dict(options))
    total = 0.0
    *before, last = attempt.actions
    for action in before if attempt.cut else attempt.actions:
        _, reward, terminated, truncated, _ = await core.astep(action)
        total += reward
        if terminated or truncated:
            return total
    _, reward, *_ = await core.atruncate("context", last if attempt.cut else "")
    return total + reward


def _told(task: Task[Any], attempt: Attempt) -> str:
    """An attempt in words, to be found again."""
    said = attempt.told or " | ".join(attempt.actions)
    return f"{task.mark} <- {said}{' (cut)' if attempt.cut else ''}"[:400]
