"""Environments of other people: found by name, run without a change, and never in the way of the event loop."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import gymnasium
import pytest
from gymnasium.spaces import Discrete, Text

from envs import make_core
from envs.core import AsyncEnv, EnvironmentFault, Message, Step
from envs.gymnasium_core import GymnasiumCore

HERE = __name__


class Guess(gymnasium.Env[str, str]):
    """Guess a number from 0 to 9: an ordinary environment that knows nothing of this project."""

    action_space = Text(1000)
    observation_space = Text(1000)

    def __init__(self, tries: int = 3) -> None:
        self.tries, self.threads = tries, set[int]()
        self.gate: threading.Event | None = None
        self.closed = 0

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[str, dict[str, Any]]:
        super().reset(seed=seed)
        self.threads.add(threading.get_ident())
        self.secret, self.left = int(self.np_random.integers(10)), self.tries
        return "Guess a number from 0 to 9.", {}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        self.threads.add(threading.get_ident())
        if self.gate is not None:
            self.gate.wait()
        self.left -= 1
        if action.strip() == str(self.secret):
            return "Right.", 1.0, True, False, {}
        return "No.", -0.1, False, self.left == 0, {}

    def close(self) -> None:
        self.closed += 1


class WithTasks(Guess):
    task_ids = ("three", "seven")

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[str, dict[str, Any]]:
        super().reset(seed=seed)
        self.secret = {"three": 3, "seven": 7}[(options or {})["task_id"]]
        messages: list[Message] = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Guess."}]
        return "Guess.", {"messages": messages}

    def truncate(self, reason: str, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        return "", 0.5, False, True, {"metrics": {"cut": reason}}


class Buttons(Guess):
    action_space = Discrete(2)  # type: ignore[assignment]


class NoEnvironment:
    pass


async def test_a_class_of_a_module_is_an_environment_whose_tasks_are_seeds() -> None:
    core = make_core(f"{HERE}:Guess", tries=2, seeds={"start": 50, "count": 3})
    assert core.task_ids == ["seed-50", "seed-51", "seed-52"]
    text, info = await core.areset(seed=9, options={"task_id": "seed-51"})
    assert info["messages"] == [{"role": "user", "content": text}]
    assert (info["task_id"], info["tools"]) == ("seed-51", [])
    env = core._env  # type: ignore[attr-defined]
    first = env.secret
    wrong = str((first + 1) % 10)
    _, reward, terminated, truncated, info = await core.astep(wrong)
    assert (reward, terminated, truncated) == (-0.1, False, False)
    assert info["messages"] == [{"role": "user", "content": "No."}]
    _, _, terminated, truncated, info = await core.astep(wrong)
    assert (terminated, truncated, info["truncation"], info["messages"]) == (False, True, "turns", [])
    await core.areset(seed=10, options={"task_id": "seed-51"})
    assert env.secret == first, "the task is the seed, whatever the ticket's"
    _, reward, terminated, _, _ = await core.astep(str(first))
    assert (reward, terminated) == (1.0, True)
    assert len(env.threads) == 1
    assert threading.get_ident() not in env.threads
    await core.aclose()
    await core.aclose()
    assert env.closed == 1


async def test_tasks_messages_and_a_cut_of_its_own_are_used() -> None:
    core = make_core(f"{HERE}:WithTasks")
    assert list(core.task_ids) == ["three", "seven"]
    _, info = await core.areset(seed=1, options={"task_id": "seven"})
    assert [message["role"] for message in info["messages"]] == ["system", "user"]
    assert (await core.astep("7"))[1] == 1.0
    await core.areset(seed=1, options={"task_id": "three"})
    _, reward, terminated, truncated, info = await core.atruncate("context", "7")
    assert (reward, terminated, truncated) == (0.5, False, True)
    assert (info["truncation"], info["metrics"]) == ("context", {"cut": "context"})
    await core.aclose()


async def test_without_a_cut_of_its_own_an_episode_keeps_its_rewards_and_gets_no_more() -> None:
    core = make_core(f"{HERE}:Guess")
    await core.areset(seed=0)
    assert (await core.atruncate("wall_clock", "5"))[1:4] == (0.0, False, True)
    with pytest.raises(ValueError, match="boredom"):
        await core.atruncate("boredom")
    await core.aclose()


async def test_ids_of_gymnasium_and_of_entry_points_are_found(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    gymnasium.register("Guess-v7", entry_point=Guess)
    try:
        assert isinstance(make_core("Guess-v7", tries=1), GymnasiumCore)
    finally:
        del gymnasium.registry["Guess-v7"]
    info = tmp_path / "games-1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: games\nVersion: 1\n")
    (info / "entry_points.txt").write_text(f"[sao.environments]\nguess = {HERE}:Guess\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert isinstance(make_core("guess", tries=1), GymnasiumCore)
    with pytest.raises(ValueError, match=r"known: .*guess"):
        make_core("gess")


async def test_one_of_ours_by_its_class_or_by_gymnasium_is_not_wrapped_again() -> None:
    problems = [{"problem": "What is 6*7?", "answer": "42"}]
    ours = make_core("sao/PythonTIR-v0", problems=problems)
    for name in ("envs.python_tir.env:PythonTIR", "envs:sao/PythonTIR-v0"):
        assert type(make_core(name, problems=problems)) is type(ours)


@pytest.mark.parametrize(
    ("name", "kwargs", "says"),
    [
        (f"{HERE}:Buttons", {}, "actions are Discrete.*TransformAction"),
        (f"{HERE}:Nothing", {}, "Nothing.*importable"),
        ("no.such.module:Env", {}, r"no\.such\.module.*importable"),
        (f"{HERE}:NoEnvironment", {}, r"AsyncEnv or a gymnasium\.Env, not NoEnvironment"),
        (f"{HERE}:Guess", {"seeds": {"first": 1}}, "start: 0, count: 1000"),
        ("envs.python_tir.env:PythonTIR", {"seeds": {"start": 1}}, "PythonTIR has its own"),
        ("CartPole-v1", {}, "observations|actions"),
    ],
)
def test_what_cannot_be_trained_is_refused_with_a_way_out(name: str, kwargs: dict[str, Any], says: str) -> None:
    if name.startswith("envs."):
        kwargs = {**kwargs, "problems": [{"problem": "1?", "answer": "1"}]}
    with pytest.raises(ValueError, match=says):
        make_core(name, **kwargs)


async def test_a_slow_step_holds_up_nobody_and_a_late_one_is_not_mixed_with_the_next() -> None:
    cores: list[AsyncEnv] = [make_core(f"{HERE}:Guess") for _ in range(2)]
    for core in cores:
        await core.areset(seed=0)
    slow = cores[0]._env  # type: ignore[attr-defined]
    slow.gate = threading.Event()
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(cores[0].astep("x"), 0.05)
    assert (await asyncio.wait_for(cores[1].astep("x"), 10))[1] == -0.1
    with pytest.raises(EnvironmentFault, match="ran out of time"):
        await cores[0].astep("y")
    slow.gate.set()
    for core in cores:
        await core.aclose()


class Caller(Guess):
    tool_format = "hermes"

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[str, dict[str, Any]]:
        super().reset(seed=seed)
        return self.tool_format, {}


async def test_a_synchronous_environment_is_told_how_the_policy_writes_calls() -> None:
    core = make_core(f"{HERE}:Caller")
    core.tool_format = "glm"
    assert (await core.areset(seed=0))[0] == "glm"
    await core.aclose()


async def test_a_core_needs_no_more_than_tasks_reset_and_step() -> None:
    class Least(AsyncEnv):
        task_ids = ("one",)

        async def areset(
            self, *, seed: int | None = None, options: dict[str, Any] | None = None
        ) -> tuple[str, dict[str, Any]]:
            return "Go.", {"messages": [{"role": "user", "content": "Go."}]}

        async def astep(self, action: str) -> Step:
            return "", 1.0, True, False, {"messages": []}

    core = Least()
    await core.areset()
    assert (await core.atruncate("context", "half"))[1:4] == (0.0, False, True)
    with pytest.raises(ValueError, match="boredom"):
        await core.atruncate("boredom")
    await core.aclose()


async def test_what_an_environment_raises_reaches_the_caller() -> None:
    core = make_core(f"{HERE}:WithTasks")
    with pytest.raises(KeyError):
        await core.areset(seed=0, options={"task_id": "nine"})
    await core.aclose()
