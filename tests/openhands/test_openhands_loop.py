"""OpenHands' own agent loop behind a session address: a demo repository is repaired, and the tokens are the record.

The policy is a script; the loop is a program of its own, and the tools work in the environment's container.
"""

from __future__ import annotations

import json
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from byte_model import write_byte_model

from agent.chat.renderer import ChatRenderer
from agent.engines.base import Completion, EngineHealth
from agent.episode import Episode, SamplingParams, StopReason
from agent.harness.door import SessionDoor
from agent.harness.episodes import HarnessEpisodes
from agent.harness.process import harness_of
from agent.runtime.settings import HarnessConfig, RolloutSettings, SamplingConfig, StageLimits
from agent.store.protocol import Ticket
from envs import make_core
from envs.core import AsyncEnv
from envs.swe_bench.demo.scripts import SCRIPTS
from envs.tool_calls import write_calls
from envs.tool_formats.reading import ToolCall

pytestmark = [pytest.mark.openhands, pytest.mark.docker, pytest.mark.timeout(900), pytest.mark.xdist_group("openhands")]

ROOT = Path(__file__).parents[2]
TEMPLATE = (
    "{% if tools %}<|im_start|>system\n{{ tools | tojson }}<|im_end|>\n{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}"
    "{% for c in m.tool_calls or [] %}<tool_call>"
    '{{ {"name": c.function.name, "arguments": c.function.arguments} | tojson }}</tool_call>{% endfor %}<|im_end|>\n'
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@pytest.fixture(scope="module")
def renderer(tmp_path_factory: pytest.TempPathFactory) -> ChatRenderer:
    folder = write_byte_model(tmp_path_factory.mktemp("model"))
    config = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps({**config, "chat_template": TEMPLATE}))
    return ChatRenderer.from_pretrained(folder)


class Engineer:
    """Writes the turns that it was given, one a request, and keeps the prompts."""

    def __init__(self, renderer: ChatRenderer, turns: list[str]) -> None:
        self.renderer, self.turns, self.prompts = renderer, turns, list[tuple[int, ...]]()

    async def generate(
        self,
        prompt_ids: Any,
        sampling: SamplingParams,
        *,
        request_id: str | None = None,
        timeout_s: float | None = None,
    ) -> Completion:
        self.prompts.append(tuple(prompt_ids))
        ids = self.renderer.encode_action(self.turns[min(len(self.prompts), len(self.turns)) - 1])
        return Completion(ids, (-0.5,) * len(ids), (len(self.prompts),) * len(ids), "stop")

    async def abort(self, request_id: str) -> None: ...

    async def publish(self, version: int, weights: Any) -> None: ...

    async def health(self) -> EngineHealth:
        return EngineHealth(version=0, running=0, waiting=0, max_context=1 << 20)

    async def close(self) -> None: ...


@pytest.fixture
async def repositories() -> AsyncIterator[AsyncEnv]:
    env = make_core("sao/SWEBench-v0", instances="demo", scaffold="openhands", memory_mb=512, cpus=1)
    yield env
    await env.aclose()


async def episode_of(env: AsyncEnv, renderer: ChatRenderer, engine: Engineer, *words: str) -> Episode:
    command = ("{python}", "-m", "agent.harness.loops.openhands_loop", *words)
    config = HarnessConfig(command=command, environment={"PYTHONPATH": str(ROOT)})
    settings = RolloutSettings(
        env_id="sao/SWEBench-v0",
        sampling=SamplingConfig(),
        max_context_tokens=1 << 20,
        max_tokens_per_turn=1 << 14,
        limits=StageLimits(reset_s=300, step_s=300, episode_s=800),
    )
    async with SessionDoor.listening(config) as door:
        make = HarnessEpisodes(config, door, harness_of(config))
        given = Ticket(id="t", kind="train", task_index=0, epoch=0, seed=1)
        return await make(given, env, engine, renderer, settings)


def call(name: str, said: str = "", **arguments: Any) -> str:
    return said + write_calls([ToolCall(name, arguments)])


async def test_the_loop_repairs_a_repository_and_stays_one_chain(
    repositories: AsyncEnv, renderer: ChatRenderer
) -> None:
    """However OpenHands writes its history anew, what was sampled is not rendered a second time."""
    name = repositories.task_ids[0].removeprefix("sao-demo__").removesuffix("-1")
    script = SCRIPTS[name]
    turns = [
        call("terminal", "I look first.\n", command=script.look[0], summary="look", security_risk="LOW"),
        call("think", thought="It is as the issue says."),
        *(call("terminal", command=command, security_risk="LOW") for command in script.fix),
        call("no_such_tool", said="By mistake."),
        call("finish", said="Done. ", message="The issue is fixed."),
    ]
    engine = Engineer(renderer, turns)
    episode = await episode_of(repositories, renderer, engine)
    assert episode.stop_reason is StopReason.TERMINATED
    assert episode.reward == 1.0, episode.metrics
    assert episode.branches == ()
    assert [a.text for a in episode.actions] == turns
    for turn, prompt in enumerate(engine.prompts):
        assert prompt == tuple(t for s in episode.segments[: 2 * turn + 1] for t in s.token_ids)
    assert "You are OpenHands agent" in episode.segments[0].text
    observed = [s.text for s in episode.segments if s.kind == "observation"]
    assert "[The command completed with exit code 0.]" in observed[0], "OpenHands' own terminal, in the container"
    assert "no_such_tool" in observed[-1], "OpenHands' own words for a mistake"
    assert episode.timings.environment_s > 0


async def test_a_repository_that_was_not_repaired_is_a_zero_and_no_fault(
    repositories: AsyncEnv, renderer: ChatRenderer
) -> None:
    """With the environment's own prompt; a message without a call ends OpenHands' loop."""
    engine = Engineer(renderer, ["There is nothing to do."])
    episode = await episode_of(repositories, renderer, engine, "--prompt", "environment", "--iterations", "5")
    assert (episode.reward, episode.stop_reason) == (0.0, StopReason.TERMINATED)
    assert episode.metrics["refusal"], "nothing was changed"


def test_the_loop_says_what_it_needs(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    from agent.harness.loops.openhands_loop import main

    monkeypatch.delenv("SAO_TASK_FILE", raising=False)
    monkeypatch.setattr(sys, "argv", ["openhands_loop"])
    with pytest.raises(SystemExit):
        main([])
    assert "python -m agent.harness" in capsys.readouterr().err
