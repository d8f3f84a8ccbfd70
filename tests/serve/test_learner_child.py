"""A learner that dies does not take the server with it, and comes back with back-off, up to a cap."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
from serve_tools import ServerProcess, client, serving, write_recipe

from agent.backoff import doubled_s
from agent.serve.children.learner import LearnerChild, learner_command, why_ended

DIES = "import sys; print('cannot go on'); sys.exit(3)"
LIVES = "import time; time.sleep(600)"
ENDS = "pass"


def child(
    tmp_path: Path, code: str, *, restarts: int = 2, pinned: Callable[[], bool] = lambda: False, **more: Any
) -> LearnerChild:
    return LearnerChild(
        [sys.executable, "-c", code],
        tmp_path / "learner.log",
        restarts=restarts,
        first_backoff_s=0.01,
        settled_s=300.0,
        pinned=pinned,
        **more,
    )


async def until(holds: Callable[[], bool], within_s: float = 60.0) -> None:
    async with asyncio.timeout(within_s):
        while not holds():  # noqa: ASYNC110
            await asyncio.sleep(0.01)


def test_the_wait_doubles_up_to_a_minute() -> None:
    assert [doubled_s(n, first_s=1.0, most_s=60.0) for n in (1, 2, 3, 7, 50)] == [1.0, 2.0, 4.0, 60.0, 60.0]


async def test_a_learner_that_dies_again_and_again_is_given_up(tmp_path: Path) -> None:
    learner = child(tmp_path, DIES)
    await learner.run()
    assert (learner.state.state, learner.state.restarts, learner.state.last_exit) == ("failed", 2, 3)
    assert "cannot go on" in learner.state.detail


async def test_a_learner_that_is_done_is_not_started_again(tmp_path: Path) -> None:
    learner = child(tmp_path, ENDS)
    await learner.run()
    assert (learner.state.state, learner.state.restarts) == ("finished", 0)


async def test_a_learner_that_is_done_says_why_and_that_nothing_is_learned(tmp_path: Path) -> None:
    """Was: `learner.steps` reached, /healthz ok, and feedback `in_store` as if somebody learned from it."""
    (tmp_path / "metrics.jsonl").write_text('{"step": 6}\n{"step": 7}\n')
    learner = child(tmp_path, ENDS, why_ended=lambda: why_ended(tmp_path, 7))
    assert learner.state.learning == "off"
    await learner.run()
    assert learner.state.learning == "ended"
    assert learner.state.detail.startswith("learner.steps=7 is reached")
    assert "learner.log" in why_ended(tmp_path, 8)
    assert "learner.log" in why_ended(tmp_path / "nothing", None)


async def test_a_rollback_ends_the_learner_and_that_is_no_failure(tmp_path: Path) -> None:
    held, log = [False], tmp_path / "learner.log"
    learner = child(tmp_path, "print('started', flush=True); " + LIVES, restarts=0, pinned=lambda: held[0])
    task = asyncio.create_task(learner.run())
    await until(lambda: log.exists() and "started" in log.read_text())
    held[0] = True
    await learner.interrupt()
    await until(lambda: learner.state.state == "held")
    held[0] = False
    await until(lambda: log.read_text().count("started") == 2)
    assert (learner.state.state, learner.state.restarts) == ("running", 0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_stopping_leaves_no_learner_behind(tmp_path: Path) -> None:
    learner = child(tmp_path, LIVES)
    task = asyncio.create_task(learner.run())
    await until(lambda: learner.state.state == "running")
    [process] = [p for p in psutil.Process(os.getpid()).children() if LIVES in " ".join(p.cmdline())]
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert not process.is_running()


KEEPS_ON = """
import signal, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
print("ignoring SIGTERM", flush=True)
time.sleep(600)
"""
RUNS_IT = """
import asyncio, sys
from pathlib import Path
from agent.serve.children.learner import LearnerChild
command, output = [sys.executable, "-c", sys.argv[1]], Path(sys.argv[2])
options = dict(restarts=0, first_backoff_s=1.0, settled_s=1.0, pinned=lambda: False)
asyncio.run(LearnerChild(command, output, **options).run())
"""


async def test_a_killed_server_takes_a_learner_along_that_would_rather_wait(tmp_path: Path) -> None:
    """One that waits for its engine would keep the run's lock, and the next server's learner out."""
    log = tmp_path / "learner.log"
    server = await asyncio.create_subprocess_exec(sys.executable, "-c", RUNS_IT, KEEPS_ON, str(log))
    await until(lambda: log.exists() and "ignoring" in log.read_text())
    [learner] = psutil.Process(server.pid).children()
    server.kill()
    await server.wait()
    psutil.wait_procs([learner], timeout=20)
    assert not learner.is_running() or learner.status() == psutil.STATUS_ZOMBIE


async def test_while_versions_are_pinned_no_learner_is_started(tmp_path: Path) -> None:
    """Case G7: neither one that has died nor a new server's first: it would find other weights than its own."""
    log, answers, seen = tmp_path / "learner.log", iter([True, True, False, True, False]), []

    def pinned() -> bool:
        seen.append((learner.state.state, log.read_text().count("started") if log.exists() else 0))
        return next(answers)

    learner = child(tmp_path, "print('started'); " + DIES, restarts=1, pinned=pinned)
    await learner.run()
    assert seen == [("off", 0), ("held", 0), ("held", 0), ("waiting", 1), ("held", 1)]
    assert (learner.state.state, log.read_text().count("started")) == ("failed", 2)


def test_the_learner_gets_addresses_and_nothing_else_of_the_server() -> None:
    words = learner_command(Path("r.yaml"), ["name=x"], store="http://127.0.0.1:1", engine="http://127.0.0.1:2")
    assert words[1:5] == ["-m", "learner.train", "r.yaml", "name=x"]
    assert {"store.url=http://127.0.0.1:1", "engine.urls=[http://127.0.0.1:2]", "runtime.launch=false"} <= set(words)


@pytest.mark.timeout(300)
@pytest.mark.xdist_group("serve-versions")
async def test_the_server_goes_on_without_its_learner_and_says_so(models: tuple[Path, Path], tmp_path: Path) -> None:
    """Case D8, online: serving and recording do not depend on the learner."""
    keys = tmp_path / "keys"
    keys.write_text("ann:ann-secret-1\n")
    recipe = write_recipe(tmp_path, models[0], learner_restarts=1, learner_backoff_s=0.1, keys_file=str(keys))
    with serving(recipe, "--learn", "learner.algorithm=no_such_algorithm") as server:
        async with client(server.url, "ann-secret-1") as api:

            async def state() -> str:
                status, health = await api.call("GET", "/healthz")
                assert status == 200
                return health["learner"]["state"]

            async with asyncio.timeout(200):
                while await state() != "failed":  # noqa: ASYNC110
                    await asyncio.sleep(0.1)
            _, health = await api.call("GET", "/healthz")
            assert (health["status"], health["learner"]["restarts"]) == ("degraded", 1)
            assert "no_such_algorithm" in health["learner"]["detail"]
            answer = await api.chat()
            given = (await api.feedback(answer["id"], reward=1))[1]
            assert (given["in_store"], given["learning"], health["learning"]) == (True, False, "ended")
            assert "no_such_algorithm" in health["learning_reason"]
            async with client(server.url) as stranger:  # who has no key is not shown the end of a log
                _, shown = await stranger.call("GET", "/healthz")
            assert shown["learning"] == "ended"
            assert "no_such_algorithm" not in str(shown)
            children = psutil.Process(server.process.pid).children(recursive=True)
    assert_gone(server, children)


def assert_gone(server: ServerProcess, children: list[psutil.Process]) -> None:
    _, alive = psutil.wait_procs(children, timeout=20)
    assert not alive
    assert server.process.returncode == 0
