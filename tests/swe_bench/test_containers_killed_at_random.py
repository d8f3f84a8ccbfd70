"""Containers that die in mid-episode, at random: cases C and D2 with a real store, a real runtime and real containers.

The agent is scripted to solve every repository. A reward of 0 in the store could only be a dead container that was
taken for a wrong answer.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import secrets
from collections import Counter
from pathlib import Path

import pytest
from aiohttp import web
from byte_model import write_byte_model
from scripted_engine import scripted_engine

from agent.chat.renderer import ChatRenderer
from agent.engines.client import HttpEngine
from agent.episode import StopReason, decode
from agent.runtime.runtime import Runtime
from agent.runtime.settings import EnvConfig, RuntimeConfig, StageLimits
from agent.store.client import StoreClient
from agent.store.config import StoreConfig
from agent.store.ledger import Ledger
from agent.store.server import StoreServer
from envs.core import AsyncEnv
from envs.swe_bench.demo.build import ensure_demo_image
from envs.swe_bench.demo.source import demos
from envs.swe_bench.env import SWEBench
from sandboxes.base import SandboxFault
from sandboxes.docker.engine import DockerEngine
from sandboxes.docker.labels import LABEL_OWNER, LABEL_PROJECT, owner
from sandboxes.docker.settings import DockerSettings

pytestmark = [pytest.mark.docker, pytest.mark.xdist_group("demo-images")]


class Killer:
    """Kills containers of one project and of this process, one at each call with probability `share`."""

    def __init__(self, project: str, share: float, seed: int) -> None:
        self._engine = DockerEngine()
        self._labels = {"label": [f"{LABEL_PROJECT}={project}", f"{LABEL_OWNER}={owner()}"]}
        self._share, self._random = share, random.Random(seed)
        self.killed: list[str] = []

    async def containers(self, *, all: bool) -> list[str]:
        api = self._engine.client.api
        return sorted(c["Id"] for c in await self._engine.call(lambda: api.containers(all=all, filters=self._labels)))

    async def strike(self) -> None:
        """Whoever asks is in the middle of an episode; whom it hits may be setting up, at work, or being graded."""
        if self._random.random() >= self._share:
            return
        running = await self.containers(all=False)
        if running:
            chosen = self._random.choice(running)
            with contextlib.suppress(SandboxFault):  # it may have ended by itself meanwhile
                await self._engine.call(lambda: self._engine.client.api.kill(chosen))
                self.killed.append(chosen)

    async def close(self) -> None:
        await self._engine.close()


async def left(killer: Killer) -> list[str]:
    """Containers that are still there when the engine had a minute to remove them."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(60):
            while await killer.containers(all=True):  # noqa: ASYNC110 (the engine tells nobody; it is asked)
                await asyncio.sleep(0.2)
    return await killer.containers(all=True)


@pytest.mark.parametrize(
    "episodes",
    [
        pytest.param(8, marks=pytest.mark.timeout(1800)),
        pytest.param(50, marks=[pytest.mark.slow, pytest.mark.timeout(3600)]),
    ],
)
async def test_a_killed_container_is_a_fault_and_never_a_wrong_answer(
    episodes: int, tmp_path: Path, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    caplog.set_level(logging.INFO)
    engine = DockerEngine()
    for name in demos():
        await ensure_demo_image(name, engine=engine)
    await engine.close()
    project = f"test-{secrets.token_hex(6)}"
    settings = DockerSettings(memory_bytes=512 * 2**20, cpus=1.0, pids=128, ttl_s=3600, project=project)
    killer = Killer(project, share=0.15, seed=episodes)
    ledger = Ledger(tmp_path / "episodes.sqlite", StoreConfig(tasks=5, batch=episodes, max_lag=0, max_attempts=3))
    runner = web.AppRunner(StoreServer(ledger).application(), handler_cancellation=True, shutdown_timeout=2.0)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    made: list[AsyncEnv] = []

    def make(config: EnvConfig) -> AsyncEnv:
        made.append(SWEBench("demo", scaffold="bash", docker=settings))
        return made[-1]

    model = write_byte_model(tmp_path / "model")
    store = StoreClient(f"http://127.0.0.1:{runner.addresses[0][1]}")
    try:
        async with scripted_engine(model, before=killer.strike) as url:
            config = RuntimeConfig(
                store=store.url,
                engines=(url,),
                model=str(model),
                env=EnvConfig(id="sao/SWEBench-v0"),
                concurrency=4,
                max_context_tokens=16_384,
                max_tokens_per_turn=2048,
                limits=StageLimits(reset_s=600, step_s=600, shutdown_s=120),
            )
            http, told = HttpEngine(url), StoreClient(store.url)
            runtime = Runtime(
                config,
                store=told,
                engines={url: http},
                renderer=ChatRenderer.from_pretrained(model),
                make_env=make,
            )
            task = asyncio.create_task(runtime.run())
            try:
                while True:
                    status = await store.status()
                    given_up = status.counters.get("given_up", 0)
                    # What was given up frees its place, and another ticket is dealt in its stead.
                    if status.ready >= episodes:
                        break
                    assert not task.done(), task.exception()
                    await asyncio.sleep(0.5)
            finally:
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)
                await http.close()
                await told.close()
        assert await left(killer) == [], "a container outlived its episode"
        claim = await store.claim(episodes, version=0, wait_s=5)
        assert claim is not None
        found = [decode(data) for data in claim.episodes]
        counters = (await store.status()).counters
    finally:
        await store.close()
        await runner.cleanup()
        await killer.close()
    regraded = sum("grading failed and is tried again" in record.getMessage() for record in caplog.records)
    faults = runtime.counters["environment"]
    with capsys.disabled():
        print(
            f"\n{episodes} episodes, {len(killer.killed)} containers killed: {faults} faults "
            f"({counters.get('retried', 0)} retried, {given_up} given up), {regraded} graded again in mid-grading; "
            f"attempts: {dict(sorted(Counter(e.attempt for e in found).items()))}"
        )
    assert len(found) == episodes
    assert killer.killed, "nobody was killed, so nothing was shown"
    assert faults + regraded > 0
    assert counters.get("retried", 0) + counters.get("given_up", 0) == faults, "every fault is counted as one"
    assert {e.stop_reason for e in found} == {StopReason.TERMINATED}
    assert [e.reward for e in found] == [1.0] * episodes, "a dead container was taken for a wrong answer"
    assert runtime.counters["rejected"] == runtime.counters["engine"] == 0
