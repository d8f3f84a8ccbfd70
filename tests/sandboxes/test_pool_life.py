"""What a pool leaves behind: nothing, however it ends. And what its callers meet when parts of it die."""

# ruff: noqa: ASYNC110 - a bounded poll is the only way to see another process end

from __future__ import annotations

import asyncio
import glob
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil
import pytest

from sandboxes.base import Limits, SandboxFault
from sandboxes.pool import PythonPool

ROOT = Path(__file__).parents[2]
BACKENDS = pytest.mark.parametrize("backend", ["bubblewrap", "process"])


def descendants() -> list[psutil.Process]:
    return psutil.Process().children(recursive=True)


def is_alive(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


async def gone(processes: list[psutil.Process], within_s: float = 10) -> list[psutil.Process]:
    deadline = time.monotonic() + within_s
    while True:
        alive = [p for p in processes if is_alive(p)]
        if not alive or time.monotonic() > deadline:
            return alive
        await asyncio.sleep(0.02)


def name(process: psutil.Process) -> str:
    try:
        return process.name()
    except psutil.NoSuchProcess:
        return ""


def folders() -> set[str]:
    return set(glob.glob(os.path.join(tempfile.gettempdir(), "sandbox-*")))


@BACKENDS
async def test_close_leaves_no_process_and_no_file(backend: str) -> None:
    """Sessions in use, idle spares and a call in progress all end with the pool."""
    before, files, fds = set(descendants()), folders(), psutil.Process().num_fds()
    pool = PythonPool(backend, spares=3)
    sessions = await asyncio.gather(*(pool.session() for _ in range(5)))
    call = asyncio.create_task(sessions[0].run("import time; time.sleep(30)"))
    await sessions[1].run("open('file', 'w').write('x')")
    started = [p for p in descendants() if p not in before]
    assert len(started) > 5
    await pool.close()
    assert await gone(started) == []
    assert folders() <= files
    result = await call
    assert result.state_lost
    await pool.close()
    for session in sessions:
        await session.close()
    deadline = time.monotonic() + 10
    while psutil.Process().num_fds() > fds + 1 and time.monotonic() < deadline:  # closed by the loop, soon
        await asyncio.sleep(0.02)
    assert psutil.Process().num_fds() <= fds + 1
    with pytest.raises(SandboxFault, match="closed"):
        await pool.session()


@BACKENDS
async def test_a_closed_session_is_gone_at_once(backend: str) -> None:
    async with PythonPool(backend, spares=0) as pool:
        before, files = set(descendants()), folders()
        inside = set(map(len, map(os.listdir, files)))
        session = await pool.session()
        await session.run("import threading, time\nthreading.Thread(target=time.sleep, args=(60,)).start()")
        started = [p for p in descendants() if p not in before]
        assert started
        await session.close()
        assert await gone(started) == []
        deadline = time.monotonic() + 10
        while set(map(len, map(os.listdir, files))) != inside and time.monotonic() < deadline:
            await asyncio.sleep(0.02)
        assert set(map(len, map(os.listdir, files))) == inside


CALLER = """
import asyncio, sys
from sandboxes.pool import PythonPool
async def main():
    pool = PythonPool(sys.argv[1], spares=2)
    sessions = await asyncio.gather(*(pool.session() for _ in range(4)))
    cell = "import os, time\\nos.system('setsid sleep 300 &')\\ntime.sleep(300)"
    calls = [asyncio.create_task(s.run(cell, timeout_s=300)) for s in sessions[:2]]
    await sessions[2].run("open('file', 'w').write('x')")
    print("up", flush=True)
    await asyncio.gather(*calls)
asyncio.run(main())
"""


@BACKENDS
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
async def test_nothing_survives_the_death_of_the_caller(backend: str, number: int) -> None:
    """SIGKILL leaves the caller no chance to clean up; the zygote and the kernel do it."""
    files = folders()
    caller = await asyncio.create_subprocess_exec(
        sys.executable, "-c", CALLER, backend, stdout=asyncio.subprocess.PIPE, cwd=ROOT
    )
    try:
        assert caller.stdout is not None
        assert await asyncio.wait_for(caller.stdout.readline(), 30) == b"up\n"
        deadline = time.monotonic() + 20
        below: list[psutil.Process] = []
        while sum(name(p) == "sleep" for p in below) < 2 and time.monotonic() < deadline:
            below = psutil.Process(caller.pid).children(recursive=True)
            await asyncio.sleep(0.02)
        assert sum(name(p) == "sleep" for p in below) == 2, below
        caller.send_signal(number)
        assert await gone(below) == []
    finally:
        if caller.returncode is None:
            caller.kill()
        await caller.communicate()
    deadline = time.monotonic() + 5
    while folders() - files and time.monotonic() < deadline:
        await asyncio.sleep(0.02)
    assert folders() - files == set()


@BACKENDS
async def test_a_dead_zygote_is_replaced(backend: str) -> None:
    """The out-of-memory killer may take the zygote: what dies with it says so, and the pool starts another."""
    files, others = folders(), descendants()  # of other tests that ran in this process
    async with PythonPool(backend, spares=1) as pool:
        session = await pool.session()
        await session.run("x = 1")
        before = [process for process in descendants() if process not in others]
        children = [p for p in psutil.Process().children() if p not in others]
        zygotes = [p for p in children if any("inside.zygote" in part for part in p.cmdline())]
        assert len(zygotes) == 1
        zygotes[0].kill()
        assert await gone(zygotes) == []
        if backend == "bubblewrap":  # everything dies with its process 1
            assert await gone(before) == []
            assert (await session.run("x")).state_lost
            assert "NameError" in (await session.run("x")).output
        three = await asyncio.gather(*(pool.session() for _ in range(3)))
        results = await asyncio.gather(*(one.run("6 * 7") for one in three))
        assert [result.output for result in results] == ["42\n"] * 3
    assert await gone(before) == []
    assert folders() <= files


@BACKENDS
async def test_a_cancelled_call_ends_its_processes_and_the_next_one_tells(backend: str) -> None:
    async with PythonPool(backend, spares=1) as pool:
        session = await pool.session()
        await session.run("x = 1")
        before = set(descendants())
        call = asyncio.create_task(session.run("import os\nos.system('sleep 77')"))
        while not (sleeping := [p for p in descendants() if p not in before and name(p) == "sleep"]):
            await asyncio.sleep(0.02)
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        assert await gone(sleeping) == []
        result = await session.run("1")
        assert result.state_lost
        assert "cancelled" in result.output
        assert not (await session.run("1")).state_lost


def zygotes_anywhere(marker: str) -> list[psutil.Process]:
    """All processes that were started by this test run for `marker`, orphans too."""
    found = []
    for process in psutil.process_iter(["cmdline"]):
        if any(marker in part for part in process.info["cmdline"] or []) and is_alive(process):
            found.append(process)
    return found


@BACKENDS
async def test_a_cancelled_start_leaves_nothing(backend: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Cancellation while the zygote comes up, and while a fork is on its way; orphans would have lost their parent."""
    packages = tmp_path / "site-packages"  # a path that is on the command line of the zygotes of this test only
    packages.mkdir()
    monkeypatch.setattr(sys, "path", [*sys.path, str(packages)])
    for delay in (0.0, 0.0, 0.001, 0.002, 0.003, 0.005, 0.01, 0.03, 0.1):
        pool = PythonPool(backend, spares=2)
        starting = asyncio.create_task(pool.session())
        await asyncio.sleep(delay)
        starting.cancel()
        await asyncio.wait([starting])
        await pool.close()
    assert await gone(zygotes_anywhere(str(packages))) == []


@BACKENDS
async def test_a_caller_killed_while_the_zygote_starts_leaves_nothing(backend: str, tmp_path: Path) -> None:
    """SIGKILL at any moment of the start."""
    packages = tmp_path / "site-packages"
    packages.mkdir()
    for delay in (0.0, 0.003, 0.006, 0.01, 0.02, 0.05):
        caller = await asyncio.create_subprocess_exec(
            sys.executable, "-c", STARTER, backend, str(packages), stdout=asyncio.subprocess.PIPE, cwd=ROOT
        )
        assert caller.stdout is not None
        assert await asyncio.wait_for(caller.stdout.readline(), 30) == b"starting\n"
        await asyncio.sleep(delay)
        caller.kill()
        await caller.communicate()
    assert await gone(zygotes_anywhere(str(packages)), 10) == []


STARTER = """
import asyncio, sys
from sandboxes.pool import PythonPool
from sandboxes.backends import launcher_of
from sandboxes.zygote import Zygote
sys.path.append(sys.argv[2])
async def main():
    zygote = Zygote(launcher_of(sys.argv[1]), preload=True)
    print("starting", flush=True)
    await zygote.start()
    await asyncio.sleep(60)
asyncio.run(main())
"""


@BACKENDS
async def test_a_fork_of_the_caller_does_not_keep_the_sandboxes_alive(backend: str) -> None:
    """A child that was forked holds copies of the sockets; the zygote watches the caller itself."""
    caller = await asyncio.create_subprocess_exec(
        sys.executable, "-c", FORKER, backend, stdout=asyncio.subprocess.PIPE, cwd=ROOT
    )
    assert caller.stdout is not None
    fork = psutil.Process(int(await asyncio.wait_for(caller.stdout.readline(), 30)))
    below = [p for p in psutil.Process(caller.pid).children(recursive=True) if p != fork]
    assert len(below) >= 3
    caller.kill()
    try:
        assert await gone(below) == []
        assert is_alive(fork)
    finally:
        fork.kill()
        await caller.communicate()


FORKER = """
import asyncio, os, sys, time
from sandboxes.pool import PythonPool
async def main():
    pool = PythonPool(sys.argv[1], spares=1)
    session = await pool.session()
    pid = os.fork()
    if pid == 0:
        time.sleep(60)
        os._exit(0)
    print(pid, flush=True)
    await asyncio.sleep(60)
asyncio.run(main())
"""


async def test_calls_of_one_session_queue_and_of_many_do_not() -> None:
    async with PythonPool("bubblewrap", Limits(wall_clock_s=10), spares=4) as pool:
        one = await pool.session()
        await one.run("log = []")
        await asyncio.gather(*(one.run(f"log.append({i})") for i in range(20)))
        assert (await one.run("log")).output == f"{list(range(20))}\n"
        many = await asyncio.gather(*(pool.session() for _ in range(20)))
        begun = time.monotonic()
        results = await asyncio.gather(*(session.run("import time; time.sleep(0.5)") for session in many))
        assert time.monotonic() - begun < 5
        assert all(result.status == "ok" for result in results)


async def test_the_event_loop_is_not_blocked() -> None:
    """A hundred calls at once, floods among them, and the loop still turns."""
    longest, last = 0.0, time.perf_counter()

    async def beat() -> None:
        nonlocal longest, last
        while True:
            await asyncio.sleep(0.005)
            now = time.perf_counter()
            longest, last = max(longest, now - last), now

    async with PythonPool("bubblewrap", spares=8) as pool:
        sessions = await asyncio.gather(*(pool.session() for _ in range(8)))
        beating = asyncio.create_task(beat())
        await asyncio.gather(*(s.run("for _ in range(2000): print('x' * 5000)") for s in sessions))
        beating.cancel()
    assert longest < 1.0


@pytest.mark.skipif(os.geteuid() != 0 or shutil.which("setpriv") is None, reason="needs root, to become somebody else")
@BACKENDS
async def test_a_caller_that_is_not_root_can_use_it(backend: str, tmp_path: Path) -> None:
    """The same limits hold for an ordinary user: a fork bomb is contained, the supervisor is out of reach."""
    python = "/usr/bin/python3"
    recent = [python, "-c", "import sys; sys.exit(sys.version_info < (3, 11))"]
    if shutil.which(python) is None or (await asyncio.to_thread(subprocess.run, recent, check=False)).returncode:
        pytest.skip("no system Python of 3.11 or later")
    with tempfile.TemporaryDirectory(prefix="user-") as folder:
        shutil.copytree(ROOT / "sandboxes", Path(folder) / "sandboxes")
        (Path(folder) / "caller.py").write_text(USER)
        os.chmod(folder, 0o755)
        command = ["setpriv", "--reuid=54321", "--regid=54321", "--clear-groups", python, "caller.py", backend]
        done = await asyncio.to_thread(
            subprocess.run, command, cwd=folder, capture_output=True, text=True, timeout=60, check=False
        )
    assert done.stdout.splitlines()[-1:] == ["fine"], done


USER = """
import asyncio, sys
from sandboxes.base import Limits
from sandboxes.pool import PythonPool
async def main():
    async with PythonPool(sys.argv[1], Limits(processes=8)) as pool:
        s = await pool.session()
        assert (await s.run("x = 6\\nx * 7")).output == "42\\n"
        bomb = "try:\\n    while n < 500:\\n        if os.fork() == 0: time.sleep(9)\\n        n += 1\\n"
        bomb = f"import os, time\\nn = 0\\n{bomb}except OSError: pass\\nn < 500"
        result = await s.run(bomb, timeout_s=5)
        assert result.output == "True\\n" or result.state_lost, result
        assert (await s.run("1")).output == "1\\n"
        assert (await s.run("while True: pass", timeout_s=0.3)).status == "timeout"
        assert (await s.run("import os; os._exit(3)")).status == "died"
        assert (await s.run("import os; os.kill(os.getppid(), 9)")).status in ("ok", "died")
        if pool.backend == "bubblewrap":
            assert (await s.run("open('/proc/1/mem', 'rb')")).status == "error"
            assert (await s.run("open('/dev/x', 'w')")).status == "error"
        assert (await s.run("1")).output == "1\\n"
    print("fine")
asyncio.run(main())
"""
