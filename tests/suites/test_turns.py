"""What adapters share: mistakes of the policy are answered, limits end an episode, and nothing is left held."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from typing import Any

import pytest

from envs.adapters.turns import Opening, Reply, TurnEnv, reward_number, task_range
from envs.core import EnvironmentFault
from envs.tool_calls import ToolCall

TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}


def call(name: str, **arguments: Any) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


class Adding(TurnEnv):
    """Ends at a text; each call is worth a quarter, the end a half."""

    task_ids = ("one", "two")
    fails_at = ""

    def __init__(self, **limits: Any) -> None:
        super().__init__(**limits)
        self.held: list[str] = []
        self.graded: list[str | None] = []

    async def _open(self, task_id: str, seed: int | None) -> Opening:
        self.held.append(task_id)
        if self.fails_at == "open":
            raise EnvironmentFault("no")
        return Opening([{"role": "system", "content": "Add."}, {"role": "user", "content": task_id}], [TOOL], "sums")

    async def _act(self, action: str, calls: Sequence[ToolCall], content: str) -> Reply:
        if self.fails_at == "act":
            raise EnvironmentFault("no")
        if not calls:
            return Reply(ended=True)
        said = [{"role": "tool", "content": "5", "tool_call_id": self.call_id(i)} for i, _ in enumerate(calls)]
        return Reply(said, reward=0.25)

    async def _grade(self, truncation: str | None) -> tuple[float, dict[str, Any]]:
        self.graded.append(truncation)
        return 0.5, {"sums": 1}

    async def _release(self) -> None:
        self.held.clear()


async def test_an_episode_is_opened_played_graded_and_let_go() -> None:
    env = Adding()
    text, info = await env.areset(seed=0, options={"task_id": "two"})
    assert (text, info["task_id"], info["family"], info["tools"]) == ("two", "two", "sums", [TOOL])
    observation, reward, terminated, truncated, info = await env.astep(f"I add. {call('add', a=2)}")
    assert (observation, reward, terminated, truncated) == ("5", 0.25, False, False)
    assert env.transcript[2]["tool_calls"][0]["function"] == {"name": "add", "arguments": '{"a": 2}'}
    assert env.transcript[3]["tool_call_id"] == env.transcript[2]["tool_calls"][0]["id"]
    _, reward, terminated, _, info = await env.astep("five")
    assert (reward, terminated, info["messages"]) == (0.5, True, [])
    assert info["metrics"] == {"turns": 2, "tool_calls": 1, "malformed_calls": 0, "sums": 1, "family": "sums"}
    assert env.held == []
    with pytest.raises(RuntimeError, match="reset"):
        await env.astep("more")


@pytest.mark.parametrize("action", ["<tool_call>{</tool_call>", call("subtract"), call("add") + call("subtract")])
async def test_a_mistake_in_a_call_is_told_and_nothing_is_carried_out(action: str) -> None:
    env = Adding()
    await env.areset(options={"task_id": "one"})
    observation, reward, terminated, _, info = await env.astep(action)
    assert (reward, terminated, info["messages"][0]["role"]) == (0.0, False, "tool")
    assert "add" in observation
    await env.aclose()


async def test_at_the_last_turn_a_call_is_not_carried_out_any_more_and_the_episode_is_graded() -> None:
    env = Adding(max_turns=2)
    await env.areset(options={"task_id": "one"})
    await env.astep(call("add"))
    _, reward, terminated, truncated, info = await env.astep(call("add"))
    assert (reward, terminated, truncated, info["truncation"]) == (0.5, False, True, "turns")
    assert env.graded == ["turns"]
    await env.areset(options={"task_id": "one"})
    assert (await env.astep("text"))[2], "a text at the last turn is an answer"


async def test_time_that_is_over_ends_an_episode_and_so_does_the_runtime() -> None:
    env = Adding(wall_clock_s=0.001)
    await env.areset(options={"task_id": "one"})
    await asyncio.sleep(0.01)
    assert (await env.astep(call("add")))[4]["truncation"] == "wall_clock"
    await env.areset(options={"task_id": "one"})
    _, reward, _, truncated, info = await env.atruncate("context", "half a")
    assert (reward, truncated, info["truncation"]) == (0.5, True, "context")
    await env.areset(options={"task_id": "one"})
    with pytest.raises(ValueError, match="boredom"):
        await env.atruncate("boredom")


@pytest.mark.parametrize("where", ["open", "act"])
async def test_a_fault_gives_everything_back(where: str) -> None:
    env = Adding()
    env.fails_at = where
    if where == "open":
        with pytest.raises(EnvironmentFault):
            await env.areset(options={"task_id": "one"})
    else:
        await env.areset(options={"task_id": "one"})
        with pytest.raises(EnvironmentFault):
            await env.astep("text")
    assert env.held == []
    with pytest.raises(RuntimeError, match="reset"):
        await env.astep("more")


async def test_tasks_are_drawn_by_seed_and_unknown_ones_refused() -> None:
    env = Adding()
    drawn = [(await env.areset(seed=seed))[1]["task_id"] for seed in (0, 0, 1, 2, 3, 4)]
    assert drawn[0] == drawn[1]
    assert set(drawn) == {"one", "two"}
    with pytest.raises(ValueError, match="three"):
        await env.areset(options={"task_id": "three"})
    with pytest.raises(ValueError, match="taskid"):
        await env.areset(options={"taskid": "one"})


@pytest.mark.parametrize(
    "tasks", [{"first": 1}, {"count": 0}, {"start": -1, "count": 2}, {"count": "9"}, {"count": True}, {}]
)
def test_wrong_ranges_of_tasks_say_how_they_are_given(tasks: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="start: 0, count: 100"):
        task_range(tasks)
    assert task_range({"start": 3}, 2) == range(3, 5)


@pytest.mark.parametrize("value", [None, "1", [1], float("nan"), float("inf"), -float("inf")])
def test_a_reward_is_a_finite_number_or_the_environments_fault(value: Any) -> None:
    with pytest.raises(EnvironmentFault, match="the prize must be a finite number"):
        reward_number(value, "the prize")
