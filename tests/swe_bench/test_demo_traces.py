"""Scripted traces: what a script writes is what the environment reads, and what comes out can be learned from."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from envs.swe_bench.bash import TOOLS
from envs.swe_bench.demo.scripts import SCRIPTS, SUBMIT, plan
from envs.swe_bench.demo.source import demos
from envs.tool_calls import parse_action


def test_every_repository_has_a_script() -> None:
    assert list(SCRIPTS) == list(demos())


@given(name=st.sampled_from(sorted(SCRIPTS)), seed=st.integers(), error_rate=st.sampled_from([0.0, 0.5, 1.0]))
def test_scripts_write_calls_that_are_read(name: str, seed: int, error_rate: float) -> None:
    """At most one call is malformed, none with an error rate of 0, and the last one always submits."""
    actions = plan(name, random.Random(seed), error_rate)
    read = [parse_action(action, TOOLS) for action in actions]
    errors = [one for one in read if one.error]
    assert len(errors) <= (1 if error_rate else 0)
    assert all(one.call is not None for one in read if not one.error)
    assert actions[-1] == SUBMIT
    assert 2 <= len(actions) <= 9
    if not error_rate:
        commands = [one.call.arguments["command"] for one in read[:-1] if one.call]
        assert all(command in commands for command in SCRIPTS[name].fix)
        assert commands[-1].startswith("python3 -m pytest")


@pytest.mark.parametrize("name", sorted(SCRIPTS))
def test_scripts_vary_and_can_be_made_again(name: str) -> None:
    plans = [plan(name, random.Random(seed), 0.5) for seed in range(40)]
    assert plans == [plan(name, random.Random(seed), 0.5) for seed in range(40)]
    assert len({tuple(one) for one in plans}) > 8
