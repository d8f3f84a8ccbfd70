"""The demo set's recorded traces: whole, drawn by seed, and what a container still says."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from envs import make_core
from envs.core import Message
from envs.swe_bench.demo.recorded import has_recorded, recorded_traces, swe_traces
from envs.swe_bench.demo.source import demos
from envs.swe_bench.demo.traces import play
from envs.swe_bench.env import SWEBench
from envs.swe_bench.scaffolds.bash import TOOLS
from envs.tool_calls import parse_calls

RECIPE = Path(__file__).parents[2] / "recipes" / "swe_tiny.yaml"


def actions(messages: list[Message]) -> list[str]:
    return [message["content"] for message in messages if message["role"] == "assistant"]


def task_of(messages: list[Message]) -> str:
    """The instance whose issue the trace is about."""
    env = make_core("sao/SWEBench-v0", instances="demo", scaffold="bash")
    assert isinstance(env, SWEBench)
    tasks = [one for one, row in env._load().items() if row.problem_statement.strip() in messages[1]["content"]]
    assert len(tasks) == 1
    return tasks[0]


def test_recorded_traces_show_every_repository_solved_and_every_kind_of_mistake() -> None:
    clean, mistaken = recorded_traces()
    everywhere = {f"sao-demo__{name}-1" for name in demos()}
    assert {task_of(messages) for messages in clean} == everywhere
    assert len({tuple(actions(messages)) for messages in clean}) > 15
    assert len(mistaken) >= 8
    read = [[parse_calls(action, TOOLS).error for action in actions(messages)] for messages in mistaken]
    assert any(any(errors) for errors in read), "a malformed call is among them"
    assert not any(parse_calls(action, TOOLS).error for messages in clean for action in actions(messages))


def test_draws_are_a_function_of_the_seed_and_of_the_share_of_mistakes() -> None:
    clean, mistaken = recorded_traces()
    assert list(swe_traces(20, bad=0.5, seed=3)) == list(swe_traces(20, bad=0.5, seed=3))
    assert all(messages in clean for messages in swe_traces(20, bad=0.0, seed=3))
    assert all(messages in mistaken for messages in swe_traces(20, bad=1.0, seed=3))


@pytest.mark.parametrize(
    ("kwargs", "there"),
    [
        ({"scaffold": "bash"}, True),
        ({"scaffold": "bash", "instances": "demo", "max_turns": 5}, True),
        ({}, False),
        ({"scaffold": "openhands"}, False),
        ({"scaffold": "bash", "instances": "rows.jsonl"}, False),
    ],
)
def test_only_the_demo_set_with_its_tools_has_recorded_traces(kwargs: dict[str, Any], there: bool) -> None:
    assert has_recorded("sao/SWEBench-v0", kwargs) is there
    assert not has_recorded("sao/PythonTIR-v0", kwargs)


@pytest.mark.docker
@pytest.mark.xdist_group("demo-images")
@pytest.mark.timeout(900)
async def test_a_recorded_trace_is_what_a_container_still_says() -> None:
    """Recorded once, shipped for ever: an environment that speaks otherwise now would be learned wrongly."""
    messages = max(recorded_traces()[0], key=len)
    env = make_core("sao/SWEBench-v0", **yaml.safe_load(RECIPE.read_text(encoding="utf-8"))["env"]["kwargs"])
    try:
        again = await play(env, task_of(messages), actions(messages))
    finally:
        await env.aclose()
    assert again.reward == 1.0

    def timeless(said: list[Message]) -> list[tuple[str, str]]:
        return [(m["role"], re.sub(r"\d+\.\d+s", "0.00s", m["content"])) for m in said]

    assert timeless(again.messages) == timeless(messages)
