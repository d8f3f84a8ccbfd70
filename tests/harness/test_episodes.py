"""A harness's whole life: how it is started, how its episode may end, and that nothing of it is left."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest
from harness_tools import ask, kinds, openai_client, post, run, said, says, user, write_program
from pydantic import ValidationError
from runtime_tools import EchoEnv, ScriptedEngine

from agent.chat.renderer import ChatRenderer
from agent.engines.base import EngineFault
from agent.episode import StopReason
from agent.harness.call import main as call_main
from agent.harness.episodes import harness_turns
from agent.harness.loops import anthropic_loop, openai_loop
from agent.harness.task import HarnessTask
from agent.runtime.__main__ import own_turns
from agent.runtime.rollout import PromptTooLong
from agent.runtime.settings import ConfigError, HarnessConfig, RuntimeConfig
from envs import make_core
from envs.core import EnvironmentFault
from envs.tool_calls import write_calls
from envs.tool_formats.reading import ToolCall
from learner.config import RecipeError, load_recipe

PROBLEM = [{"problem": "What is 6 * 7?", "answer": "42"}]
PYTHON = write_calls([ToolCall("python", {"code": "print(6 * 7)"})])

# The standard library is enough to be a harness.
ASKS = """
import json, os, sys, urllib.request

def post(url, body):
    request = urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=60) as answer:
        return json.load(answer)

def ask(*messages):
    body = {"model": os.environ["SAO_MODEL"], "messages": list(messages)}
    answer = post(os.environ["OPENAI_BASE_URL"] + "/chat/completions", body)
    return answer["choices"][0]["message"]["content"]

SESSION = os.environ["SAO_SESSION_URL"]
said = ask({"role": "user", "content": os.environ["SAO_TASK"]})
"""


def alive(pid: int) -> bool:
    """Whether a process runs; one that nobody has buried yet does not."""
    try:
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


async def test_a_shell_script_is_a_harness(renderer: ChatRenderer, tmp_path: Path) -> None:
    """With its task in the environment, and a reward of its own."""
    script = (
        'said=$({python} -c \'import json,os,sys,urllib.request as u; b=json.dumps({"model":"m","messages":[{"role":'
        '"user","content":os.environ["SAO_TASK"]}]}).encode(); print(json.load(u.urlopen(u.Request(os.environ['
        '"OPENAI_BASE_URL"]+"/chat/completions",b,{"Content-Type":"application/json"})))["choices"][0]["message"]'
        '["content"])\'); test "$said" = right && test -s "$SAO_TASK_FILE" && test -z "$(ls {scratch})" && '
        '{python} -c \'import os,urllib.request as u; u.urlopen(u.Request(os.environ["SAO_SESSION_URL"]+"/reward",'
        'b"{\\"reward\\": 0.5}",{"Content-Type":"application/json"}))\''
    )
    config = {"command": ["sh", "-c", script], "folder": "{scratch}"}
    episode = await run(renderer, says("right"), reward="posted", **config)
    assert (kinds(episode.segments), episode.reward) == ("pa", 0.5)
    assert "Say it." in episode.segments[0].text


async def test_rewards_that_are_posted_stand_behind_the_replies_that_they_followed(renderer: ChatRenderer) -> None:
    async def harness(task: HarnessTask) -> float:
        assert (await post(task, "reward", {"reward": 1.0}))[0] == 409
        async with openai_client(task) as client:
            await ask(client, user("a"))
            assert await post(task, "reward", {"reward": 0.25, "metrics": {"steps": 3}}) == (200, {"reward": 0.25})
            assert (await post(task, "reward", {"reward": "much"}))[0] == 400
            assert (await post(task, "reward", {"reward": 9.0, "metrics": {"steps": 2**70}}))[0] == 422
            await ask(client, user("b"))
        return 1.0

    env = EchoEnv()
    episode = await run(renderer, says("right"), harness, env=env, reward="posted")
    assert [chain.turn_rewards for chain in episode.chains] == [(0.25,), (1.0,)]
    assert (episode.reward, episode.metrics["steps"]) == (1.25, 3)
    assert [what for what, _ in env.log] == ["reset"], "nobody else grades"


async def test_the_environments_verifier_grades_the_last_reply_or_the_answer_that_was_posted(
    renderer: ChatRenderer,
) -> None:
    async def by_its_last_words(task: HarnessTask) -> None:
        async with openai_client(task) as client:
            await ask(client, user("a"))

    async def by_a_post(task: HarnessTask) -> None:
        await by_its_last_words(task)
        assert (await post(task, "reward", {"reward": 5.0}))[0] == 409, "the environment grades here"
        assert (await post(task, "answer", {"answer": "right"}))[0] == 200

    async def by_what_it_returns(task: HarnessTask) -> str:
        await by_its_last_words(task)
        return "right"

    for harness, words in ((by_its_last_words, "right"), (by_a_post, "wrong"), (by_what_it_returns, "wrong")):
        env = EchoEnv()
        episode = await run(renderer, says(words), harness, env=env)
        assert (episode.reward, episode.stop_reason) == (1.0, StopReason.TERMINATED)
        assert env.log[-1] == ("step", "right")


async def test_an_environment_that_goes_on_after_the_answer_is_graded_as_it_stands(renderer: ChatRenderer) -> None:
    async def harness(task: HarnessTask) -> None:
        async with openai_client(task) as client:
            await ask(client, user("a"))

    env = EchoEnv()
    episode = await run(renderer, says("more"), harness, env=env)
    assert (episode.reward, episode.stop_reason) == (0.0, StopReason.TERMINATED)
    assert env.log[1:] == [("step", "more"), ("turns", "")]


@pytest.mark.parametrize("loop", [openai_loop, anthropic_loop], ids=["openai", "anthropic"])
async def test_the_loops_that_come_along_use_the_environments_tools(loop: Any, tool_renderer: ChatRenderer) -> None:
    engine = ScriptedEngine(tool_renderer, says(PYTHON, r"It is \boxed{42}."))
    env = make_core("sao/PythonTIR-v0", problems=PROBLEM, system_prompt="Use the tool.")
    try:
        episode = await run(tool_renderer, engine, loop.solve, env=env)
    finally:
        await env.aclose()
    assert (kinds(episode.segments), episode.branches, episode.reward) == ("paoa", (), 1.0)
    assert "42" in episode.segments[2].text
    assert (episode.metrics["tool_calls"], episode.metrics["correct"]) == (1, True)
    assert engine.requests[1][0] == [t for s in episode.segments[:3] for t in s.token_ids]


async def test_an_environment_that_does_not_grade_adds_no_reward_of_its_own(tool_renderer: ChatRenderer) -> None:
    async def harness(task: HarnessTask) -> float:
        async with openai_client(task) as client:
            await ask(client, *task.messages)
            await post(task, "call", {"name": "python", "arguments": {"code": "print(1)"}})
        return 0.5

    env = make_core("sao/PythonTIR-v0", problems=PROBLEM, max_turns=1)  # the call is its last turn, graded 0 or 1
    try:
        episode = await run(tool_renderer, says(r"\boxed{42}"), harness, env=env, reward="posted")
    finally:
        await env.aclose()
    assert (episode.reward, episode.turn_rewards) == (0.5, (0.5,))


async def test_a_tool_that_the_environment_has_not_is_answered_and_no_fault(tool_renderer: ChatRenderer) -> None:
    async def harness(task: HarnessTask) -> None:
        async with openai_client(task) as client:
            status, body = await post(task, "call", {"name": "bash", "arguments": {}})
            assert status == 404
            assert "its tools: python" in body["error"]["message"]
            status, body = await post(task, "call", {"name": "python", "arguments": {"code": 3}})
            assert "Malformed tool call" in body["content"]
            assert not body["ended"]
            await ask(client, *task.messages)

    env = make_core("sao/PythonTIR-v0", problems=PROBLEM)
    try:
        assert (await run(tool_renderer, says(r"\boxed{42}"), harness, env=env)).reward == 1.0
    finally:
        await env.aclose()


async def test_a_harness_that_is_out_of_time_is_truncated_and_graded_as_it_stands(
    renderer: ChatRenderer, tmp_path: Path
) -> None:
    """With its whole process group, also what it has left in the background."""
    program = write_program(
        tmp_path,
        ASKS
        + f"""
import pathlib, signal, subprocess, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
pathlib.Path({str(tmp_path / "written")!r}).write_text(f"{{os.getpid()}} {{child.pid}}")
os.rename({str(tmp_path / "written")!r}, {str(tmp_path / "pids")!r})
time.sleep(600)
""",
    )
    config = {"command": ["{python}", str(program)], "grace_s": 0.3}
    env = EchoEnv()
    episode = await run(renderer, says("right"), env=env, ends_once=(tmp_path / "pids").exists, **config)
    assert (episode.stop_reason, episode.reward) == (StopReason.TRUNCATED_WALL_CLOCK, 0.0)
    assert env.log[-1] == ("wall_clock", "")
    assert not any(map(alive, map(int, (tmp_path / "pids").read_text().split())))


async def test_what_a_harness_leaves_in_the_background_ends_with_it(renderer: ChatRenderer, tmp_path: Path) -> None:
    program = write_program(
        tmp_path,
        ASKS
        + f"""
import pathlib, subprocess
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
pathlib.Path({str(tmp_path / "pid")!r}).write_text(str(child.pid))
""",
    )
    episode = await run(renderer, says("right"), command=["{python}", str(program)])
    assert episode.reward == 1.0
    assert not alive(int((tmp_path / "pid").read_text()))


async def test_an_action_that_the_episodes_clock_cuts_is_kept(renderer: ChatRenderer) -> None:
    engine = ScriptedEngine(renderer, says("right and long"))
    engine.hold = asyncio.Event()

    async def harness(task: HarnessTask) -> None:
        async with openai_client(task, max_retries=0) as client:
            await ask(client, user("a"))

    episode = await run(renderer, engine, harness, ends_once=engine.started.is_set)
    assert episode.stop_reason is StopReason.TRUNCATED_WALL_CLOCK
    assert [len(action.token_ids) for action in episode.actions] == [engine.partial]


async def test_a_harness_that_fails_is_a_fault_that_shows_what_it_said(renderer: ChatRenderer, tmp_path: Path) -> None:
    program = write_program(tmp_path, ASKS + "\nsys.exit('no such repository: ' + said)")
    with pytest.raises(EnvironmentFault, match=r"ended with code 1.*\n.*no such repository: right"):
        await run(renderer, says("right"), command=["{python}", str(program)])
    with pytest.raises(EnvironmentFault, match="cannot start"):
        await run(renderer, says("right"), command=["/no/such/program"])


async def test_a_harness_that_never_asks_is_told_where_to(renderer: ChatRenderer) -> None:
    with pytest.raises(EnvironmentFault, match="OPENAI_BASE_URL"):
        await run(renderer, says("right"), command=["true"])


async def test_a_harness_that_posts_no_reward_is_a_fault_and_no_zero(renderer: ChatRenderer) -> None:
    async def harness(task: HarnessTask) -> None:
        async with openai_client(task) as client:
            await ask(client, user("a"))

    with pytest.raises(EnvironmentFault, match="posted no reward"):
        await run(renderer, says("right"), harness, reward="posted")


async def test_a_reward_that_was_posted_stands_though_the_harness_fails_behind_it(renderer: ChatRenderer) -> None:
    async def harness(task: HarnessTask) -> None:
        async with openai_client(task) as client:
            await ask(client, user("a"))
        await post(task, "reward", {"reward": 0.75})
        raise RuntimeError("at its cleaning up")

    assert (await run(renderer, says("right"), harness, reward="posted")).reward == 0.75


async def test_an_agent_that_gives_up_for_its_context_is_truncated_and_no_fault(renderer: ChatRenderer) -> None:
    async def harness(task: HarnessTask) -> None:
        async with openai_client(task, max_retries=0) as client:
            await ask(client, user("a"))
            await ask(client, user("a"), said("right"), user("x" * 400))

    env = EchoEnv()
    episode = await run(renderer, says("right"), harness, env=env, limits={"max_context_tokens": 200})
    assert (episode.stop_reason, kinds(episode.segments)) == (StopReason.TRUNCATED_CONTEXT, "pa")
    assert env.log[-1] == ("context", "")


async def test_a_first_prompt_that_is_too_long_is_not_tried_again(renderer: ChatRenderer) -> None:
    async def harness(task: HarnessTask) -> None:
        async with openai_client(task, max_retries=0) as client:
            await ask(client, user("x" * 400))

    with pytest.raises(PromptTooLong, match="max_context_tokens"):
        await run(renderer, says("right"), harness, limits={"max_context_tokens": 200})


async def test_an_engine_that_fails_for_good_voids_the_episode_and_ends_the_harness(renderer: ChatRenderer) -> None:
    ended = asyncio.Event()

    async def harness(task: HarnessTask) -> None:
        try:
            async with openai_client(task, max_retries=0) as client:
                await ask(client, user("a"))
        except Exception:
            await asyncio.Event().wait()  # it would wait for ever
        finally:
            ended.set()

    with pytest.raises(EngineFault, match="no engine"):
        await run(renderer, lambda prompt, number: EngineFault("no engine"), harness)
    assert ended.is_set()


async def test_cancelled_nothing_of_it_is_left(renderer: ChatRenderer, tmp_path: Path) -> None:
    engine = ScriptedEngine(renderer, says("right"))
    engine.hold = asyncio.Event()
    program = write_program(tmp_path, ASKS)
    running = asyncio.create_task(run(renderer, engine, command=["{python}", str(program)], grace_s=0.5))
    await asyncio.wait_for(engine.started.wait(), 60)
    before = [child.pid for child in psutil.Process().children() if str(program) in child.cmdline()]
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert before
    assert not any(map(alive, before))
    assert engine.aborted


async def test_a_function_that_is_not_async_has_a_process_of_its_own(renderer: ChatRenderer, tmp_path: Path) -> None:
    write_program(tmp_path, "import os\n" + _PLAIN.replace("PATH", str(tmp_path / "pid")))
    (tmp_path / "program.py").rename(tmp_path / "a_plain_harness.py")
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(tmp_path)
        patch.setenv("PYTHONPATH", f"{tmp_path}:{':'.join(filter(None, sys.path))}")
        episode = await run(renderer, says("right"), call="a_plain_harness:solve", reward="posted")
    assert episode.reward == 0.5
    assert not alive(int((tmp_path / "pid").read_text()))


_PLAIN = """
def solve(task):
    import json, urllib.request
    open("PATH", "w").write(str(os.getpid()))
    body = json.dumps({"model": "m", "messages": task.messages}).encode()
    request = urllib.request.Request(task.openai_base_url + "/chat/completions", body)
    with urllib.request.urlopen(request, timeout=60) as answer:
        assert json.load(answer)["choices"][0]["message"]["content"] == "right"
    return 0.5
"""


@pytest.mark.parametrize(
    ("keys", "wrong"),
    [
        ({}, "give `command`"),
        ({"command": ["true"], "call": "a:b"}, "give `command`"),
        ({"call": "not a function"}, "call"),
        ({"call": "a:b", "folder": "/"}, "are of a `command`"),
        ({"command": ["true"], "reward": "guessed"}, "reward"),
        ({"command": ["true"], "commands": []}, "commands"),
    ],
    ids=["nothing", "both", "no name", "folder of a call", "reward", "unknown"],
)
def test_a_harness_that_cannot_be_is_refused_by_its_key(keys: dict[str, Any], wrong: str) -> None:
    with pytest.raises(ValidationError, match=wrong):
        HarnessConfig(**keys)


def config(**harness: Any) -> RuntimeConfig:
    told = {"store": "http://127.0.0.1:1", "engines": ["http://127.0.0.1:2"], "model": "m", "env": {"id": "x"}}
    return RuntimeConfig.model_validate({**told, **({"harness": harness} if harness else {})})


@pytest.mark.parametrize(
    ("words", "wrong"),
    [
        (["learner.routing=replayed", "engine.urls=[http://127.0.0.1:1]"], "carry no experts"),
        (["learner.online=true", "evaluation.tasks=1"], "runtime.harness has no effect"),
        (["runtime.harness.comand=[x]"], "runtime.harness.comand: unknown key"),
    ],
    ids=["replayed routing", "online", "unknown"],
)
def test_what_does_not_go_with_a_harness_is_refused_by_its_key(words: list[str], wrong: str) -> None:
    with pytest.raises(RecipeError, match=wrong):
        load_recipe(Path(__file__).parents[2] / "recipes" / "harness_tiny.yaml", words)


async def test_the_wrong_command_for_a_configuration_is_refused(unused_tcp_port: int) -> None:
    with pytest.raises(ConfigError, match=r"python -m agent\.harness"):
        async with own_turns(config(command=["true"])):
            pass
    with pytest.raises(ConfigError, match=r"python -m agent\.runtime"):
        async with harness_turns(config()):
            pass
    with pytest.raises(ConfigError, match="there is no no_such_module:solve"):
        async with harness_turns(config(call="no_such_module:solve")):
            pass
    async with harness_turns(config(command=["true"], port=unused_tcp_port)):
        with pytest.raises(ConfigError, match="cannot listen"):
            async with harness_turns(config(command=["true"], port=unused_tcp_port)):
                pass


def test_help_of_the_function_runner_says_how_it_is_called(capsys: pytest.CaptureFixture[str]) -> None:
    assert call_main(["--help"]) == 0
    assert "package.module:function" in capsys.readouterr().err
    assert call_main([]) == 2
