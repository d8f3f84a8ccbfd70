"""An engine started as a child: readiness, bad models, and that nothing of it is left."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TypeVar

import psutil
import pytest
from engine_tools import VOCABULARY, make_model

from agent.child_processes import stop_child
from agent.engines.base import EngineFault
from agent.engines.client import HttpEngine
from agent.engines.local.launch import launch_local
from agent.episode import SamplingParams

EOS = list(range(0, VOCABULARY, 3))
T = TypeVar("T")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("launch") / "model", "llama", 1, eos=EOS)


async def becomes(ask: Callable[[], Awaitable[T]], holds: Callable[[T], bool], timeout_s: float = 20.0) -> bool:
    deadline = time.monotonic() + timeout_s
    while not holds(await ask()):
        if time.monotonic() > deadline:
            return False
        await asyncio.sleep(0.01)
    return True


async def children() -> set[int]:
    return {p.pid for p in psutil.Process().children()}


async def gone(pid: int) -> bool:
    async def alive() -> bool:
        return psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE

    return await becomes(alive, lambda now: not now)


async def test_an_engine_starts_with_its_version_and_leaves_nothing(model: Path, tmp_path: Path) -> None:
    process, url = await launch_local(model, version=7, log=tmp_path / "engine.log", max_sequences=2, max_context=500)
    client = HttpEngine(url)
    try:
        health = await client.health()
        assert (health.version, health.max_context) == (7, 500)
        # Case B8: the model's own end token ends an action, and is part of it.
        done = await client.generate([1, 2], SamplingParams(max_tokens=400))
        assert done.finish_reason == "stop"
        assert [t in EOS for t in done.token_ids] == [False] * (len(done.token_ids) - 1) + [True]
        assert len(done.logprobs) == len(done.token_ids)
        # A request in flight must not hold up the end.
        running = asyncio.create_task(client.generate([1], SamplingParams(max_tokens=400)))
        assert await becomes(client.health, lambda now: now.tokens_generated > len(done.token_ids))
    finally:
        assert await stop_child(process) == 0
        assert await stop_child(process) == 0
        await asyncio.gather(running, return_exceptions=True)
        await client.close()
    assert await gone(process.pid)
    assert os.listdir(tmp_path) == ["engine.log"]


async def test_a_missing_model_is_said_at_once(tmp_path: Path) -> None:
    """Bad input: a missing model path."""
    with pytest.raises(EngineFault, match="no model in"):
        await launch_local(tmp_path / "nothing", version=0, log=tmp_path / "engine.log")


async def test_a_model_that_cannot_be_served_is_said_with_the_log(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "no such type"}')
    with pytest.raises(EngineFault, match="no such type"):
        await launch_local(tmp_path, version=0, log=tmp_path / "engine.log")
    assert not (tmp_path / "engine.port").exists()


async def test_a_start_past_its_time_limit_leaves_nothing(model: Path, tmp_path: Path) -> None:
    before = await children()
    with pytest.raises(EngineFault, match="not ready within"):
        await launch_local(model, version=0, log=tmp_path / "engine.log", ready_timeout_s=0.1)
    assert await children() <= before


async def test_cancelling_a_start_leaves_nothing(model: Path, tmp_path: Path) -> None:
    before = await children()
    task = asyncio.create_task(launch_local(model, version=0, log=tmp_path / "engine.log"))
    assert await becomes(children, lambda now: not now <= before)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert await children() <= before


async def test_the_engine_dies_with_a_parent_that_is_killed(model: Path, tmp_path: Path) -> None:
    """Case D8: whoever started it being killed leaves no engine behind."""
    code = (
        "import asyncio, pathlib, sys\n"
        "from agent.engines.local.launch import launch_local\n"
        "async def main():\n"
        "    process, _ = await launch_local(pathlib.Path(sys.argv[1]), version=0, log=pathlib.Path(sys.argv[2]))\n"
        "    print(process.pid, flush=True)\n"
        "    await asyncio.Event().wait()\n"
        "asyncio.run(main())\n"
    )
    parent = await asyncio.create_subprocess_exec(
        sys.executable, "-c", code, str(model), str(tmp_path / "engine.log"), stdout=asyncio.subprocess.PIPE
    )
    assert parent.stdout is not None
    try:
        pid = int(await asyncio.wait_for(parent.stdout.readline(), 60))
        assert psutil.pid_exists(pid)
    finally:
        parent.send_signal(signal.SIGKILL)
        await parent.wait()
    assert await gone(pid)
