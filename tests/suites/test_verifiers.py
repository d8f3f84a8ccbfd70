"""The verifiers adapter: without the library it says what to install; with it (`make suites`) real tasks are played."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
from typing import Any

import aiohttp
import pytest
from suite_pythons import ROOT, VERIFIERS_PYTHON, have

from envs import make_core
from envs.adapters.verifiers.endpoint import ENDED, PolicyEndpoint

NAME = "envs.adapters.verifiers.env:Verifiers"


async def test_without_the_library_tasks_are_known_and_playing_says_what_to_install() -> None:
    env = make_core(NAME, taskset="any", tasks={"count": 3})
    assert list(env.task_ids) == ["0", "1", "2"]
    try:
        import verifiers  # noqa: F401
    except ImportError:
        with pytest.raises(ValueError, match=r"verifiers.*pip install 'sao-agents\[verifiers\]'.*runtime\.python"):
            await env.areset(options={"task_id": "0"})
        with pytest.raises(ValueError, match=r"sao-agents\[verifiers\]"):
            len(make_core(NAME, taskset="any").task_ids)
    await env.aclose()


@pytest.mark.parametrize(
    "kwargs", [{"taskset": ""}, {"taskset": {"largest": 3}}, {"taskset": "a", "tasks": {"count": 0}}]
)
def test_wrong_arguments_are_refused_at_once(kwargs: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"taskset must be|start: 0"):
        make_core(NAME, **kwargs)


async def test_the_endpoint_keeps_rollouts_apart_and_refuses_what_is_over() -> None:
    endpoint = PolicyEndpoint()
    await endpoint.start()
    first, second = endpoint.line(), endpoint.line()
    body = {"model": "policy", "messages": [{"role": "user", "content": "x"}]}

    async with aiohttp.ClientSession() as http:

        async def ask(url: str) -> tuple[int, dict[str, Any]]:
            async with http.post(f"{url}/chat/completions", json=body) as response:
                return response.status, await response.json()

        async with asyncio.TaskGroup() as group:
            answers = [group.create_task(ask(line.base_url)) for line in (first, second)]
            (await second.asked.get()).say("two", [], "stop")
            asked = await first.asked.get()
            assert asked.messages == body["messages"]
            asked.end()
        assert (answers[0].result()[0], answers[1].result()[0]) == (400, 200)
        assert ENDED in answers[0].result()[1]["error"]["message"]
        assert answers[1].result()[1]["choices"][0]["message"]["content"] == "two"
        endpoint.drop(first)
        assert (await ask(first.base_url))[0] == 400
    await endpoint.close()
    await endpoint.close()


PLAY = """
import asyncio, json, sys
from envs import make_core
from envs.core import EnvironmentFault

def call(name, **arguments):
    return "<tool_call>\\n" + json.dumps({"name": name, "arguments": arguments}) + "\\n</tool_call>"

async def refused(**kwargs):
    core = make_core("envs.adapters.verifiers.env:Verifiers", path="recipes/suites/tasksets", **kwargs)
    try:
        await core.areset(options={"task_id": core.task_ids[0]})
    except (ValueError, EnvironmentFault) as error:
        return f"{type(error).__name__}: {error}"
    finally:
        await core.aclose()

async def main():
    told = {}
    core = make_core(
        "envs.adapters.verifiers.env:Verifiers",
        taskset={"id": "sao_doubling", "largest": 5},
        path="recipes/suites/tasksets",
    )
    told["tasks"] = list(core.task_ids)
    text, info = await core.areset(options={"task_id": "3"})
    told["opening"] = [text, info["family"], [tool["function"]["name"] for tool in info["tools"]]]
    told["tool"] = (await core.astep(call("add", first=4, second=4)))[4]["messages"]
    told["unknown"] = (await core.astep(call("subtract")))[0]
    told["end"] = (await core.astep("<think>4 + 4</think>8"))[1:]
    await core.areset(options={"task_id": "3"})
    told["half"] = (await core.astep("It is 8 I think"))[1:3]
    for action in ("8", ""):
        await core.areset(options={"task_id": "3"})
        await core.astep(call("add", first=4, second=4))
        told[f"cut {action}"] = (await core.atruncate("context", action))[1:]
    both = [make_core("envs.adapters.verifiers.env:Verifiers", taskset={"id": "sao_doubling", "largest": 5},
                      path="recipes/suites/tasksets") for _ in range(2)]
    await asyncio.gather(*(one.areset(options={"task_id": str(i)}) for i, one in enumerate(both)))
    steps = await asyncio.gather(*(one.astep(str(2 * i + 2)) for i, one in enumerate(both)))
    told["together"] = [step[1] for step in steps]
    await both[0].areset(options={"task_id": "0"})  # and left in the middle
    told["none"] = await refused(taskset="sao_there_is_none")
    told["keys"] = await refused(taskset={"id": "sao_doubling", "biggest": 3})
    told["past"] = await refused(taskset={"id": "sao_doubling", "largest": 2}, tasks={"start": 7, "count": 1})
    for one in (core, *both):
        await one.aclose()
    await asyncio.sleep(0)
    told["left"] = [str(task.get_coro()) for task in asyncio.all_tasks() if task is not asyncio.current_task()]
    print(json.dumps(told))

asyncio.run(main())
"""


@pytest.mark.suites
@pytest.mark.skipif(not have(VERIFIERS_PYTHON), reason="needs `make suites`")
@pytest.mark.timeout(500)
def test_a_taskset_is_played_by_the_librarys_own_rules() -> None:
    done = subprocess.run(
        [str(VERIFIERS_PYTHON), "-c", PLAY],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=450,
        check=False,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert done.returncode == 0, done.stderr[-3000:]
    told = json.loads(done.stdout.splitlines()[-1])
    assert told["tasks"] == ["0", "1", "2", "3", "4"]
    assert told["opening"] == ["Double 4. Answer with the number alone.", "sao_doubling", ["add"]]
    assert told["tool"] == [{"role": "tool", "tool_call_id": "call_1", "content": "8"}]
    assert "There is no tool 'subtract'; the tools are: add" in told["unknown"]
    reward, terminated, truncated, info = told["end"]
    assert (reward, terminated, truncated) == (1.0, True, False)
    assert (info["metrics"]["used_the_tool"], info["metrics"]["reward_right"], info["metrics"]["turns"]) == (
        1.0,
        1.0,
        3,
    )
    assert told["half"] == [0.5, True]
    assert (told["cut 8"][:3], told["cut 8"][3]["truncation"]) == ([1.0, False, True], "context")
    assert told["cut "][:3] == [0.0, False, True]
    assert told["together"] == [1.0, 1.0]
    assert "sao_there_is_none" in told["none"]
    assert "biggest" in told["keys"]
    assert "has no task 7" in told["past"]
    assert told["left"] == []
