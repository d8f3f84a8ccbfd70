"""NeMo Gym's rows and servers: sessions, tools and verdicts over real HTTP; what is broken is never a reward of 0."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from counter_server import counting

from envs import make_core
from envs.adapters.nemo_gym.rows import load_rows
from envs.core import EnvironmentFault

NAME = "envs.adapters.nemo_gym.env:NemoGym"
DATA = Path(__file__).parents[2] / "recipes" / "suites" / "nemo_gym" / "counter.jsonl"


def call(name: str, **arguments: Any) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


async def test_a_row_is_played_in_its_session_and_verified_with_all_that_was_done() -> None:
    async with counting() as (url, server):
        env, other = (make_core(NAME, url=url, data=str(DATA)) for _ in range(2))
        assert list(env.task_ids)[:2] == ["counter-0", "counter-1"]
        text, info = await env.areset(options={"task_id": "counter-2"})
        assert text == "Add 3 to the counter, then say done."
        assert [tool["function"]["name"] for tool in info["tools"]] == ["increment_counter", "get_counter_value"]
        await other.areset(options={"task_id": "counter-2"})
        await other.astep(call("increment_counter", count=100))
        await env.astep(call("increment_counter", count=3))
        assert json.loads((await env.astep(call("get_counter_value")))[0]) == {"count": 13}
        _, reward, terminated, _, info = await env.astep("<think>13?</think>done")
        assert (reward, terminated, info["metrics"]["calls"], info["metrics"]["tool_errors"]) == (1.0, True, 5, 0)
        sent = server.verified[0]
        assert sent["expected_count"] == 13
        kinds = [item["type"] for item in sent["response"]["output"]]
        assert kinds == ["function_call", "function_call_output"] * 2 + ["message"]
        first, answer = sent["response"]["output"][:2]
        assert (first["name"], json.loads(first["arguments"])) == ("increment_counter", {"count": 3})
        assert answer["call_id"] == first["call_id"]
        assert sent["response"]["output"][-1]["content"][0]["text"] == "done", "what is thought is no answer"
        assert (await other.astep("done"))[1] == 0.0
        for one in (env, other):
            await one.aclose()


async def test_a_tools_refusal_is_the_policys_to_read_and_an_unknown_tool_never_leaves() -> None:
    async with counting() as (url, server):
        env = make_core(NAME, url=url, data=str(DATA), observation_chars=20)
        await env.areset(options={"task_id": "counter-0"})
        assert (await env.astep(call("increment_counter", count="x")))[0].startswith('{"detail": [{"msg": ')
        assert "There is no tool 'verify'" in (await env.astep(call("verify")))[0]
        assert server.verified == []
        _, reward, _, truncated, info = await env.atruncate("turn_tokens", "I am not d")
        assert (reward, truncated, info["metrics"]["tool_errors"]) == (0.0, True, 1)
        response = server.verified[0]["response"]
        assert (response["status"], response["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})
        await env.aclose()


@pytest.mark.parametrize(
    ("kind", "says"),
    [
        ("no json", "no JSON"),
        ("no reward", "without a reward"),
        ("text reward", "finite number"),
        ("masked", "not measured: out of memory"),
        ("fails", "HTTP 500"),
    ],
)
async def test_a_verdict_that_is_none_is_a_fault(kind: str, says: str) -> None:
    async with counting(kind) as (url, _):
        env = make_core(NAME, url=url, data=str(DATA))
        await env.areset(options={"task_id": "counter-0"})
        with pytest.raises(EnvironmentFault, match=says):
            await env.astep("done")
        await env.aclose()


async def test_a_server_that_is_gone_or_does_not_seed_is_a_fault() -> None:
    async with counting("gateway") as (url, _):
        env = make_core(NAME, url=url, data=str(DATA))
        await env.areset(options={"task_id": "counter-0"})
        with pytest.raises(EnvironmentFault, match="HTTP 502"):
            await env.astep(call("increment_counter", count=1))
        await env.areset(options={"task_id": "counter-0"})
    with pytest.raises(EnvironmentFault, match="verify"):
        await env.astep("done")
    with pytest.raises(EnvironmentFault, match="seed_session"):
        await env.areset(options={"task_id": "counter-0"})
    async with counting("unseeded") as (url, _):
        with pytest.raises(EnvironmentFault, match=r"did not seed.*422.*initial_count"):
            await make_core(NAME, url=url, data=str(DATA)).areset(options={"task_id": "counter-0"})


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("", "holds no rows"),
        ("{", "line 1 is no JSON"),
        ("[]", "no responses_create_params"),
        ('{"responses_create_params": {}}', "input must be"),
        ('{"responses_create_params": {"input": [{"type": "reasoning"}]}}', "'reasoning'"),
        (
            '{"responses_create_params": {"input": [{"role": "user", "content": [{"type": "image"}]}]}}',
            "other than text",
        ),
        ('{"responses_create_params": {"input": "x", "tools": [{"type": "web_search"}]}}', "a tool must be a function"),
        ('{"responses_create_params": {"input": "x", "tools": [{"type": "function", "name": "verify"}]}}', "no tool"),
    ],
)
def test_rows_that_cannot_be_played_are_refused_by_line(tmp_path: Path, line: str, says: str) -> None:
    (tmp_path / "rows.jsonl").write_text(line + "\n")
    with pytest.raises(ValueError, match=says):
        make_core(NAME, url="http://x", data=str(tmp_path / "rows.jsonl"))


def test_forms_of_input_that_data_sets_use_are_read(tmp_path: Path) -> None:
    parts = [{"type": "input_text", "text": "a"}, {"type": "input_text", "text": "b"}]
    asked = {
        "instructions": "Be brief.",
        "input": [{"role": "developer", "content": "d"}, {"role": "user", "content": parts}],
    }
    rows = [{"responses_create_params": asked}, {"responses_create_params": {"input": "plain"}}]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    first, second = load_rows(tmp_path / "rows.jsonl")
    assert [(m["role"], m["content"]) for m in first.messages] == [
        ("system", "Be brief."),
        ("system", "d"),
        ("user", "ab"),
    ]
    assert second.messages == ({"role": "user", "content": "plain"},)


def test_a_missing_file_and_no_address_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="cannot be read"):
        make_core(NAME, url="http://x", data=str(tmp_path / "none.jsonl"))
    with pytest.raises(ValueError, match="http://host:port"):
        make_core(NAME, url="x", data=str(DATA))
