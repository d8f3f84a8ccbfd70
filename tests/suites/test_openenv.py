"""OpenEnv both ways: servers of that protocol as environments, and ours served in it. Broken servers are faults."""

from __future__ import annotations

import asyncio
import json
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from openenv_stand_in import serving

from envs import make_core
from envs.core import EnvironmentFault

ROOT = Path(__file__).parents[2]
NAME = "envs.adapters.openenv.env:OpenEnv"
CALL = '<tool_call>\n{"name": "python", "arguments": {"code": "6*7"}}\n</tool_call>'


def add(a: int) -> str:
    return f"<tool_call>\n{json.dumps({'name': 'add', 'arguments': {'a': a}})}\n</tool_call>"


async def test_a_server_of_text_is_played_with_its_own_fields_and_rewards() -> None:
    async with serving("text") as (url, seen):
        env = make_core(NAME, url=url, observation_key="echoed", tasks={"start": 5, "count": 2}, reset={"level": 3})
        assert list(env.task_ids) == ["seed-5", "seed-6"]
        text, info = await env.areset(seed=0, options={"task_id": "seed-6"})
        assert (text, info["tools"]) == ("seed 6", [])
        assert {"seed": 6, "level": 3}.items() <= seen[0]["data"].items()
        assert (await env.astep("one \ud83d"))[:3] == ("one ?", 0.5, False)
        _, reward, terminated, _, info = await env.astep("stop")
        assert (reward, terminated, info["metrics"]["turns"]) == (0.5, True, 2)
        await env.areset(options={"task_id": "seed-5"})
        _, reward, _, truncated, _ = await env.atruncate("context", "x")
        assert (reward, truncated, seen[-1]["type"]) == (0.0, True, "reset"), "it knows no truncation: none is sent"
        await env.aclose()
        await env.aclose()


async def test_a_servers_tools_are_the_policys_and_a_text_ends_the_episode() -> None:
    async with serving("tools") as (url, _):
        env = make_core(NAME, url=url, tools=True, system_prompt="Add.")
        _, info = await env.areset(options={"task_id": "seed-0"})
        assert [message["role"] for message in info["messages"]] == ["system", "user"]
        assert info["tools"][0]["function"]["parameters"]["required"] == ["a"]
        assert (await env.astep(add(1)))[:2] == ("2", 1.0)
        assert (await env.astep(add(0)))[0] == "Error: 0"
        assert (await env.astep("done"))[1:3] == (0.0, True)
        await env.areset(options={"task_id": "seed-0"})
        assert (await env.astep(add(9)))[1:3] == (1.0, True)
        await env.aclose()


@pytest.mark.parametrize(
    ("kind", "says"),
    [
        ("no json", "no JSON"),
        ("no data", "sent"),
        ("no observation", "no observation"),
        ("another type", "with 'state'"),
        ("no reward", "the reward 'much'"),
        ("not finite", "finite"),
        ("refuses", "VALIDATION_ERROR, no such field"),
        ("leaves", "ended the session|is gone"),
        ("other field", "no 'echoed'; it has text"),
    ],
)
async def test_a_malformed_answer_is_a_fault_that_names_the_server(kind: str, says: str) -> None:
    async with serving(kind) as (url, _):
        env = make_core(NAME, url=url, observation_key="echoed")
        await env.areset(options={"task_id": "seed-0"})
        with pytest.raises(EnvironmentFault, match=says):
            await env.astep("x")
        await env.aclose()


async def test_no_server_an_episode_that_is_over_and_a_server_without_tools_are_faults() -> None:
    with pytest.raises(EnvironmentFault, match=r"no OpenEnv server answers at http://127\.0\.0\.1:1"):
        await make_core(NAME, url="http://127.0.0.1:1").areset(options={"task_id": "seed-0"})
    async with serving("over") as (url, _):
        with pytest.raises(EnvironmentFault, match="over before it begins"):
            await make_core(NAME, url=url).areset(options={"task_id": "seed-0"})
    async with serving("other field") as (url, _):
        with pytest.raises(EnvironmentFault, match="lists no tools"):
            await make_core(NAME, url=url, tools=True).areset(options={"task_id": "seed-0"})


@pytest.mark.parametrize(
    ("kwargs", "says"),
    [({"url": "localhost:80"}, "http://host:port"), ({"url": "http://x", "max_turns": 0}, "max_turns")],
)
def test_wrong_arguments_are_refused_at_once(kwargs: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        make_core(NAME, **kwargs)


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """`python -m envs.adapters.openenv serve sao/PythonTIR-v0` as a process, for two sessions at once."""
    folder = tmp_path_factory.mktemp("served")
    words = ["serve", "sao/PythonTIR-v0", "max_turns=3", 'problems=[{problem: "What is 6 * 7?", answer: "42"}]']
    words += ["spares=1", "--port", "0", "--port-file", str(folder / "port"), "--max-sessions", "2"]
    process = subprocess.Popen([sys.executable, "-m", "envs.adapters.openenv", *words], cwd=ROOT)
    deadline = time.monotonic() + 120
    while not (folder / "port").exists():
        assert process.poll() is None
        assert time.monotonic() < deadline, "the server did not start"
        time.sleep(0.05)
    yield f"http://127.0.0.1:{(folder / 'port').read_text()}"
    process.send_signal(signal.SIGINT)
    assert process.wait(60) == 0


async def test_one_of_ours_is_the_same_through_a_server_as_without_it(served: str) -> None:
    direct = make_core(
        "sao/PythonTIR-v0", max_turns=3, problems=[{"problem": "What is 6 * 7?", "answer": "42"}], spares=1
    )
    through = make_core(NAME, url=served)
    steps = []
    for env, task in ((direct, None), (through, "seed-0")):
        env.tool_format = "hermes"
        text, info = await env.areset(seed=0, options=None if task is None else {"task_id": task})
        steps.append([text if task is None else "What is 6 * 7?", info["messages"], info["tools"], info["family"]])
        step = await env.astep(CALL)
        steps[-1] += [step[:4], step[4]["messages"]]
        step = await env.astep(r"\boxed{42}")
        steps[-1] += [step[1:4], step[4]["metrics"]["correct"], step[4]["metrics"]["tool_calls"]]
        await env.areset(seed=0, options=None if task is None else {"task_id": task})
        step = await env.atruncate("context", r"\boxed{42}")
        steps[-1] += [step[1:4], step[4]["truncation"], step[4]["metrics"]["correct"]]
        await env.areset(seed=0, options=None if task is None else {"task_id": task})
        for _ in range(3):
            step = await env.astep(CALL)
        steps[-1] += [step[1:4], step[4]["truncation"]]
        await env.aclose()
    assert steps[1][3] == "inline"
    assert steps[0] == steps[1]


async def test_sessions_are_counted_and_given_back(served: str) -> None:
    envs = [make_core(NAME, url=served) for _ in range(3)]
    for env in envs[:2]:
        await env.areset(options={"task_id": "seed-0"})
    with pytest.raises(EnvironmentFault, match="CAPACITY_REACHED"):
        await envs[2].areset(options={"task_id": "seed-0"})
    await envs[0].aclose()
    async with asyncio.timeout(60):
        while True:  # the server closes the environment behind the session first
            try:
                await envs[2].areset(options={"task_id": "seed-0"})
                break
            except EnvironmentFault:
                await asyncio.sleep(0.05)
    for env in envs:
        await env.aclose()


async def test_what_no_client_should_send_is_refused_and_the_session_goes_on(served: str) -> None:
    asked = [
        ("{", "INVALID_JSON"),
        ('{"type": "reset", "data": 3}', "INVALID_JSON"),
        ('{"type": ["x"], "data": {}}', "UNKNOWN_TYPE"),
        ('{"type": "reset", "data": {"seed": -1}}', "VALIDATION_ERROR"),
        ('{"type": "reset", "data": {"task_id": "none"}}', "VALIDATION_ERROR"),
        ('{"type": "reset", "data": {"tool_format": "none"}}', "VALIDATION_ERROR"),
        ('{"type": "step", "data": {"message": "early"}}', "EXECUTION_ERROR"),
        ('{"type": "step", "data": {"text": "x"}}', "VALIDATION_ERROR"),
        ('{"type": "step", "data": {"message": "x", "truncate": "boredom"}}', "E"),
    ]
    async with aiohttp.ClientSession() as http, http.ws_connect(f"{served}/ws") as socket:
        for text, code in asked:
            await socket.send_str(text)
            answer = json.loads((await socket.receive(60)).data)
            assert answer["type"] == "error", text
            assert answer["data"]["code"].startswith(code), text
        await socket.send_str('{"type": "reset", "data": {"seed": 1}}')
        assert json.loads((await socket.receive(60)).data)["type"] == "observation"
        await socket.send_str('{"type": "state"}')
        assert json.loads((await socket.receive(60)).data)["data"]["step_count"] == 0
        for path in ("health", "metadata", "schema"):
            async with http.get(f"{served}/{path}") as response:
                assert response.status == 200


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["sao/None-v0"], "unknown environment"),
        (["sao/PythonTIR-v0", "max_turns=0"], "max_turns"),
        (["sao/PythonTIR-v0", "max_turns"], "KEY=VALUE"),
        (["sao/PythonTIR-v0", "--kwargs", "/no/such/file"], "/no/such/file"),
    ],
)
def test_serve_says_what_is_wrong_before_it_serves(
    words: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    from envs.adapters.openenv.__main__ import main

    assert main(["serve", *words]) == 2
    assert says in capsys.readouterr().err
