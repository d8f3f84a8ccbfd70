"""The `Sandbox` protocol, on both backends: commands, limits, files, and the end of everything."""

# ruff: noqa: ASYNC110 - a bounded poll is the only way to see another process start

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import psutil
import pytest
import pytest_asyncio

from sandboxes.base import Limits, Sandbox, SandboxFault
from sandboxes.bubblewrap import BubblewrapSandbox
from sandboxes.process import ProcessSandbox
from sandboxes.zygote_sandbox import ZygoteSandbox

pytestmark = pytest.mark.asyncio(loop_scope="module")
LIMITS = Limits(wall_clock_s=15, memory_bytes=256 * 2**20, processes=16, file_bytes=2**20, output_bytes=5000)


@pytest_asyncio.fixture(params=[BubblewrapSandbox, ProcessSandbox], scope="module", loop_scope="module")
async def sandbox(request: pytest.FixtureRequest) -> AsyncIterator[ZygoteSandbox]:
    sandbox: ZygoteSandbox = request.param(LIMITS)
    await sandbox.start()
    yield sandbox
    await sandbox.close()


async def test_a_command_runs_with_its_input_environment_and_exit_code(sandbox: ZygoteSandbox) -> None:
    result = await sandbox.run(["sh", "-c", "cat; echo $GREETING >&2; exit 7"], stdin=b"a\0b", env={"GREETING": "hi"})
    assert (result.exit_code, result.stdout, result.stderr, result.timed_out) == (7, "a\0b", "hi\n", False)
    killed = await sandbox.run(["sh", "-c", "kill -9 $$"])
    assert killed.exit_code == -9


async def test_large_input_arrives_whole(sandbox: ZygoteSandbox) -> None:
    data = bytes(range(256)) * 4000
    result = await sandbox.run(["wc", "-c"], stdin=data)
    assert result.stdout.strip() == str(len(data))


async def test_the_callers_python_runs_inside(sandbox: ZygoteSandbox) -> None:
    result = await sandbox.run([sandbox.interpreter(), "-c", "import wave, psutil; print('runs')"])
    assert result.stdout == "runs\n", result.stderr


async def test_files_go_in_and_out_and_stay_between_runs(sandbox: ZygoteSandbox) -> None:
    await sandbox.put("sub/folder/file", b"\0\xff")
    assert (await sandbox.run(["od", "-An", "-tx1", "sub/folder/file"])).stdout.split() == ["00", "ff"]
    await sandbox.run(["sh", "-c", "echo made > made"])
    assert await sandbox.get("made") == b"made\n"
    with pytest.raises(FileNotFoundError):
        await sandbox.get("missing")
    with pytest.raises(OSError, match="not a regular file"):
        await sandbox.get("sub")
    with pytest.raises(OSError):  # noqa: PT011 - the message is the system's
        await sandbox.put("/usr/no", b"")
    with pytest.raises(OSError):  # noqa: PT011
        await sandbox.put("too large", bytes(2 * 2**20))
    await sandbox.run(["mkfifo", "fifo"])
    with pytest.raises(OSError, match="not a regular file"):
        await asyncio.wait_for(sandbox.get("fifo"), 5)


async def test_a_missing_or_impossible_command_is_the_commands_fault(sandbox: ZygoteSandbox) -> None:
    result = await sandbox.run(["no-such-command"])
    assert result.exit_code == 127
    assert "No such file" in result.stderr
    assert (await sandbox.run(["/tmp"])).exit_code == 127
    with pytest.raises(ValueError, match="NUL"):
        await sandbox.run(["echo", "a\0b"])
    with pytest.raises(ValueError, match="empty"):
        await sandbox.run([])


@pytest.mark.parametrize("command", ["sleep 60", "trap '' 1 2 15; while :; do :; done", "setsid sleep 60 & sleep 60"])
async def test_wall_clock(sandbox: Sandbox, command: str) -> None:
    result = await sandbox.run(["sh", "-c", f"echo before; {command}"], limits=Limits(wall_clock_s=0.4))
    assert result.timed_out
    assert result.exit_code is None
    assert result.stdout == "before\n"
    assert result.duration_s < 5


async def test_a_background_process_neither_stalls_nor_outlives_the_run(sandbox: ZygoteSandbox) -> None:
    """Case E4, for commands."""
    result = await sandbox.run(["sh", "-c", "sleep 61.25 & setsid nohup sleep 61.25 & echo done"])
    assert result.stdout == "done\n"
    assert result.duration_s < 5
    assert not [p for p in psutil.process_iter(["cmdline"]) if "61.25" in (p.info["cmdline"] or [])]


async def test_output_is_capped_a_stream(sandbox: ZygoteSandbox) -> None:
    """Case E4, for commands."""
    script = "echo head; yes | head -c 50000000; echo tail; echo err >&2"
    result = await sandbox.run(["sh", "-c", script])
    assert result.exit_code == 0
    assert result.stdout.startswith("head\n")
    assert result.stdout.endswith("tail\n")
    assert f"[... {result.omitted_bytes} bytes of output cut here ...]" in result.stdout
    assert len(result.stdout) < 5200
    assert result.stderr == "err\n"
    bad = await sandbox.run(["printf", r"\377\303\251"])
    assert bad.stdout == "\ufffdé"


async def test_memory_processes_cpu_and_file_size(sandbox: ZygoteSandbox) -> None:
    memory = await sandbox.run([sandbox.interpreter(), "-c", "x = bytearray(10**9)"])
    assert "MemoryError" in memory.stderr
    files = await sandbox.run(["sh", "-c", "head -c 5000000 /dev/zero > big; wc -c < big"])
    assert int(files.stdout.split()[-1]) <= 2**20
    bomb = await sandbox.run(["sh", "-c", "f() { f | f & }; f; sleep 30"], limits=Limits(wall_clock_s=1, processes=16))
    assert bomb.duration_s < 6
    spin = await sandbox.run(["sh", "-c", "while :; do :; done"], limits=Limits(wall_clock_s=10, cpu_s=0.3))
    assert spin.exit_code == -9
    assert "cpu limit" in spin.stderr
    assert spin.duration_s < 5
    assert (await sandbox.run(["echo", "fine"])).stdout == "fine\n"


async def test_bubblewrap_has_no_network_and_no_view_of_the_machine() -> None:
    async with BubblewrapSandbox(LIMITS) as sandbox:
        devices = await sandbox.run(["cat", "/proc/net/dev"])
        assert [line.split(":")[0].strip() for line in devices.stdout.splitlines()[2:]] == ["lo"]
        assert (await sandbox.run(["ls", "/tmp", "/dev/shm", "/root"])).stdout.split() != []
        assert (await sandbox.run(["sh", "-c", "ls /home /etc/shadow /var"])).exit_code != 0
        assert (await sandbox.run(["touch", "/usr/x"])).exit_code != 0
        processes = (await sandbox.run(["sh", "-c", "echo /proc/[0-9]*"])).stdout.split()
        assert len(processes) == 2


@pytest.mark.parametrize("kind", [BubblewrapSandbox, ProcessSandbox])
async def test_close_in_any_state_any_number_of_times(kind: type[ZygoteSandbox]) -> None:
    before = set(psutil.Process().children(recursive=True))
    never_started = kind()
    await never_started.close()
    with pytest.raises(SandboxFault, match="not running"):
        await never_started.run(["true"])
    sandbox = kind()
    await sandbox.start()
    with pytest.raises(SandboxFault, match="started before"):
        await sandbox.start()
    run = asyncio.create_task(sandbox.run(["sleep", "50"]))
    while not any(p.name() == "sleep" for p in psutil.Process().children(recursive=True)):
        await asyncio.sleep(0.02)
    await sandbox.close()
    await sandbox.close()
    with pytest.raises(SandboxFault):
        await run
    left = [p for p in psutil.Process().children(recursive=True) if p not in before]
    assert [p for p in left if p.status() != psutil.STATUS_ZOMBIE] == []
