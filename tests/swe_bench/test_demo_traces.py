"""Scripted traces: what a script writes is what the environment reads, and what comes out can be learned from."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from envs.swe_bench.demo.__main__ import main
from envs.swe_bench.demo.scripts import SCRIPTS, SUBMIT, call, malformed, plan
from envs.swe_bench.demo.source import DemoError, demos
from envs.swe_bench.demo.traces import play, write_traces
from envs.swe_bench.env import SWEBench
from envs.swe_bench.scaffolds.bash import TOOLS
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


def in_containers(test):  # type: ignore[no-untyped-def]
    """Marks of a test that plays episodes."""
    for mark in (pytest.mark.docker, pytest.mark.xdist_group("demo-images"), pytest.mark.timeout(900)):
        test = mark(test)
    return test


def bash_env() -> SWEBench:
    return SWEBench("demo", scaffold="bash")


@pytest.mark.slow
@in_containers
def test_clean_traces_solve_every_repository(tmp_path: Path) -> None:
    """Cases F2 to F4 from the agent's side: a fix in a CRLF file, a binary one and a new file earn the reward."""
    out = tmp_path / "traces.jsonl"
    assert main(["traces", str(out), "--count", "5"]) == 0
    found = [json.loads(line) for line in out.read_text(encoding="utf-8").splitlines()]
    assert [(one["task_id"], one["reward"]) for one in found] == [(f"sao-demo__{name}-1", 1.0) for name in SCRIPTS]
    for one in found:
        roles = [message["role"] for message in one["messages"]]
        assert roles[:3] == ["system", "user", "assistant"]
        # The form that `learner.sft` lays out: one message between two actions, an action at the end.
        assert roles[2:] == ["assistant", "tool"] * (len(roles) // 2 - 1) + ["assistant"]
        assert all(isinstance(message["content"], str) for message in one["messages"])
        assert sum(len(message["content"]) for message in one["messages"]) < 2500
    assert list(tmp_path.iterdir()) == [out]


@in_containers
async def test_mistakes_earn_nothing_and_malformed_calls_are_answered() -> None:
    env = bash_env()
    try:
        half = await play(env, "sao-demo__phrasebook-1", [*map(call, SCRIPTS["phrasebook"].wrong), SUBMIT])
        assert half.reward == 0.0
        early = await play(env, "sao-demo__tablet-1", [malformed("ls"), call("ls"), SUBMIT])
        assert early.reward == 0.0
        assert early.messages[3]["content"].startswith("Malformed tool call")
        with pytest.raises(DemoError, match="did not end"):
            await play(env, "sao-demo__tablet-1", [call("ls")])
        with pytest.raises(DemoError, match="after 1 of 2"):
            await play(env, "sao-demo__tablet-1", [SUBMIT, SUBMIT])
    finally:
        await env.aclose()


@in_containers
async def test_traces_that_nobody_waits_for_are_given_up() -> None:
    """Leaving early closes every environment and so its containers."""
    closed = []

    class Watched(SWEBench):
        async def aclose(self) -> None:
            await super().aclose()
            closed.append(self)

    found = write_traces(lambda: Watched("demo", scaffold="bash"), 4, error_rate=1.0, concurrency=2)
    async for trace in found:
        assert trace.task_id == "sao-demo__durations-1"
        break
    await found.aclose()
    assert len(closed) == 2


def test_traces_without_an_engine_say_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DOCKER_HOST", "unix:///nowhere/docker.sock")
    assert main(["traces", str(tmp_path / "t.jsonl"), "--count", "1"]) == 1
    assert "make sandboxes" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []
