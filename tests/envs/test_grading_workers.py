r"""Grading in killable processes (case E8)."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import psutil
import pytest

from envs.core import EnvironmentFault
from envs.python_tir.grading.grader import Grader

POWERS = r"\boxed{2^{2^{2^{2^{10}}}}}"
ROOTS = r"\boxed{\sqrt[3]{2^{2^{2^{20}}}}}"  # never worked out in this world's time
SUM = r"\boxed{\sum_{n=1}^{10^{10}} \frac{1}{n^{n}+\sin n}}"
NESTED = rf"\boxed{{{'(' * 2000}1{')' * 2000}}}"
ROOT = r"\sqrt{2}"  # no plain number: a calculation is worked out before it is refused
HALF = r"\boxed{\frac{2}{4}}"


def workers() -> list[psutil.Process]:
    found = []
    for child in psutil.Process().children(recursive=True):
        try:
            if any(part.endswith("grading/worker.py") for part in child.cmdline()):
                found.append(child)
        except psutil.NoSuchProcess:
            continue
    return found


@pytest.fixture
def grader() -> Iterator[Grader]:
    made = Grader(workers=1, timeout_s=1.0)
    yield made
    made.close_sync()
    assert workers() == []


@pytest.mark.parametrize("action", [POWERS, SUM, NESTED, r"\boxed{9^{9^{9}}!}", r"\boxed{\int_0^1 x^{x^{x^x}} dx}"])
async def test_hostile_answer_is_wrong_within_the_clock(grader: Grader, action: str) -> None:
    """Case E8."""
    assert await grader.grade(HALF, "0.5")  # the worker is up
    started = time.monotonic()
    assert await grader.grade(action, ROOT) is False
    assert time.monotonic() - started < 1.0 + 15.0


async def test_hostile_answer_costs_only_itself() -> None:
    """Case E8: answers queued behind it are graded by a new worker."""
    right = r"\boxed{\frac{\sqrt{8}}{2}}"
    actions = [right, ROOTS, right, POWERS, right, r"\boxed{1.41}", ROOTS, right]
    grader = Grader(workers=2, timeout_s=1.0)
    try:
        assert await asyncio.gather(*(grader.grade(right, ROOT) for _ in range(2))) == [True, True]
        before = workers()
        verdicts = await asyncio.gather(*(grader.grade(action, ROOT) for action in actions))
        assert verdicts == [action == right for action in actions]
        assert workers() != before  # the roots ran into the clock: workers were killed
    finally:
        await grader.close()
    await grader.close()
    assert workers() == []


def test_any_thread_can_grade(grader: Grader) -> None:
    """Case E8: no reliance on signals of the main thread; an event loop in a thread works too."""
    with ThreadPoolExecutor(4) as pool:
        verdicts = [pool.submit(grader.grade_sync, action, "0.5") for action in (HALF, NESTED, HALF, r"\boxed{3}")]
        looped = pool.submit(lambda: asyncio.run(grader.grade(HALF, "0.5")))
        assert [future.result() for future in verdicts] == [True, False, True, False]
        assert looped.result() is True


def test_thread_that_started_a_worker_may_end(grader: Grader) -> None:
    """The parent-death signal follows a thread: it must not be the caller's."""
    first = threading.Thread(target=grader.grade_sync, args=(HALF, "0.5"))
    first.start()
    first.join()
    [worker] = workers()
    assert grader.grade_sync(HALF, "0.5")
    assert workers() == [worker]


def test_plain_equality_needs_no_worker(grader: Grader) -> None:
    assert grader.grade_sync(r"\boxed{\dfrac12}", r"\frac{1}{2}")
    assert grader.grade_sync(r"\boxed{1{,}234}", "1,234")
    assert not grader.grade_sync("no box here", "42")
    assert not grader.grade_sync(rf"\boxed{{{'1' * 20_000}}}", "42")
    assert workers() == []


def test_killed_worker_is_replaced(grader: Grader) -> None:
    assert grader.grade_sync(HALF, "0.5")
    [worker] = workers()
    worker.kill()
    assert grader.grade_sync(HALF, "0.5")
    assert workers() != [worker]


def test_worker_carries_no_torch_and_has_its_own_group(grader: Grader) -> None:
    assert grader.grade_sync(HALF, "0.5")
    [worker] = workers()
    assert os.getpgid(worker.pid) == worker.pid
    assert not any("/torch/" in mapped.path for mapped in worker.memory_maps())
    assert worker.rlimit(psutil.RLIMIT_AS)[0] <= 2 * 2**30


def test_no_worker_is_a_fault_and_no_wrong_answer(grader: Grader, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as broken:
        broken.setattr(sys, "executable", "/nonexistent/python")
        with pytest.raises(EnvironmentFault, match="No grading worker"):
            grader.grade_sync(HALF, "0.5")
        broken.setattr(sys, "executable", "/bin/false")
        with pytest.raises(EnvironmentFault, match="No grading worker"):
            grader.grade_sync(HALF, "0.5")
    assert grader.grade_sync(HALF, "0.5")  # and it recovers


async def test_close_ends_what_is_in_flight() -> None:
    grader = Grader(workers=1, timeout_s=60.0)
    assert await grader.grade(HALF, "0.5")
    waiting = [asyncio.create_task(grader.grade(action, ROOT)) for action in (ROOTS, HALF)]
    await asyncio.sleep(0)  # both are queued
    await asyncio.wait_for(grader.close(), 5)
    for outcome in await asyncio.gather(*waiting, return_exceptions=True):
        assert isinstance(outcome, EnvironmentFault)
    with pytest.raises(EnvironmentFault, match="closed"):
        await grader.grade(HALF, "0.5")
    assert workers() == []


async def test_cancelled_caller_leaves_the_grader_usable(grader: Grader) -> None:
    task = asyncio.create_task(grader.grade(ROOTS, ROOT))
    with pytest.raises(asyncio.TimeoutError):
        await asyncio.wait_for(task, 0.2)
    assert await grader.grade(HALF, "0.5")


_CHILD = """
import sys, threading
from envs.python_tir.grading.grader import Grader
grader = Grader(workers=1, timeout_s=600)
assert grader.grade_sync(r"\\boxed{2/4}", "0.5")
if sys.argv[1] == "busy":
    slow = (r"\\boxed{\\int_0^1 x^{x^{x^x}} dx}", r"\\sqrt{2}")
    threading.Thread(target=grader.grade_sync, args=slow, daemon=True).start()
import psutil
print(psutil.Process().children()[0].pid, flush=True)
if sys.argv[1] != "leave":
    sys.stdin.read()
"""


@pytest.mark.parametrize("state", ["idle", "busy"])
def test_workers_die_with_the_parent(state: str) -> None:
    command = [sys.executable, "-c", _CHILD, state]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        worker = psutil.Process(int(parent.stdout.readline()))
        parent.send_signal(signal.SIGKILL)
        worker.wait(timeout=10)
    assert not worker.is_running()


def test_forgotten_grader_does_not_hold_the_interpreter() -> None:
    ended = subprocess.run(
        [sys.executable, "-c", _CHILD, "leave"], capture_output=True, text=True, timeout=20, check=True
    )
    with contextlib.suppress(psutil.NoSuchProcess):
        psutil.Process(int(ended.stdout)).wait(timeout=10)


@pytest.mark.parametrize(("count", "seconds"), [(0, 1.0), (1, 0.0)])
def test_impossible_settings_are_refused(count: int, seconds: float) -> None:
    with pytest.raises(ValueError, match="workers"):
        Grader(workers=count, timeout_s=seconds)
