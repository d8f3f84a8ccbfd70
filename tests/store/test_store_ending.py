"""A store that is asked to end does so, though its log, its files and its parent are gone or hang."""

from __future__ import annotations

import asyncio
import fcntl
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from agent.store.client import StoreClient
from agent.store.protocol import StoreFault, Ticket

LIMITED = "from agent.store import ending, __main__; ending.LIMIT_S = 3.0; raise SystemExit(__main__.main())"


async def _port(file: Path) -> int:
    async with asyncio.timeout(60):
        while not file.exists():  # noqa: ASYNC110, ASYNC240
            await asyncio.sleep(0.02)
    return int(file.read_text())  # noqa: ASYNC240


async def _until_it_hangs(store: StoreClient, tickets: list[Ticket]) -> None:
    """Each failure is a line of the log; once the pipe is full nothing is answered any more."""
    for ticket in tickets:
        await store.fail(ticket.id, "x" * 200)


def _start(*words: str, output: int) -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, "-c", LIMITED, *words], stdout=output, stderr=output)


def _run(*command: str, **environment: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen(command, stderr=subprocess.DEVNULL, env={**os.environ, **environment})


@pytest.mark.skipif(sys.platform != "linux", reason="pipes have a size that can be set on Linux alone")
async def test_a_store_whose_log_nobody_reads_ends_when_it_is_asked_to(tmp_path: Path) -> None:
    """It hung in the write of a log line for ever, without hearing the signal, as an orphan with an open pipe."""
    reading, writing = os.pipe()
    fcntl.fcntl(writing, fcntl.F_SETPIPE_SZ, 4096)
    port_file = tmp_path / "port"
    words = ["--path", str(tmp_path / "run" / "e.sqlite"), "--port-file", str(port_file), "tasks=500", "batch=100"]
    process = _start(*words, output=writing)
    os.close(writing)
    try:
        async with StoreClient(f"http://127.0.0.1:{await _port(port_file)}", timeout_s=2.0, key="") as store:
            tickets = await store.lease(100, "w")
            waiting = asyncio.create_task(store.claim(100, 0, wait_s=60.0))
            with pytest.raises(StoreFault):
                await _until_it_hangs(store, tickets)
            shutil.rmtree(tmp_path / "run")
            process.send_signal(signal.SIGTERM)
            await asyncio.to_thread(process.wait, 30)
            waiting.cancel()
            await asyncio.gather(waiting, return_exceptions=True)
    finally:
        process.kill()
        process.wait()
        os.close(reading)


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux has subreapers")
async def test_an_orphan_that_is_not_adopted_by_process_1_ends_too(tmp_path: Path) -> None:
    """Where a subreaper adopts orphans (a user's session, a container), it took that one for its parent, and stayed."""
    port_file = tmp_path / "port"
    words = ["--path", str(tmp_path / "e.sqlite"), "--port-file", str(port_file), "--exit-with-parent", "tasks=5"]
    gone = _run(sys.executable, "-c", "")
    gone.wait()
    # Its parent is this process, which has never said that it started it: so it is for one that was adopted.
    process = _run(sys.executable, "-m", "agent.store", *words, "batch=1", SAO_STARTED_BY=str(gone.pid))
    try:
        assert await asyncio.to_thread(process.wait, 60) == 0
    finally:
        process.kill()
        process.wait()


async def test_an_orderly_end_is_no_killed_one(tmp_path: Path) -> None:
    """The code tells them apart, and the port file goes."""
    port_file = tmp_path / "port"
    words = ["--path", str(tmp_path / "e.sqlite"), "--port-file", str(port_file), "tasks=5", "batch=1"]
    process = _start(*words, output=subprocess.DEVNULL)
    try:
        await _port(port_file)
        process.send_signal(signal.SIGTERM)
        assert await asyncio.to_thread(process.wait, 30) == 0
        assert not port_file.exists()
    finally:
        process.kill()
        process.wait()
