"""Whatever an environment answers or raises is a fault of its own episode."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from runtime_tools import EchoEnv, ScriptedEngine, settings, ticket

from agent.chat.renderer import ChatRenderer
from agent.episode import EpisodeError, StopReason
from agent.runtime.environment_calls import EnvironmentCalls
from agent.runtime.rollout import rollout
from agent.runtime.settings import StageLimits
from envs.core import EnvironmentFault

SOUND_INFO = {"messages": [{"role": "user", "content": "x"}]}

ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5) | st.binary(max_size=3),
    lambda inner: (
        st.lists(inner, max_size=6)
        | st.lists(inner, max_size=6).map(tuple)
        | st.dictionaries(st.sampled_from(["messages", "tools", "truncation", "metrics", "role", "content"]), inner)
    ),
    max_leaves=12,
)


class Answers(EchoEnv):
    """Answers `reset`, `step` and `truncate` with what it was given; an exception is raised."""

    def __init__(self, answer: Any) -> None:
        super().__init__()
        self.answer = answer

    async def _answer(self) -> Any:
        if isinstance(self.answer, BaseException):
            raise self.answer
        return self.answer

    async def areset(self, **_: Any) -> Any:
        return await self._answer()

    async def astep(self, action: str) -> Any:
        return await self._answer()

    async def atruncate(self, reason: str, action: str = "") -> Any:
        return await self._answer()


def calls(env: EchoEnv) -> EnvironmentCalls:
    return EnvironmentCalls(env, "test/Odd-v0", StageLimits())


@pytest.mark.parametrize(
    "answer",
    [
        None,
        "",
        ("", 0.0, True, {}),
        ("", 0.0, True, False, None),
        ("", 0.0, False, False, {}),
        ("", 0.0, False, False, {"messages": 5}),
        ("", 0.0, False, False, {"messages": [{"content": "no role"}]}),
        ("", None, True, False, {}),
        ("", float("nan"), True, False, {}),
        ("", float("inf"), True, False, {}),
        ("", 1.0, True, False, {"metrics": 5}),
        ("", 1.0, True, False, {"metrics": {"x": object()}}),
        ("", 0.0, False, True, {}),
        ("", 0.0, False, True, {"truncation": "boredom"}),
        ValueError("its own bug"),
        KeyError("its own bug"),
        AssertionError(),
    ],
)
async def test_a_malformed_step_is_a_fault_that_names_the_environment(answer: Any) -> None:
    """Case M2."""
    with pytest.raises(EnvironmentFault, match="test/Odd-v0"):
        await calls(Answers(answer)).step("x")
    with pytest.raises(EnvironmentFault, match="test/Odd-v0"):
        await calls(Answers(answer)).truncate("context", "x")


@pytest.mark.parametrize(
    "answer",
    [
        None,
        {},
        ("",),
        ("", None),
        ("", {}),
        ("", {"messages": None}),
        ("", {**SOUND_INFO, "tools": 5}),
        ("", {**SOUND_INFO, "tools": ["t"]}),
        RuntimeError("its own bug"),
    ],
)
async def test_a_malformed_reset_is_a_fault_that_names_the_environment(answer: Any) -> None:
    """Case M2."""
    with pytest.raises(EnvironmentFault, match="test/Odd-v0"):
        await calls(Answers(answer)).reset(0, "t", "hermes")


@given(answer=ANYTHING | st.tuples(ANYTHING, ANYTHING) | st.tuples(ANYTHING, ANYTHING, *[st.booleans()] * 2, ANYTHING))
async def test_no_answer_of_an_environment_ends_the_runtime(answer: Any) -> None:
    """Case M2, generated: what is not understood is a fault, and never another error."""
    asked = calls(Answers(answer))
    for call in (
        lambda: asked.reset(0, "t", "hermes"),
        lambda: asked.step("x"),
        lambda: asked.truncate("context", "x"),
    ):
        try:
            await call()
        except EnvironmentFault:
            continue


@pytest.mark.parametrize("found", [None, 5, "ab", {"a"}])
async def test_task_ids_that_are_no_sequence_or_raise_are_a_fault(renderer: ChatRenderer, found: Any) -> None:
    """Case M2: for all 64 slots the runtime ended."""

    class Odd(EchoEnv):
        @property
        def task_ids(self) -> Sequence[str]:
            return found

    class Raising(EchoEnv):
        @property
        def task_ids(self) -> Sequence[str]:
            raise OSError("no such data set")

    kinds: list[Callable[[], EchoEnv]] = [Odd, Raising]
    for make in kinds:
        with pytest.raises(EnvironmentFault, match=r"test/Echo-v0: task_ids"):
            await rollout(ticket(), make(), ScriptedEngine(renderer, lambda p, n: "right"), renderer, settings())


@pytest.mark.parametrize("content", [5, object(), {"a": 1}, [5]])
async def test_a_message_that_no_template_can_show_costs_its_own_episode(renderer: ChatRenderer, content: Any) -> None:
    class Odd(EchoEnv):
        async def areset(self, **_: Any) -> Any:
            return "", {"messages": [{"role": "user", "content": content}]}

    try:
        episode = await rollout(ticket(), Odd(), ScriptedEngine(renderer, lambda p, n: "right"), renderer, settings())
    except (EnvironmentFault, EpisodeError):
        return
    assert episode.stop_reason is StopReason.TERMINATED
