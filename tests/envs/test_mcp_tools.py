"""Tools of MCP servers: real servers, over stdio and HTTP, and how they fail."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest

from envs import make_core
from envs.core import AsyncEnv, EnvironmentFault, Step
from envs.facade import TextEnv
from envs.mcp_tools.core import WithMCPTools

SERVER = [sys.executable, str(Path(__file__).with_name("mcp_server.py"))]
OWN = {"type": "function", "function": {"name": "own", "parameters": {"type": "object", "properties": {}}}}


class Quiz(AsyncEnv):
    """An answer ends it; a call of its own tool is answered by itself."""

    def __init__(self, tools: Sequence[dict[str, Any]] = (OWN,)) -> None:
        self.actions: list[str] = []
        self._tools = list(tools)

    @property
    def task_ids(self) -> Sequence[str]:
        return ["quiz"]

    async def areset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[str, dict[str, Any]]:
        self.actions = []
        info = {"messages": [{"role": "user", "content": "2 + 3?"}], "tools": self._tools, "segment": "prompt"}
        return "2 + 3?", info

    async def astep(self, action: str) -> Step:
        self.actions.append(action)
        if "tool_call" in action:
            return "mine", 0.0, False, False, {"messages": [{"role": "tool", "content": "mine"}]}
        return "", float(action == "5"), True, False, {"messages": [], "metrics": {"kind": "sum"}}

    async def atruncate(self, reason: str, action: str = "") -> Step:
        return "", 0.0, False, True, {"messages": [], "truncation": reason}

    async def aclose(self) -> None: ...


def call(name: str, **arguments: Any) -> str:
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


def servers(*words: str, **keys: Any) -> dict[str, Any]:
    return {"mcp": [{"command": [*SERVER, *words], **keys}]}


def children() -> list[psutil.Process]:
    return [child for child in psutil.Process().children(recursive=True) if SERVER[1] in " ".join(child.cmdline())]


async def none_left() -> bool:
    for _ in range(500):
        if not children():
            return True
        await asyncio.sleep(0.02)
    return False


@pytest.fixture
async def made() -> AsyncIterator[Any]:
    cores: list[WithMCPTools] = []

    def make(tools: dict[str, Any], inner: AsyncEnv | None = None) -> WithMCPTools:
        cores.append(WithMCPTools(inner or Quiz(), tools))
        return cores[-1]

    yield make
    for core in cores:
        await core.aclose()
    assert await none_left(), "a server outlived its environment"


async def test_tools_of_a_server_stand_beside_the_environments_own_and_are_answered_by_it(made: Any) -> None:
    core = made(servers(tools=["add", "shout", "fail"]) | {"output_chars": 400})
    quiz = core.inner
    _, info = await core.areset(seed=0)
    assert [tool["function"]["name"] for tool in info["tools"]] == ["own", "add", "shout", "fail"]
    assert info["tools"][1]["function"]["parameters"]["required"] == ["a", "b"]
    observation, reward, terminated, truncated, info = await core.astep(call("add", a=2, b=3))
    assert (observation, reward, terminated, truncated) == ("5", 0.0, False, False)
    assert info["messages"] == [{"role": "tool", "content": "5", "tool_call_id": "mcp_0"}]
    assert quiz.actions == [], "the environment does not see calls that are not its own"
    observation, *_ = await core.astep(call("shout", count=100_000))
    assert len(observation) < 450
    assert observation.startswith("begin")
    assert observation.endswith("end")
    assert "characters left out" in observation
    for wrong in (call("add", a="two", b=3), call("add"), call("fail")):
        observation, _, terminated, *_ = await core.astep(wrong)
        assert not terminated, observation
    assert "locked" in observation
    both = call("add", a=1, b=1) + call("own")
    assert "None of these calls was carried out: add, own" in (await core.astep(both))[0]
    several = await core.astep(call("add", a=1, b=1) + call("add", a=2, b=2))
    assert [message["content"] for message in several[4]["messages"]] == ["2", "4"]
    assert (await core.astep(call("own")))[0] == "mine"
    _, reward, terminated, _, info = await core.astep("5")
    assert (reward, terminated) == (1.0, True)
    assert info["metrics"] == {"kind": "sum", "mcp_calls": 8, "mcp_errors": 4, "mcp_late": 0}
    assert await none_left(), "the episode's server ends with the episode"


async def test_state_leaks_between_episodes_only_through_a_shared_server(made: Any) -> None:
    for shared in (True, False):
        core = made(servers(shared=shared))
        await core.areset(seed=0)
        await core.astep(call("keep", word="spade"))
        await core.astep("5")
        await core.areset(seed=1)
        assert (await core.astep(call("keep")))[0] == ("spade" if shared else "nothing")
    with pytest.raises(EnvironmentFault, match=r"mcp_server\.py.*(gone|failed)"):
        await core.astep(call("die"))
    await core.areset(seed=2)
    assert (await core.astep(call("add", a=1, b=1)))[0] == "2", "a dead server costs its episode only"


async def test_a_call_that_takes_too_long_is_an_observation_and_the_server_goes_on(made: Any) -> None:
    core = made(servers() | {"call_s": 0.5, "max_calls": 2})
    await core.areset(seed=0)
    observation, _, terminated, truncated, _ = await core.astep(call("hang"))
    assert "did not answer within 0.5 s" in observation
    assert not terminated | truncated
    core._open[0]._call_s = 30.0  # the machine may be busy
    assert (await core.astep(call("add", a=1, b=1)))[0] == "2"
    _, _, terminated, truncated, info = await core.astep(call("add", a=1, b=1))
    assert (terminated, truncated, info["truncation"]) == (False, True, "turns"), "one call too many ends it"
    assert (info["metrics"]["mcp_calls"], info["metrics"]["mcp_late"]) == (3, 1)


@pytest.mark.parametrize(
    ("tools", "says"),
    [
        (servers("--broken"), "cannot be used"),
        (servers("--deaf") | {"start_s": 0.5}, "not ready within start_s=0.5 s"),
        ({"mcp": [{"command": ["no-such-program"]}]}, "cannot be used.*no-such-program"),
        ({"mcp": [{"url": "http://127.0.0.1:9/mcp"}]}, "cannot be used"),
        (servers(tools=["sub"]), r"tools\.mcp\.0\.tools.*no tool 'sub'.*add"),
        ({"mcp": servers()["mcp"] * 2}, r"two tools are called 'add': give tools\.mcp\.1 a `prefix`"),
    ],
    ids=["ends at once", "says nothing", "not there", "nobody listens", "unknown tool", "twice"],
)
async def test_a_server_that_cannot_be_used_is_a_fault_that_names_it(made: Any, tools: Any, says: str) -> None:
    core = made(tools)
    with pytest.raises(EnvironmentFault, match=says):
        await core.areset(seed=0)
    assert await none_left()


async def test_an_episode_that_is_cancelled_while_its_server_starts_leaves_none(made: Any) -> None:
    core = made(servers("--deaf"))
    reset = asyncio.create_task(core.areset(seed=0))
    while not children():  # noqa: ASYNC110 - of a process that another one starts nobody tells
        await asyncio.sleep(0.01)
    reset.cancel()
    with pytest.raises(asyncio.CancelledError):
        await reset
    assert await none_left()


async def test_a_server_gets_only_the_variables_that_are_named(made: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHED_KEY", "secret")
    core = made(servers(env={"SHED_NAME": "garden"}))
    await core.areset(seed=0)
    assert (await core.astep(call("pid")))[0].endswith(" no key garden")
    core = made(servers(pass_env=["SHED_KEY"], prefix="shed_"))
    await core.areset(seed=0)
    assert (await core.astep(call("shed_pid")))[0].endswith(" secret no name")


async def test_a_server_over_http_is_reached_by_its_url(made: Any, unused_tcp_port: int) -> None:
    words = ["-c", "import sys; sys.path.insert(0, sys.argv[1]); import mcp_server as m; "]
    words[1] += "m.server.run(transport='streamable-http', host='127.0.0.1', port=int(sys.argv[2]))"
    folder = str(Path(__file__).parent)
    process = await asyncio.create_subprocess_exec(
        sys.executable, *words, folder, str(unused_tcp_port), stderr=asyncio.subprocess.DEVNULL
    )
    try:
        async with asyncio.timeout(60):
            while True:
                try:
                    _, writer = await asyncio.open_connection("127.0.0.1", unused_tcp_port)
                    break
                except OSError:
                    await asyncio.sleep(0.05)
        writer.close()
        core = made({"mcp": [{"url": f"http://127.0.0.1:{unused_tcp_port}/mcp"}]})
        await core.areset(seed=0)
        assert (await core.astep(call("add", a=20, b=22)))[0] == "42"
        await core.aclose()
    finally:
        process.kill()
        await process.wait()


@pytest.mark.parametrize(
    ("tools", "says"),
    [
        ({"mcp": [{}]}, r"tools\.mcp\.0: give either `command`"),
        ({"mcp": [{"command": ["x"], "url": "http://x"}]}, "give either `command`"),
        ({"mcp": [{"url": "x"}]}, r"tools\.mcp\.0\.url"),
        ({"mcp": [], "call_seconds": 3}, r"tools\.call_seconds"),
        ({"mcp": [{"command": ["x"], "key_env": "K"}]}, "pass_env"),
    ],
)
def test_a_wrong_key_is_refused_by_its_name(tools: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        make_core("sao/StyleShift-v0", tools=tools)


def test_a_synchronous_caller_and_an_environment_of_ours_get_the_tools_too() -> None:
    env = TextEnv("sao/StyleShift-v0", prompts="tiny", tools=servers(tools=["add"]))
    _, info = env.reset(seed=0)
    assert [tool["function"]["name"] for tool in info["tools"]] == ["add"]
    assert env.step(call("add", a=1, b=2))[0] == "3"
    observation, _, terminated, *_ = env.step("<tool_call>{'add'}</tool_call>")
    assert (terminated, "Malformed" in observation) == (False, True)
    _, _, terminated, _, info = env.step("a text")
    assert terminated
    assert (info["metrics"]["mcp_calls"], info["metrics"]["mcp_errors"]) == (2, 1)
    env.close()
    assert not children()


async def test_a_server_does_not_outlive_a_process_that_is_killed() -> None:
    program = (
        "import asyncio, json, sys\nfrom envs import make_core\n"
        "async def main():\n"
        "    core = make_core('sao/StyleShift-v0', prompts='tiny', tools=json.loads(sys.argv[1]))\n"
        "    await core.areset(seed=0)\n"
        "    print('open', flush=True)\n"
        "    await asyncio.Event().wait()\n"
        "asyncio.run(main())\n"
    )
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", program, json.dumps(servers()), stdout=asyncio.subprocess.PIPE
    )
    assert process.stdout is not None
    try:
        assert await asyncio.wait_for(process.stdout.readline(), 60) == b"open\n"
        started = psutil.Process(process.pid).children(recursive=True)
        assert len(started) == 1
    finally:
        process.kill()
        await process.wait()
    _, alive = await asyncio.to_thread(psutil.wait_procs, started, timeout=30)
    assert not alive
