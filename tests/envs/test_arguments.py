"""Case J8: what an environment cannot use is refused where it is made or reset, by the key's name."""

from __future__ import annotations

from typing import Any

import gymnasium
import pytest

from envs.arguments import ArgumentError
from envs.making import make_core

IDS = ("sao/PythonTIR-v0", "sao/SWEBench-v0", "sao/StyleShift-v0")


@pytest.mark.parametrize("env_id", IDS)
@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("sandbox", "docker"), ("memory_mb", -5), ("memory_mb", 0), ("memory_mb", 2.5), ("call_timeout_s", -1),
        ("call_timeout_s", "10"), ("call_timeout_s", float("nan")), ("max_turns", "3"), ("max_turns", 0),
        ("max_turns", True), ("wall_clock_s", float("inf")), ("max_context_chars", 0), ("max_turn", 3),
    ],
)  # fmt: skip
def test_a_wrong_argument_is_refused_by_name(env_id: str, key: str, value: Any) -> None:
    with pytest.raises(ArgumentError, match=key):
        gymnasium.make(env_id, **{key: value})
    with pytest.raises(ArgumentError, match=key):
        make_core(env_id, **{key: value})


@pytest.mark.parametrize(
    ("env_id", "kwargs"),
    [
        ("sao/PythonTIR-v0", {"wall_clock_s": None, "call_timeout_s": 3, "spares": 0, "reward_wrong": -1}),
        ("sao/SWEBench-v0", {"wall_clock_s": None, "max_context_chars": 5000, "hosts": ["tcp://a:1"], "cpus": 1}),
        ("sao/StyleShift-v0", {"step": 0, "schedule_seed": 3, "judge_timeout_s": 1, "system_prompt": "x"}),
    ],
)
def test_right_arguments_are_taken(env_id: str, kwargs: dict[str, Any]) -> None:
    gymnasium.make(env_id, **kwargs).close()


@pytest.mark.parametrize("env_id", IDS)
@pytest.mark.parametrize("options", [{"taskid": "x"}, {"task_id": None, "seed": 3}, {"": 1}])
def test_an_unknown_reset_option_is_refused_by_name(env_id: str, options: dict[str, Any]) -> None:
    env = gymnasium.make(env_id)
    with pytest.raises(ArgumentError, match=repr(list(options)[-1])):
        env.reset(options=options)
    env.close()


def test_options_that_are_no_mapping_are_refused() -> None:
    env = gymnasium.make("sao/StyleShift-v0")
    with pytest.raises(ArgumentError, match="task_id"):
        env.reset(options=["task_id"])  # type: ignore[arg-type]
    env.close()
