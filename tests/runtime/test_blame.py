"""What fails is counted where it failed: an episode that the store does not keep, an environment that is malformed."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from runtime_tools import AnyStore, EchoEnv
from test_runtime import WAIT_S, Bench, CountingClient, config, until

from agent.chat.renderer import ChatRenderer
from agent.episode import Episode
from agent.runtime.runtime import NothingWorks
from agent.store.protocol import Ending


@pytest.mark.parametrize(("outcome", "fault"), [("given_up", True), ("retry", True), ("superseded", False)])
async def test_an_episode_that_the_store_does_not_keep_is_counted_as_that(
    renderer: ChatRenderer, store: AnyStore, outcome: Any, fault: bool
) -> None:
    """Case M4: "2,752 episodes, faults: none, mean reward 1.0", and not one of them was kept."""

    class Refusing(CountingClient):
        async def put(self, ticket_id: str, episode: Episode) -> Ending:
            return Ending(outcome, "its metrics are too large")

    bench = Bench(renderer, config(store, faults_in_a_row=1000), store=Refusing)
    async with bench.running():
        await until(lambda: bench.runtime.counters[outcome] >= 3)
    counters = bench.runtime.counters
    assert counters["episodes"] == counters["action_tokens"] == counters["terminated"] == 0
    assert bool(counters["rejected"]) is fault
    line = bench.runtime.progress.line()
    assert line.startswith("0 episodes")
    assert f"{counters[outcome]} {outcome}" in line


async def test_a_store_that_keeps_nothing_ends_the_runtime_with_the_reason(
    renderer: ChatRenderer, store: AnyStore
) -> None:
    class Refusing(CountingClient):
        async def put(self, ticket_id: str, episode: Episode) -> Ending:
            return Ending("given_up", "its metrics are too large")

    bench = Bench(renderer, config(store, faults_in_a_row=3), store=Refusing)
    async with bench.running() as task:
        with pytest.raises(NothingWorks, match="its metrics are too large"):
            await asyncio.wait_for(asyncio.shield(task), WAIT_S)


async def test_a_malformed_environment_fails_its_ticket_and_the_others_go_on(
    renderer: ChatRenderer, store: AnyStore
) -> None:
    """Case M2: a 4-tuple ended the runtime for all 64 slots."""
    steps = 0

    class Odd(EchoEnv):
        async def astep(self, action: str) -> Any:
            nonlocal steps
            steps += 1
            return ("", 0.0, True, {}) if steps == 2 else await super().astep(action)

    bench = Bench(renderer, config(store), make_env=lambda chosen: Odd(tasks=20))
    async with bench.running() as task:
        await until(lambda: bench.runtime.counters["environment"] >= 1 and bench.runtime.counters["episodes"] >= 3)
        assert not task.done()
