"""Simulated users of any environment: they talk as its episodes do, and its rewards are their verdicts."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from serve_tools import NAME, serving, write_recipe

from agent.engines.client import HttpEngine
from agent.simulate.audience import EnvironmentAudience, StyleAudience, action_of
from agent.simulate.clock import PolicyClock
from agent.simulate.compare import audience_of
from agent.simulate.users import Users
from agent.store.client import StoreClient
from envs.core import AsyncEnv, Step
from envs.tool_calls import parse_calls


class TwoQuestions(AsyncEnv):
    """Asks twice. The sum of its rewards is more than a verdict may be."""

    def __init__(self) -> None:
        self.heard: list[str] = []
        self.closed = False

    @property
    def task_ids(self) -> Sequence[str]:
        return ("one",)

    async def areset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[str, dict[str, Any]]:
        assert options == {"task_id": "one"}
        self.heard = []
        return "", {"messages": [{"role": "user", "content": "First?"}], "task_id": "one"}

    async def astep(self, action: str) -> Step:
        return await self._heard(action)

    async def atruncate(self, reason: str, action: str = "") -> Step:
        assert reason == "turn_tokens"
        return await self._heard(action)

    async def _heard(self, action: str) -> Step:
        self.heard.append(action)
        over = len(self.heard) == 2
        return "", 0.7, over, False, {"messages": [] if over else [{"role": "user", "content": "And second?"}]}

    async def aclose(self) -> None:
        self.closed = True


@pytest.mark.timeout(240)
async def test_an_environments_episodes_are_conversations_with_its_reward(
    models: tuple[Path, Path], tmp_path: Path
) -> None:
    """Users could write for one environment alone."""
    made: list[TwoQuestions] = []

    def make() -> TwoQuestions:
        made.append(TwoQuestions())
        return made[-1]

    with serving(write_recipe(tmp_path, models[0])) as server:
        limit = aiohttp.ClientTimeout(total=60)
        async with (
            aiohttp.ClientSession(timeout=limit) as session,
            PolicyClock.watching(session, server.url) as clock,
            StoreClient(server_store(server.run_dir), key=server.key) as store,
        ):
            audience = EnvironmentAudience(make, steps=1)
            users = Users(session, server.url, NAME, audience, clock, batch=2, concurrency=2, ahead=1)
            running = asyncio.create_task(users.run())
            async with asyncio.timeout(120):
                while (await store.status()).ready < 4:  # noqa: ASYNC110 (two batches; then they wait)
                    await asyncio.sleep(0.05)
                learner = HttpEngine(server.engine, key=server.key)
                await learner.publish(1, models[1])
                await learner.close()
                interactions = await running
            await audience.aclose()
            rows = await store.episodes()
            episodes = [await store.episode(row.id) for row in rows]
    assert len(interactions) >= 4
    assert {(i.task_id, i.style, i.target) for i in interactions} == {("one", "", "")}
    assert all(env.closed for env in made)
    for interaction in interactions:
        assert interaction.reward in (0.7, 1.0)  # cut in the first turn, or held to 1
    assert {len(e.turn_rewards) for e in episodes} <= {1, 2}
    for episode in episodes:
        assert sum(episode.turn_rewards) == pytest.approx(1.0 if len(episode.turn_rewards) == 2 else 0.7)


def server_store(run_dir: Path) -> str:
    """The address in the store's log."""
    said = (run_dir / "store.log").read_text()
    return "http://" + said.rpartition(" at http://")[2].split()[0]


def test_a_reply_with_calls_reads_as_it_was_written() -> None:
    call = {"function": {"name": "python", "arguments": '{"code": "1+1"}'}}
    text = action_of({"content": "So:", "tool_calls": [call]})
    read = parse_calls(text, [], "hermes")
    assert (read.content.strip(), [(call.name, call.arguments) for call in read.calls]) == (
        "So:",
        [("python", {"code": "1+1"})],
    )
    assert action_of({"content": None, "tool_calls": [call]}).startswith("<tool_call>")


def test_the_recipe_says_whose_users_come(tmp_path: Path) -> None:
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text("env: {id: 'sao/StyleShift-v0', kwargs: {prompts: tiny}}\nlearner: {steps: 7}\n")
    assert isinstance(audience_of(recipe, ()), StyleAudience)
    others = audience_of(recipe, (f"env.id={__name__}:TwoQuestions", "env.kwargs={}"))
    assert isinstance(others, EnvironmentAudience)
    assert others.steps == 7
    recipe.write_text("learner: {steps: 7}\n")
    with pytest.raises(ValueError, match=r"env\.id is missing"):
        audience_of(recipe, ())
