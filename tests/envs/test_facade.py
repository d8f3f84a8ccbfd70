"""The synchronous facade over an asynchronous core: threads, forks, garbage and Gymnasium's own checker."""

from __future__ import annotations

import asyncio
import gc
import multiprocessing
import subprocess
import sys
import textwrap
import threading
import warnings
import weakref
from collections.abc import Sequence
from typing import Any

import gymnasium
import pytest
from gymnasium.utils.env_checker import check_env
from gymnasium.vector import AsyncVectorEnv, SyncVectorEnv

from envs.core import AsyncEnv, EnvironmentFault, Step
from envs.facade import TextEnv


class Parrot(AsyncEnv):
    """A user's own environment: repeats what it is told until it is told "stop" or "fault"."""

    def __init__(self, words: Sequence[str] = ("hello", "ahoy", "good day", "greetings")) -> None:
        self.words = list(words)
        self.loops: set[int] = set()
        self.closed = 0

    @property
    def task_ids(self) -> Sequence[str]:
        return self.words

    async def areset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[str, dict[str, Any]]:
        self.loops.add(id(asyncio.get_running_loop()))
        word = (options or {}).get("task_id") or self.words[(seed or 0) % len(self.words)]
        messages = [{"role": "user", "content": word}]
        return word, {"messages": messages, "tools": [], "task_id": word, "segment": "prompt"}

    async def astep(self, action: str) -> Step:
        await asyncio.sleep(0)
        if action == "fault":
            raise EnvironmentFault("the parrot is gone")
        if action == "wait for ever":
            await asyncio.Event().wait()
        done = action == "stop"
        messages = [] if done else [{"role": "user", "content": action}]
        return ("" if done else action), float(done), done, False, {"messages": messages, "segment": "observation"}

    async def atruncate(self, reason: str, action: str = "") -> Step:
        return "", 0.0, False, True, {"messages": [], "segment": "observation", "truncation": reason}

    async def aclose(self) -> None:
        self.closed += 1


def threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "sao-envs"]


def test_gymnasiums_checker_passes_without_a_warning() -> None:
    gymnasium.register(id="test/Parrot-v0", entry_point=lambda **kwargs: TextEnv(Parrot(), **kwargs))
    try:
        env = gymnasium.make("test/Parrot-v0", render_mode="ansi")
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            check_env(env.unwrapped)
        env.close()
    finally:
        del gymnasium.registry["test/Parrot-v0"]


def test_a_facade_runs_inside_a_running_loop() -> None:
    """A notebook runs a loop already, in which a synchronous call must still work."""

    async def notebook_cell() -> str:
        env = TextEnv(Parrot())
        try:
            return env.reset(options={"task_id": "ahoy"})[0]
        finally:
            env.close()

    assert asyncio.run(notebook_cell()) == "ahoy"


def test_environments_of_a_process_share_one_loop_and_leave_no_thread() -> None:
    first, second = TextEnv(Parrot()), TextEnv(Parrot())
    assert not threads(), "making an environment starts nothing"
    first.reset(seed=0)
    second.reset(seed=0)
    assert first.core.loops == second.core.loops  # type: ignore[attr-defined]
    assert len(threads()) == 1
    first.close()
    assert second.step("still here")[0] == "still here"
    second.close()
    second.close()
    assert not threads()


def test_a_closed_environment_can_be_reset_again() -> None:
    env = TextEnv(Parrot())
    env.reset(seed=0)
    env.close()
    assert env.reset(seed=1)[0] == "ahoy"
    env.close()


def test_an_environment_that_is_garbage_closes_its_core() -> None:
    core = Parrot()
    env = TextEnv(core)
    env.reset(seed=0)
    gone = weakref.ref(env)
    del env
    gc.collect()
    assert gone() is None
    assert core.closed == 1
    assert not threads()


def test_a_seed_makes_later_resets_repeat_too() -> None:
    env = TextEnv(Parrot([str(i) for i in range(1000)]))
    runs = [[env.reset(seed=5)[0], *(env.reset()[0] for _ in range(5))] for _ in range(2)]
    assert runs[0] == runs[1]
    assert len(set(runs[0])) > 3
    env.close()


def test_a_fault_is_raised_and_is_no_reward() -> None:
    env = TextEnv(Parrot())
    env.reset(seed=0)
    with pytest.raises(EnvironmentFault, match="gone"):
        env.step("fault")
    assert env.reset(seed=1)[0] == "ahoy"
    env.close()


def test_an_action_that_is_no_text_is_refused() -> None:
    env = TextEnv(Parrot())
    env.reset(seed=0)
    with pytest.raises(TypeError, match="bytes"):
        env.step(b"stop")  # type: ignore[arg-type]
    env.close()


def test_rendering_shows_the_episode(capsys: pytest.CaptureFixture[str]) -> None:
    env = TextEnv(Parrot(), render_mode="ansi")
    env.reset(seed=0)
    env.step("salve \ud800")
    env.step("stop")
    assert env.render() == (
        "[user] hello\n[action] salve \ud800\n[observation] salve \ud800\n[action] stop\n[end] reward 1, terminated"
    )
    env.close()
    human = TextEnv(Parrot(), render_mode="human")
    human.reset(seed=0)
    human.step("salve \ud800")
    assert human.render() is None
    assert "[observation] salve \\ud800" in capsys.readouterr().out
    human.close()
    with pytest.raises(ValueError, match="render_mode"):
        TextEnv(Parrot(), render_mode="rgb_array")


def _use_after_fork(env: TextEnv, answer: Any) -> None:
    try:
        env.step("x")
    except EnvironmentFault as error:
        answer.put(str(error))


def test_a_started_environment_says_that_it_cannot_cross_a_fork() -> None:
    env = TextEnv(Parrot())
    env.reset(seed=0)
    context = multiprocessing.get_context("fork")
    answer = context.Queue()
    child = context.Process(target=_use_after_fork, args=(env, answer))
    child.start()
    assert "in the process that uses it" in answer.get(timeout=30)
    child.join(30)
    assert env.step("still alive in the parent")[0] == "still alive in the parent"
    env.close()


@pytest.mark.parametrize("context", ["fork", "spawn"])
def test_async_vector_environments_work_with_default_arguments(context: str) -> None:
    """Shared memory included, in workers that fork while another environment's loop is running here."""
    other = TextEnv(Parrot())
    other.reset(seed=0)
    vector = AsyncVectorEnv([lambda: TextEnv(Parrot())] * 2, context=context)
    try:
        observations, infos = vector.reset(seed=[0, 1])
        assert observations == ("hello", "ahoy")
        assert observations in vector.observation_space
        assert [m[0]["content"] for m in infos["messages"]] == ["hello", "ahoy"]
        first = vector.step(("a \ud800", "stop"))
        assert first[0] == ("a \ud800", "")
        assert first[1].tolist() == [0.0, 1.0]
        assert first[2].tolist() == [False, True]
        second = vector.step(vector.action_space.sample())
        assert second[0][1] in Parrot().words, "the finished one was reset"
        assert first[0] == ("a \ud800", ""), "what was returned before does not change"
    finally:
        vector.close()
        other.close()


@pytest.mark.parametrize("shared_memory", [True, False])
def test_sync_and_async_vector_environments_agree(shared_memory: bool) -> None:
    sync = SyncVectorEnv([lambda: TextEnv(Parrot())] * 3)
    parallel = AsyncVectorEnv([lambda: TextEnv(Parrot())] * 3, shared_memory=shared_memory)
    try:
        assert sync.reset(seed=4)[0] == parallel.reset(seed=4)[0]
        for actions in [("a", "b", "c"), ("stop", "d", "stop"), ("e", "stop", "f")]:
            assert sync.step(actions)[0] == parallel.step(actions)[0]
    finally:
        sync.close()
        parallel.close()


def test_an_interpreter_that_ends_without_close_ends_cleanly() -> None:
    program = """
        import sys
        sys.path.insert(0, "tests/envs")
        from test_facade import Parrot
        from envs.facade import TextEnv
        class Loud(Parrot):
            async def aclose(self):
                await super().aclose()
                print("closed")
        env = TextEnv(Loud())
        env.reset(seed=0)
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)], capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "closed\n", "")


def test_an_interrupt_cancels_the_step_and_leaves_the_environment_usable() -> None:
    program = """
        import os, signal, sys, threading
        # A shell's background job, which a test run may be, hands down an ignored SIGINT.
        signal.signal(signal.SIGINT, signal.default_int_handler)
        sys.path.insert(0, "tests/envs")
        from test_facade import Parrot
        from envs.facade import TextEnv
        class Signalling(Parrot):
            async def astep(self, action):
                if action == "wait for ever":
                    os.kill(os.getpid(), signal.SIGINT)
                return await super().astep(action)
        env = TextEnv(Signalling())
        env.reset(seed=0)
        try:
            env.step("wait for ever")
        except KeyboardInterrupt:
            print("interrupted")
        print(env.reset(seed=1)[0])
        env.close()
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)], capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "interrupted\nahoy\n", "")


def test_stepping_before_reset_is_gymnasiums_error_through_make() -> None:
    env = gymnasium.make("sao/PythonTIR-v0")
    with pytest.raises(gymnasium.error.ResetNeeded):
        env.step("x")
    env.close()
