"""Many harnesses at once on a real store, and an engine that dies under them."""

from __future__ import annotations

import asyncio
from pathlib import Path

from harness_tools import NOWHERE, ask, kinds, openai_client, said, user
from runtime_tools import EchoEnv, ScriptedEngine, StoreInside

from agent.chat.renderer import ChatRenderer
from agent.engines.base import EngineFault
from agent.episode import decode
from agent.harness.door import SessionDoor
from agent.harness.episodes import HarnessEpisodes
from agent.harness.process import _Inside
from agent.harness.task import HarnessTask
from agent.runtime.runtime import Runtime
from agent.runtime.settings import RuntimeConfig
from agent.store.client import StoreClient
from agent.store.config import StoreConfig

WAIT_S = 60.0


async def test_an_engine_that_dies_costs_no_harness_its_episode(renderer: ChatRenderer, tmp_path: Path) -> None:
    """All engines are away for a while. Requests that fail side by side leave their seat one after the other: the loads
    add up to nothing in the end."""
    engines = {f"engine-{i}": ScriptedEngine(renderer, lambda prompt, number: "right") for i in range(2)}
    died = asyncio.Event()

    def script(prompt: str, number: int) -> str | EngineFault:
        if number == 4 and not died.is_set():
            died.set()
            for engine in engines.values():
                engine.down = True
        return EngineFault("it dies") if any(engine.down for engine in engines.values()) else "right"

    async def come_back() -> None:
        await died.wait()
        while not all(engine.refused > 3 for engine in engines.values()):  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        for engine in engines.values():
            engine.down = False

    for engine in engines.values():
        engine.script = script

    async def harness(task: HarnessTask) -> None:
        async with openai_client(task, max_retries=0) as client:
            await asyncio.gather(*(ask(client, user(f"sub-agent {i}")) for i in range(3)))
            await ask(client, user("sub-agent 0"), said("right"), user("the end"))

    store = StoreInside(tmp_path / "episodes.sqlite", StoreConfig(tasks=20, batch=10, max_lag=0))
    await store.start()
    config = RuntimeConfig.model_validate(
        {
            "store": store.url,
            "engines": list(engines),
            "model": "m",
            "env": {"id": "test/Echo-v0"},
            "harness": {"call": NOWHERE},
            "concurrency": 4,
            "limits": {"shutdown_s": 8.0, "engine_check_every_s": 0.2},
        }
    )
    assert config.harness is not None
    async with SessionDoor.listening(config.harness) as door, StoreClient(store.url) as learner:
        client = StoreClient(store.url)
        runtime = Runtime(
            config,
            store=client,
            engines=dict(engines),
            renderer=renderer,
            make_env=lambda chosen: EchoEnv(tasks=20),
            run_episode=HarnessEpisodes(config.harness, door, _Inside("harness", harness)),
        )
        running, back = asyncio.create_task(runtime.run()), asyncio.create_task(come_back())
        found = await learner.claim(10, version=0, wait_s=WAIT_S)
        running.cancel()
        await asyncio.wait({running, back}, timeout=20)
        await client.close()
    await store.stop()
    assert found is not None
    episodes = [decode(data) for data in found.episodes]
    assert len(episodes) == 10
    for episode in episodes:
        assert sorted(kinds(chain.segments) for chain in episode.chains) == ["pa", "pa", "paoa"]
        assert episode.reward == 1.0
    assert back.done()
    assert any(episode.metrics.get("engine_faults") for episode in episodes)
    assert runtime.counters["engine"] == 0, "no ticket has failed for it"
    assert [member.load for member in runtime._pool._members] == [0, 0]
