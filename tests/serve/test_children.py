"""Children that say their port, end at their start, die again and again; words of commands that all read alike."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent.child_processes import start_service, stop_child
from agent.serve.children.keeping import keep_running
from envs.key_values import WrongWord, key_value, override

SAYS_ITS_PORT = """
import os, subprocess, sys, time
import agent
from agent.child_processes import announce_port
if len(sys.argv) > 1:  # a child of its own, started before it is ready, as a server starts its engine
    own = "import agent; print('its child:', repr(agent.PORT_PIPE), flush=True)"
    subprocess.Popen([sys.executable, "-c", own]).wait()
announce_port(None, 4711)
time.sleep(600)
"""
DIES = "print('no such model'); raise SystemExit(3)"
SLEEPS = "import time; time.sleep(600)"


async def _service(code: str, log: Path, *words: str, limit_s: float = 60.0):  # type: ignore[no-untyped-def]
    return await start_service(
        *(sys.executable, "-c", code, *words),
        name="the child",
        log=log,
        env=os.environ,
        limit_s=limit_s,
        fault=RuntimeError,
    )


async def test_a_port_is_heard_of_and_no_grandchild_takes_the_pipe_for_its_own(tmp_path: Path) -> None:
    process, port = await _service(SAYS_ITS_PORT, tmp_path / "log", "with a child")
    try:
        assert port == 4711
        assert "its child: ''" in (tmp_path / "log").read_text()
    finally:
        await stop_child(process)


@pytest.mark.parametrize(
    ("code", "limit_s", "said"),
    [(DIES, 60.0, "ended with code 3 at its start:\nno such model"), (SLEEPS, 1.0, "was not ready within 1 s")],
    ids=["dies", "sleeps"],
)
async def test_a_child_that_is_not_ready_is_named_and_not_left_behind(
    tmp_path: Path, code: str, limit_s: float, said: str
) -> None:
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(RuntimeError, match=f"the child {said}"):
        await _service(code, tmp_path / "log", limit_s=limit_s)
    assert not [p for p in psutil.Process().children() if code in p.cmdline()]
    assert len(os.listdir("/proc/self/fd")) <= before + 1  # asyncio's own, made once


async def test_a_process_that_dies_at_once_is_waited_for_longer_each_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine that came up and died was started again every half second for ever."""
    waits: list[float] = []
    heard: list[tuple[int | Exception, int]] = []

    async def sleep(seconds: float) -> None:
        waits.append(seconds)

    monkeypatch.setattr("agent.serve.children.keeping.asyncio.sleep", sleep)
    outcomes: list[int | Exception] = [1, OSError("no room"), 9, 0]

    async def run() -> int:
        outcome = outcomes.pop(0)
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    def ended(how: int | Exception, failures: int) -> bool:
        heard.append((how, failures))
        return how != 0

    await keep_running(run, ended, first_s=0.5, most_s=1.5, faults=(OSError,))
    assert waits == [0.5, 1.0, 1.5]
    assert [failures for _, failures in heard] == [1, 2, 3, 4]
    assert isinstance(heard[1][0], OSError)


@given(st.lists(st.text("abcde_", min_size=1, max_size=5), min_size=1, max_size=4), st.floats(1e-9, 1e9))
def test_any_number_is_read_back_at_any_depth(path: list[str], number: float) -> None:
    data: dict[str, object] = {}
    override(data, [f"{'.'.join(path)}={number!r}", f"{'.'.join(path)}={number:e}"])
    found: object = data
    for part in path:
        assert isinstance(found, dict)
        found = found[part]
    assert found == pytest.approx(number, rel=1e-6)


@pytest.mark.parametrize(
    ("word", "shown"), [("a", "'a'"), ("=1", "'=1'"), ("", "''"), ("a=[1", "'[1'"), ("a=: [", "': ['")]
)
def test_a_word_that_cannot_be_read_is_shown(word: str, shown: str) -> None:
    with pytest.raises(WrongWord) as caught:
        key_value(word, "key=value, e.g. a=1")
    assert shown in str(caught.value)


def test_a_path_through_a_value_is_refused_and_an_empty_section_is_filled() -> None:
    data = {"section": None, "value": 3}
    override(data, ["section.key=1"])
    assert data["section"] == {"key": 1}
    with pytest.raises(WrongWord, match="value is a value, not a section"):
        override(data, ["value.key=1"])
