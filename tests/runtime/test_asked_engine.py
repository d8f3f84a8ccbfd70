"""An environment asks the engine of its own episode: what it is told is in no segment that is trained."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from runtime_tools import EchoEnv, ScriptedEngine, settings, ticket

from agent.chat.renderer import ChatRenderer
from agent.engines.base import EngineFault
from agent.episode import StopReason
from agent.runtime.rollout import rollout
from agent.runtime.settings import EnvConfig, SamplingConfig
from envs.core import EnvironmentFault, Model, Step
from learner.config.mixture import MixedEnvConfig


class UserSimulator(EchoEnv):
    """The user's side of a talk is played by the model; a judge, asked twice at once, says how it went."""

    model: Model | None = None

    async def areset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[str, dict[str, Any]]:
        _, info = await super().areset(seed=seed, options=options)
        self.prompt = await self._ask("USER", "Begin.")
        return self.prompt, {**info, "messages": [{"role": "user", "content": self.prompt}]}

    async def astep(self, action: str) -> Step:
        if "done" in action:
            grades = await asyncio.gather(*(self._ask("JUDGE", f"{action} {i}") for i in range(2)))
            return "", sum(map(float, grades)), True, False, {"messages": []}
        said = await self._ask("USER", action)
        return said, 0.0, False, False, {"messages": [{"role": "user", "content": said}]}

    async def _ask(self, role: str, text: str) -> str:
        assert self.model is not None
        messages = [{"role": "system", "content": f"You are the {role}."}, {"role": "user", "content": text}]
        return await self.model.chat(messages, max_tokens=40, temperature=0.25, stop=["END"])


def script(prompt: str, number: int) -> str:
    if "You are the USER" in prompt:
        return "<think>a secret</think>I want tea. END of it"
    if "You are the JUDGE" in prompt:
        return "0.5"
    return "Which tea?" if "Which tea?" not in prompt else "done"


async def test_what_an_environment_asks_is_no_action_and_is_counted(renderer: ChatRenderer) -> None:
    engine = ScriptedEngine(renderer, script)
    episode = await rollout(ticket(), UserSimulator(), engine, renderer, settings())
    assert episode.stop_reason is StopReason.TERMINATED
    assert episode.turn_rewards == (0.0, 1.0)
    assert [s.kind for s in episode.segments] == ["prompt", "action", "observation", "action"]
    assert [s.text for s in episode.segments if s.kind == "action"] == ["Which tea?", "done"]
    everything = "".join(s.text for s in episode.segments)
    assert everything.count("I want tea.") == 2
    assert "secret" not in everything
    assert "JUDGE" not in everything
    assert (episode.metrics["asked"], episode.metrics["asked_faults"]) == (4, 0)
    assert episode.metrics["asked_tokens"] > 80
    asked = [sampling for ids, sampling in engine.requests if "You are the" in renderer.decode(ids)]
    assert [(s.max_tokens, s.temperature, s.stop) for s in asked] == [(40, 0.25, ("END",))] * 4


async def test_a_seeded_episode_asks_with_seeds_of_its_own(renderer: ChatRenderer) -> None:
    seeds = []
    for _ in range(2):
        engine = ScriptedEngine(renderer, script)
        await rollout(ticket(), UserSimulator(), engine, renderer, settings(sampling=SamplingConfig(seeded=True)))
        seeds.append(sorted(str(sampling.seed) for _, sampling in engine.requests))
    assert seeds[0] == seeds[1]
    assert len(set(seeds[0])) == 6


async def test_a_question_survives_an_engine_that_fails_once_and_its_end_is_the_environments_fault(
    renderer: ChatRenderer,
) -> None:
    moved = []

    def failing(always: bool) -> Any:
        def answer(prompt: str, number: int) -> Any:
            broken = "You are the" in prompt and (always or not moved)
            return EngineFault("the engine has gone") if broken else script(prompt, number)

        return answer

    async def recover(fault: EngineFault) -> None:
        moved.append(fault)

    engine = ScriptedEngine(renderer, failing(always=False))
    episode = await rollout(ticket(), UserSimulator(), engine, renderer, settings(), recover=recover)
    assert (episode.reward, len(moved)) == (1.0, 1)
    engine = ScriptedEngine(renderer, failing(always=True))
    with pytest.raises(EnvironmentFault, match=r"the environment's question.*the engine has gone"):
        await rollout(ticket(), UserSimulator(), engine, renderer, settings())


async def test_a_question_past_its_time_is_aborted_and_the_episode_void(renderer: ChatRenderer) -> None:
    engine = ScriptedEngine(renderer, script)
    engine.hold = asyncio.Event()
    with pytest.raises(EnvironmentFault, match="the environment's question"):
        await rollout(ticket(), UserSimulator(), engine, renderer, settings(generate_s=0.2))
    assert engine.aborted == ["t1.asked1.0.1"]


async def test_an_environment_that_asks_nobody_reports_no_figures_of_it(renderer: ChatRenderer) -> None:
    episode = await rollout(ticket(), EchoEnv(), ScriptedEngine(renderer, lambda p, n: "right"), renderer, settings())
    assert not [name for name in episode.metrics if name.startswith("asked")]


def test_keys_of_a_recipe_reach_the_environment_and_contradictions_are_refused() -> None:
    model = {"url": "http://judge/v1", "name": "big", "key_env": "JUDGE_KEY"}
    tools = {"mcp": [{"command": ["server"]}]}
    config = EnvConfig.model_validate({"id": "x:Y", "kwargs": {"a": 1}, "model": model, "tools": tools})
    arguments = config.arguments
    assert (arguments["a"], arguments["model"].key_env, arguments["tools"].mcp[0].command) == (
        1,
        "JUDGE_KEY",
        ("server",),
    )
    assert EnvConfig(id="x:Y", kwargs={"model": "own"}).arguments == {"model": "own"}
    mixed = MixedEnvConfig.model_validate({"id": "x:Y", "model": model})
    assert mixed.env.model == config.model
    for wrong in (
        {"model": {**model, "nmae": "x"}},
        {"model": model, "kwargs": {"model": "x"}},
        {"tools": {"mpc": []}},
    ):
        with pytest.raises(ValueError, match=r"nmae|kwargs\.model|mpc"):
            EnvConfig.model_validate({"id": "x:Y", **wrong})
