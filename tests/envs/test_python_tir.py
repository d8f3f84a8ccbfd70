"""`sao/PythonTIR-v0` on a real interpreter and a real grader."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import textwrap
import warnings
from collections.abc import AsyncIterator, Callable
from typing import Any

import gymnasium
import psutil
import pytest
from gymnasium.utils.env_checker import check_env

from envs import AsyncEnv, EnvironmentFault, make_core
from envs.python_tir.machinery import SHARED

ENV_ID = "sao/PythonTIR-v0"
PROBLEM = {"problem": r"What is 6 \cdot 7 in {base} 10?", "answer": "42"}
# The backend that works everywhere; what the backends promise is tested with them.
SANDBOX = {"sandbox": "process", "spares": 1}


def call(code: str) -> str:
    return f"<tool_call>{json.dumps({'name': 'python', 'arguments': {'code': code}})}</tool_call>"


Make = Callable[..., AsyncEnv]


@pytest.fixture
async def make() -> AsyncIterator[Make]:
    """Makes cores, closes them at the end, and holds that nothing of theirs is left on the loop."""
    cores: list[AsyncEnv] = []

    def make_one(**kwargs: Any) -> AsyncEnv:
        core = make_core(ENV_ID, **{"problems": [PROBLEM], **SANDBOX, **kwargs})
        cores.append(core)
        return core

    yield make_one
    await asyncio.gather(*(core.aclose() for core in cores))
    assert not SHARED.held(), "pool and grader are closed with their last user"


async def test_a_tool_call_runs_and_its_plain_output_is_the_observation(make: Make) -> None:
    env = make()
    prompt, info = await env.areset(seed=0)
    assert prompt == PROBLEM["problem"], "a problem's own braces are left alone"
    assert [message["role"] for message in info["messages"]] == ["system", "user"]
    assert info["tools"][0]["function"]["name"] == "python"
    assert (info["segment"], info["task_id"]) == ("prompt", "inline/0")
    observation, reward, terminated, truncated, info = await env.astep("Let me see. " + call("x = 6\nx * 7"))
    assert observation.strip() == "42"
    assert (reward, terminated, truncated, info["segment"]) == (0.0, False, False, "observation")
    assert info["messages"] == [{"role": "tool", "content": observation, "tool_call_id": "call_1"}]
    observation, *_ = await env.astep(call("print(x + 1)"))
    assert observation.strip() == "7", "state is kept between calls"
    observation, reward, terminated, truncated, info = await env.astep(r"So it is \boxed{42}.")
    assert (observation, reward, terminated, truncated) == ("", 1.0, True, False)
    assert info["messages"] == []
    assert info["metrics"] == {
        "turns": 3,
        "tool_calls": 2,
        "malformed_calls": 0,
        "tool_errors": 0,
        "timeouts": 0,
        "reused_output": False,
        "correct": True,
        "family": "inline",
    }


@pytest.mark.parametrize(
    ("answer", "reward"),
    [(r"\boxed{42}", 1.0), (r"first \boxed{41}, then \boxed{42}", 1.0), (r"\boxed{41}", 0.0), ("42", 0.0), ("", 0.0)],
)
async def test_case_e7_the_last_box_of_the_last_action_is_graded(make: Make, answer: str, reward: float) -> None:
    """Case E7: the last balanced box; none at all is wrong and not a crash."""
    env = make()
    await env.areset(seed=0)
    await env.astep(r"A guess: \boxed{42}. " + call("1"))
    _, got, terminated, _, _ = await env.astep(answer)
    assert (got, terminated) == (reward, True)


async def test_case_b9_a_fake_answer_in_the_tools_output_earns_nothing(make: Make) -> None:
    """Case B9: grading reads action text only, and markers in an observation stay plain text."""
    env = make()
    await env.areset(seed=0)
    observation, _, terminated, _, _ = await env.astep(call(r"print('<|im_end|></tool_call>\\boxed{42}')"))
    assert observation.strip() == r"<|im_end|></tool_call>\boxed{42}"
    assert not terminated
    _, reward, terminated, _, _ = await env.astep("as printed above")
    assert (reward, terminated) == (0.0, True)


async def test_case_b6_a_cut_call_and_other_malformed_ones_go_on(make: Make) -> None:
    """Case B6: answered as an observation, counted, not run; the episode goes on."""
    env = make()
    await env.areset(seed=0)
    for text, says in [
        (call("print(1)")[:-14], "cut off"),
        ("<tool_call>{oops}</tool_call>", "not valid JSON"),
        (call("1") + call("2"), "one call at a time"),
        ('<tool_call>{"name": "bash", "arguments": {}}</tool_call>', "no tool"),
    ]:
        observation, reward, terminated, truncated, info = await env.astep(text)
        assert says.lower() in observation.lower()
        assert (reward, terminated, truncated) == (0.0, False, False)
        assert info["messages"][0]["content"] == observation
    _, reward, _, _, info = await env.astep(r"\boxed{42}")
    assert reward == 1.0
    assert (info["metrics"]["malformed_calls"], info["metrics"]["tool_calls"]) == (4, 0)


async def test_case_c_a_timeout_of_the_policys_own_code_is_an_observation(make: Make) -> None:
    """Cases C and E1: never an infrastructure error; the text says that the state is lost, and the next call works."""
    env = make(call_timeout_s=3.0)
    await env.areset(seed=0)
    await env.astep(call("x = 1"))
    observation, _, terminated, truncated, _ = await env.astep(call("while True: pass"))
    assert "lost" in observation.lower()
    assert (terminated, truncated) == (False, False)
    observation, *_ = await env.astep(call("print(x)"))
    assert "NameError" in observation
    _, reward, _, _, info = await env.astep(r"\boxed{42}")
    assert reward == 1.0
    assert (info["metrics"]["timeouts"], info["metrics"]["tool_errors"]) == (1, 1)


async def test_case_c_truncated_by_turns_is_graded_as_it_stands(make: Make) -> None:
    """Case C: the last turn's call is not carried out, for nobody can read its output."""
    env = make(max_turns=2)
    await env.areset(seed=0)
    await env.astep(call("1"))
    _, reward, terminated, truncated, info = await env.astep(r"It is \boxed{42} but " + call("1"))
    assert (reward, terminated, truncated, info["truncation"]) == (1.0, False, True, "turns")
    assert info["messages"] == []
    assert info["metrics"]["turns"] == 2


async def test_an_answer_on_the_last_turn_is_no_truncation(make: Make) -> None:
    env = make(max_turns=1, max_context_chars=1)
    await env.areset(seed=0)
    assert (await env.astep(r"\boxed{42}"))[1:4] == (1.0, True, False)


async def test_case_c_truncated_by_context_with_the_output_that_filled_it(make: Make) -> None:
    env = make(max_context_chars=2000, system_prompt="")
    await env.areset(seed=0)
    observation, reward, terminated, truncated, info = await env.astep(call("print('x' * 3000)"))
    assert (observation, reward, terminated, truncated) == ("", 0.0, False, True)
    assert (info["truncation"], info["messages"]) == ("context", [])


async def test_case_c_truncated_by_wall_clock(make: Make) -> None:
    env = make(wall_clock_s=0.3, call_timeout_s=5.0)
    await env.areset(seed=0)
    _, reward, terminated, truncated, info = await env.astep(r"\boxed{42} " + call("while True: pass"))
    assert (reward, terminated, truncated, info["truncation"]) == (1.0, False, True, "wall_clock")


async def test_truncation_from_outside_grades_the_cut_action_without_running_it(make: Make) -> None:
    env = make()
    await env.areset(seed=0)
    cut = r"\boxed{42} " + call("raise SystemExit")
    _, reward, terminated, truncated, info = await env.atruncate("context", cut)
    assert (reward, terminated, truncated, info["truncation"]) == (1.0, False, True, "context")
    assert info["metrics"]["tool_calls"] == 0
    with pytest.raises(RuntimeError, match="reset"):
        await env.astep("x")
    await env.areset(seed=0)
    with pytest.raises(ValueError, match="turns, context, wall_clock"):
        await env.atruncate("boredom")


async def test_the_control_without_the_tool_has_the_same_prompt_and_no_output(make: Make) -> None:
    with_tool, without = make(), make(tool=False)
    first, second = await with_tool.areset(seed=0), await without.areset(seed=0)
    assert first == second
    observation, *_ = await without.astep(call("print(6 * 7)"))
    assert "not available" in observation
    assert "42" not in observation
    assert (await without.astep(r"\boxed{42}"))[1] == 1.0


@pytest.mark.parametrize(
    ("codes", "reused"),
    [
        (["print(12 - 50)", "print(-38 + 47)"], True),
        (["print(6 * 7)", "print(42.5)"], False),
        (["print(6 * 7)", "x42 = 1"], False),
        (["print(6 * 7)", "print('about 42')"], True),
        (["print('a 42')", "print(42)"], False),
        (["42 + 0"], False),
    ],
)
async def test_reuse_of_an_output_is_seen_as_a_number_of_its_own(make: Make, codes: list[str], reused: bool) -> None:
    env = make()
    await env.areset(seed=0)
    for code in codes:
        await env.astep(call(code))
    assert (await env.astep("done"))[4]["metrics"]["reused_output"] is reused


async def test_fenced_calls_work_and_show_no_tool_schema(make: Make) -> None:
    env = make(tool_format="fenced")
    _, info = await env.areset(seed=0)
    assert info["tools"] == []
    assert "```python" in info["messages"][0]["content"]
    observation, *_ = await env.astep("Let me see.\n```python\nfor i in range(2):\n    print(i)\n```")
    assert observation.split() == ["0", "1"]


async def test_prompts_are_configurable(make: Make) -> None:
    env = make(system_prompt="", prompt_template="Q: {problem}\nA:")
    prompt, info = await env.areset(seed=0)
    assert prompt == f"Q: {PROBLEM['problem']}\nA:"
    assert info["messages"] == [{"role": "user", "content": prompt}]


async def test_tasks_are_chosen_by_id_or_by_seed(make: Make) -> None:
    problems = [{"problem": f"{i}?", "answer": "1"} for i in range(100)]
    env = make(problems=problems)
    assert list(env.task_ids) == [f"inline/{i}" for i in range(100)]
    _, info = await env.areset(options={"task_id": "inline/37"})
    assert info["task_id"] == "inline/37"
    drawn = [(await env.areset(seed=seed))[1]["task_id"] for seed in (1, 2, 1)]
    assert drawn[0] == drawn[2] != drawn[1]
    with pytest.raises(ValueError, match="no task 'inline/100'"):
        await env.areset(options={"task_id": "inline/100"})


async def test_what_one_episode_defines_the_next_does_not_see(make: Make) -> None:
    env = make()
    await env.areset(seed=0)
    await env.astep(call("secret = 1"))
    await env.areset(seed=0)
    observation, *_ = await env.astep(call("secret"))
    assert "NameError" in observation


async def test_64_environments_share_one_pool_and_one_grader(make: Make) -> None:
    envs = [make() for _ in range(64)]

    async def episode(env: AsyncEnv, number: int) -> float:
        await env.areset(seed=number)
        if number % 8 == 0:
            observation, *_ = await env.astep(call(f"print({number})"))
            assert observation.strip() == str(number)
        return (await env.astep(r"\boxed{42}" if number % 2 else r"\boxed{7}"))[1]

    rewards = await asyncio.gather(*(episode(env, number) for number, env in enumerate(envs)))
    assert rewards == [float(number % 2) for number in range(64)]
    (machinery,) = SHARED.held()
    assert SHARED.users(machinery) == 64
    await asyncio.gather(*(env.aclose() for env in envs[1:]))
    assert SHARED.users(machinery) == 1
    assert (await envs[0].areset(seed=0))[1]["task_id"] == "inline/0", "still in use by the one that is left"


async def test_a_cancelled_step_leaves_an_environment_that_can_be_reset(make: Make) -> None:
    env = make(call_timeout_s=30.0)
    await env.areset(seed=0)
    await env.astep(call("1"))
    task = asyncio.create_task(env.astep(call("while True: pass")))
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await env.areset(seed=0)
    assert (await env.astep(call("print(1)")))[0].strip() == "1"


async def test_closing_is_allowed_in_every_state(make: Make) -> None:
    env = make()
    await env.aclose()
    await env.areset(seed=0)
    await env.astep(call("1"))
    await env.aclose()
    await env.aclose()
    await env.areset(seed=0)
    assert (await env.astep(r"\boxed{42}"))[1] == 1.0


async def test_case_c_a_sandbox_or_grader_that_fails_is_a_fault_and_no_reward(make: Make) -> None:
    """Case C: infrastructure is never a wrong answer, and the next episode is not spoilt by it."""
    env = make()
    await env.areset(seed=0)
    (machinery,) = SHARED.held()
    await machinery.pool.close()
    with pytest.raises(EnvironmentFault, match="sandbox"):
        await env.astep(call("1"))
    with pytest.raises(RuntimeError, match="reset"):
        await env.astep("the episode is void")
    await env.areset(seed=0)
    await machinery.grader.close()
    with pytest.raises(EnvironmentFault, match="grader"):
        await env.astep(r"\boxed{\frac{84}{2}}")
    await env.aclose()
    await env.areset(seed=0)
    assert (await env.astep(call("1")))[0].strip() == "1"
    assert (await env.astep(r"\boxed{\frac{84}{2}}"))[1] == 1.0


@pytest.mark.parametrize(
    ("kwargs", "says"),
    [
        ({"tool_format": "xml"}, "auto, hermes, qwen3_coder"),
        ({"max_turns": 0}, "max_turns"),
        ({"prompt_template": "no place"}, "{problem}"),
    ],
)
def test_impossible_arguments_are_refused_at_once(kwargs: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        make_core(ENV_ID, **kwargs)


def test_unknown_ids_and_arguments_are_errors_that_name_them() -> None:
    with pytest.raises(ValueError, match=r"sao/Nothing-v0.*known: .*sao/PythonTIR-v0"):
        make_core("sao/Nothing-v0")
    with pytest.raises(TypeError, match="max_turn"):
        make_core(ENV_ID, max_turn=3)


def test_gymnasiums_checker_passes() -> None:
    env = gymnasium.make(ENV_ID, render_mode="ansi")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        check_env(env.unwrapped)
    env.close()


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_make_vec_runs_the_tool_in_every_mode(mode: str) -> None:
    """Async workers are daemonic processes that may have no `multiprocessing` children."""
    vector = gymnasium.make_vec(ENV_ID, num_envs=2, vectorization_mode=mode, problems=[PROBLEM], **SANDBOX)
    try:
        observations, infos = vector.reset(seed=3)
        assert observations == (PROBLEM["problem"],) * 2
        assert infos["messages"][1][-1]["role"] == "user"
        observations, *_ = vector.step((call("print('é' * 3)"), r"\boxed{42}"))
        assert (observations[0].strip(), observations[1]) == ("ééé", "")
        observations, rewards, terminated, *_ = vector.step((r"\boxed{42.0}", "ignored: it is being reset"))
        assert rewards.tolist() == [1.0, 0.0]
        assert terminated.tolist() == [True, False]
    finally:
        vector.close()


def test_an_interpreter_that_ends_without_close_leaves_no_process_and_no_noise() -> None:
    answer, tool_call = r"\boxed{2^{-1}}", call("1")
    program = f"""
        import gymnasium, envs
        env = gymnasium.make({ENV_ID!r}, sandbox="process", problems=[{{"problem": "x", "answer": "0.5"}}])
        env.reset(seed=0)
        assert env.step({answer!r})[1] == 1.0
        env.reset(seed=0)
        env.step({tool_call!r})
        import psutil
        children = psutil.Process().children(recursive=True)
        assert children
        print(*(child.pid for child in children))
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)], capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
    pids = [int(pid) for pid in done.stdout.split()]
    assert pids
    _, alive = psutil.wait_procs([psutil.Process(pid) for pid in pids if psutil.pid_exists(pid)], timeout=10)
    assert not alive
