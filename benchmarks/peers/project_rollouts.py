"""The project's runtime with an environment and a store that do nothing, for `rollouts.py`.

Everything between is real: ticket source, engine pool with its health checks, seats, slots, rollout, chat renderer,
validated episodes. The engine is an object of this process, or `HttpEngine`. The garbage collector is calmed as
`python -m agent.runtime` does it.
"""

from __future__ import annotations

import asyncio
import cProfile
import itertools
import logging
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT)]

from agent import collector  # noqa: E402
from agent.chat.renderer import ChatRenderer  # noqa: E402
from agent.descriptors import raise_limit  # noqa: E402
from agent.engines.base import Completion, Engine, EngineHealth  # noqa: E402
from agent.engines.client import HttpEngine  # noqa: E402
from agent.episode import Episode, SamplingParams  # noqa: E402
from agent.runtime.runtime import Runtime  # noqa: E402
from agent.runtime.settings import EnvConfig, RuntimeConfig, StageLimits  # noqa: E402
from agent.store.protocol import Ending, Ticket  # noqa: E402
from benchmarks.peers.cost import answer, measured  # noqa: E402
from benchmarks.peers.rollout_script import read  # noqa: E402
from envs.core import AsyncEnv, Step  # noqa: E402

WARM_UP = 8


class InstantEngine:
    """Answers as the fake engine does, in this process, after one turn of the event loop."""

    def __init__(self, script: dict[str, Any], turns: int) -> None:
        def completion(ids: list[int]) -> Completion:
            return Completion(tuple(ids), (-0.5,) * len(ids), (0,) * len(ids), "stop")

        self._turns = turns
        self._call, self._final = completion(script["call_ids"]), completion(script["final_ids"])

    async def generate(
        self,
        prompt_ids: Sequence[int],
        sampling: SamplingParams,
        *,
        request_id: str | None = None,
        timeout_s: float | None = None,
    ) -> Completion:
        await asyncio.sleep(0)
        turn = int((request_id or "").rpartition(".")[2])  # the rollout numbers its requests from 1
        return self._final if turn >= self._turns else self._call

    async def publish(self, version: int, weights: Any) -> None: ...

    async def abort(self, request_id: str) -> None: ...

    async def health(self) -> EngineHealth:
        return EngineHealth(version=0, running=0, waiting=0, max_context=1_000_000)

    async def close(self) -> None: ...


class NoEnv(AsyncEnv):
    """Says what is next of `said` after every action; ends after `turns`."""

    def __init__(self, tool: dict[str, Any], prompts: Iterator[str], said: Iterator[str], turns: int) -> None:
        self._tool, self._prompts, self._said = tool, prompts, said
        self._turns, self._taken = turns, 0

    @property
    def task_ids(self) -> Sequence[str]:
        return ("task",)

    async def areset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[str, dict[str, Any]]:
        self._taken = 0
        messages = [{"role": "user", "content": next(self._prompts)}]
        return "", {"messages": messages, "tools": [self._tool], "segment": "prompt"}

    async def astep(self, action: str) -> Step:
        self._taken += 1
        if self._taken >= self._turns:
            return "", 1.0, True, False, {"messages": [], "segment": "observation"}
        messages = [{"role": "tool", "content": next(self._said)}]
        return "", 0.0, False, False, {"messages": messages, "segment": "observation"}

    async def atruncate(self, reason: str, action: str = "") -> Step:
        return "", 0.0, False, True, {"messages": [], "segment": "observation", "truncation": reason}

    async def aclose(self) -> None: ...


class CountingStore:
    """Deals `episodes` tickets and counts what comes back; nothing is encoded or kept."""

    def __init__(self, episodes: int) -> None:
        self._dealt, self._episodes = 0, episodes
        self.taken = self.turns = self.tokens = 0
        self.done = asyncio.Event()

    async def lease(self, n: int, worker: str, wait_s: float = 0.0) -> list[Ticket]:
        first, last = self._dealt, min(self._dealt + n, self._episodes)
        if first == last:
            await asyncio.sleep(wait_s)
        self._dealt = last
        return [Ticket(id=str(i), kind="train", task_index=0, epoch=0, seed=i) for i in range(first, last)]

    async def put(self, ticket_id: str, episode: Episode) -> Ending:
        self.taken += 1
        self.turns += len(episode.turn_rewards)
        self.tokens = sum(len(s.token_ids) for s in episode.segments)
        if self.taken == self._episodes:
            self.done.set()
        return Ending("accepted")

    async def fail(self, ticket_id: str, reason: str, retry: bool = True, worker: str = "") -> Ending:
        raise RuntimeError(reason)

    async def release_worker(self, worker: str) -> int:
        return 0

    async def close(self) -> None: ...


async def run(asked: dict[str, Any], store: CountingStore, engine: Engine, concurrency: int) -> None:
    """Run the store's episodes through a runtime."""
    script = read(Path(asked["folder"]), asked["length"])
    config = RuntimeConfig(
        store="http://none",
        engines=("fake",),
        model="none",
        env=EnvConfig(id="peers/None-v0"),
        concurrency=concurrency,
        max_context_tokens=1_000_000,
        max_tokens_per_turn=1024,
        progress_every_s=3600.0,
        limits=StageLimits(generate_s=1800.0, episode_s=36_000.0),
    )
    renderer = ChatRenderer.from_pretrained(Path(asked["folder"]))
    prompts, said = itertools.cycle(script["prompts"]), itertools.cycle(script["observations"])
    runtime = Runtime(
        config,
        store=store,
        engines={"fake": engine},
        renderer=renderer,
        make_env=lambda _: NoEnv(script["tool"], prompts, said, asked["turns"]),
    )
    running = asyncio.create_task(runtime.run())
    done = asyncio.create_task(store.done.wait())
    await asyncio.wait({running, done}, return_when=asyncio.FIRST_COMPLETED)
    over = done.done()
    done.cancel()
    running.cancel()
    [error, _] = await asyncio.gather(running, done, return_exceptions=True)
    if not over:
        raise RuntimeError("the runtime ended early") from (error if isinstance(error, BaseException) else None)


async def worker(asked: dict[str, Any]) -> None:
    """`asked`: folder, length, turns, episodes, concurrency, url (None: in process), profile (a file, or None)."""
    logging.basicConfig(level=logging.WARNING)
    raise_limit(2 * asked["concurrency"], "the benchmark")
    script = read(Path(asked["folder"]), asked["length"])
    engine: Engine = InstantEngine(script, asked["turns"])
    if asked["url"]:
        engine = HttpEngine(asked["url"], keepalive_s=60.0)
    if asked["episodes"] > WARM_UP:  # templates compiled, modules loaded
        await run(asked, CountingStore(WARM_UP), engine, 4)
    store, profiler = CountingStore(asked["episodes"]), cProfile.Profile()
    collector.calm()
    if asked.get("profile"):
        profiler.enable()
    with measured() as cost:
        await run(asked, store, engine, asked["concurrency"])
    if asked.get("profile"):
        profiler.disable()
        profiler.dump_stats(asked["profile"])
    await engine.close()
    answer(cost | {"turns": store.turns, "tokens": store.tokens})
