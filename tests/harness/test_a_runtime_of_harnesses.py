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
    """Requests that fail side by side move the episode once each, and the engines' loads are even in the end."""
    engines = {f"engine-{i}": ScriptedEngine(renderer, lambda prompt, number: "right") for i in range(3)}
    dying = engines["engine-0"]

    def script(prompt: str, number: int) -> str | EngineFault:
        dying.down = dying.down or number >= 4
        return EngineFault("it dies") if dying.down else "right"

    dying.script = script

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
        running = asyncio.create_task(runtime.run())
        found = await learner.claim(10, version=0, wait_s=WAIT_S)
        running.cancel()
        await asyncio.wait({running}, timeout=20)
        await client.close()
    await store.stop()
    assert found is not None
    episodes = [decode(data) for data in found.episodes]
    assert len(episodes) == 10
    for episode in episodes:
        assert sorted(kinds(chain.segments) for chain in episode.chains) == ["pa", "pa", "paoa"]
        assert episode.reward == 1.0
    assert dying.down
    assert any(episode.metrics.get("engine_faults") for episode in episodes)
    assert runtime.counters["engine"] == 0, "no ticket has failed for it"
    assert [member.load for member in runtime._pool._members] == [0, 0, 0]
