"""What commands in a container may do to their sandbox, and what they cannot. Cases F5, F6, and C for time limits."""

from __future__ import annotations

import asyncio
import dataclasses
import io
import tarfile
import time

import pytest

from sandboxes.base import Limits, SandboxFault
from sandboxes.docker.engine import DockerEngine
from sandboxes.docker.sandbox import DockerSandbox
from sandboxes.docker.settings import DockerSettings

pytestmark = [pytest.mark.docker, pytest.mark.xdist_group("docker")]

LONG = Limits(wall_clock_s=60)
SOON = Limits(wall_clock_s=2)
# Where the command must have said something by then: on a busy machine an exec takes a second or two to begin.
LATER = Limits(wall_clock_s=10)


async def processes(sandbox: DockerSandbox) -> list[str]:
    """Command lines of all processes in the container, as the engine sees them."""
    top = await sandbox.engine.call(lambda: sandbox.engine.client.api.top(sandbox.id, "-o pid,args"))
    return [" ".join(row[1:]) for row in top["Processes"]]


async def only_the_init(sandbox: DockerSandbox) -> bool:
    """Whether nothing but the init runs; waits for the dead to be reaped."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        left = await processes(sandbox)
        if left == ["sleep 600"]:
            return True
        await asyncio.sleep(0.1)
    raise AssertionError(left)


async def test_streams_exit_codes_and_stdin(sandbox: DockerSandbox) -> None:
    result = await sandbox.run(["sh", "-c", "echo out; echo err >&2; exit 3"], limits=LONG)
    assert (result.exit_code, result.stdout, result.stderr, result.timed_out) == (3, "out\n", "err\n", False)
    assert (await sandbox.run(["cat"], stdin=b"a\0\xff" * 10**5, limits=LONG)).omitted_bytes > 0
    assert (await sandbox.run(["true"], stdin=b"x" * 10**7, limits=LONG)).exit_code == 0
    assert (await sandbox.run(["cat"], limits=LONG)).stdout == ""
    assert (await sandbox.run(["no-such-command"], limits=LONG)).exit_code == 127
    assert (await sandbox.run(["/etc"], limits=LONG)).exit_code == 126
    assert (await sandbox.run(["pwd"], cwd="/no/such", limits=LONG)).exit_code == 126
    shown = await sandbox.run(["sh", "-c", 'pwd; echo "$A"'], cwd="/usr/bin", env={"A": "1 '2\" $3\n4"}, limits=LONG)
    assert shown.stdout == "/usr/bin\n1 '2\" $3\n4\n"
    assert (await sandbox.run(["printf", "%s|", "a b", "", "$HOME", "é"], limits=LONG)).stdout == "a b||$HOME|é|"
    for argv in ([], ["a\0b"]):
        with pytest.raises(ValueError, match="argv"):
            await sandbox.run(argv)


async def test_a_run_past_its_limit_leaves_no_process(sandbox: DockerSandbox) -> None:
    """Case F5, and C: the limit of the policy's own command is a result, not a fault."""
    hard = "trap '' TERM INT HUP; echo begun; while :; do sleep 1; done"
    result = await sandbox.run(["sh", "-c", hard], limits=LATER)
    assert result.timed_out
    assert result.exit_code is None
    assert result.stdout == "begun\n"
    assert await only_the_init(sandbox)
    assert (await sandbox.run(["echo", "next"], limits=LONG)).stdout == "next\n"


HIDING = """
import os, sys, time
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        os.execvpe("sleep", ["sleep", "500"], {})      # no mark in its environment, no parent, a session of its own
    os._exit(0)
print("parent", flush=True)
time.sleep(float(sys.argv[1]))
"""


@pytest.mark.parametrize("parent_s", [0, 500])
async def test_a_grandchild_that_hides_and_holds_the_pipe_neither_stalls_nor_stays(
    sandbox: DockerSandbox, parent_s: int
) -> None:
    """Case F5: a double fork with setsid and an empty environment, at the normal end of a run and at its limit."""
    limits = LATER if parent_s else LONG
    begun = time.monotonic()
    result = await sandbox.run(["python3", "-c", HIDING, str(parent_s)], limits=limits)
    assert result.timed_out == bool(parent_s)
    assert result.stdout == "parent\n"
    assert time.monotonic() - begun < 45
    assert await only_the_init(sandbox)


async def test_a_cancelled_run_leaves_no_process(sandbox: DockerSandbox) -> None:
    """Case F5: whoever waited for the command is gone, and so is the command."""
    run = asyncio.create_task(sandbox.run(["sh", "-c", "touch /tmp/begun; sleep 500"], limits=LONG))
    while True:
        try:
            await sandbox.get("/tmp/begun")
            break
        except FileNotFoundError:
            await asyncio.sleep(0.05)
    run.cancel()
    with pytest.raises(asyncio.CancelledError):
        await run
    assert await only_the_init(sandbox)
    assert (await sandbox.run(["echo", "next"], limits=LONG)).stdout == "next\n"


async def test_a_fork_bomb_is_contained_and_ended(sandbox: DockerSandbox) -> None:
    """Cases F5, F6: the limit on processes holds, and though the container is full the bomb is killed; files stay."""
    await sandbox.put("/tmp/kept", b"kept")
    bomb = "import os, time\nwhile True:\n    try:\n        os.fork()\n    except OSError:\n        pass\n"
    result = await sandbox.run(["python3", "-c", bomb], limits=SOON)
    assert result.timed_out
    assert await only_the_init(sandbox)
    assert await sandbox.get("/tmp/kept") == b"kept"
    assert (await sandbox.run(["echo", "next"], limits=LONG)).stdout == "next\n"


async def test_a_memory_bomb_is_told_as_one(sandbox: DockerSandbox) -> None:
    """Case F6: not a bare 137; and a command that kills itself is not told as one."""
    result = await sandbox.run(["python3", "-c", "x = []\nwhile True: x.append(bytearray(2**22))"], limits=LONG)
    assert result.exit_code == 137
    assert result.stderr.endswith("[killed: over the memory limit]\n")
    below = "python3 -c 'x = bytearray(2**40 >> 10)\nfor i in range(2**8): x += bytes(2**22)'; echo code $?"
    result = await sandbox.run(["sh", "-c", below], limits=LONG)
    assert "[killed: over the memory limit]" in result.stderr
    result = await sandbox.run(["sh", "-c", "kill -9 $$"], limits=LONG)
    assert result.exit_code == 137
    assert "memory" not in result.stderr


async def test_ten_megabytes_of_output_are_cut_while_read(sandbox: DockerSandbox) -> None:
    flood = "echo first; yes é | head -c 9999999; echo; yes e | head -c 10000000 >&2; echo last"
    result = await sandbox.run(["sh", "-c", flood], limits=Limits(wall_clock_s=100, output_bytes=1000))
    assert result.stdout.startswith("first\n")
    assert result.stdout.endswith("last\n")
    assert "bytes of output cut here" in result.stdout
    assert len(result.stdout.encode()) < 1100
    assert len(result.stderr.encode()) < 1100
    assert 19_990_000 < result.omitted_bytes < 20_000_100
    assert "\ufffd" not in result.stdout


async def test_endless_output_ends_at_the_limit(sandbox: DockerSandbox) -> None:
    result = await sandbox.run(["yes"], limits=LATER)
    assert result.timed_out
    assert result.omitted_bytes > 0
    assert await only_the_init(sandbox)


async def test_commands_cannot_end_their_own_container(sandbox: DockerSandbox) -> None:
    """Case F6: the init cannot be killed from within, and no command can become another user."""
    result = await sandbox.run(["sh", "-c", "kill -9 -1; echo still here"], limits=LONG)
    assert result.stdout == "still here\n"
    result = await sandbox.run(["sh", "-c", "kill -9 1; kill -TERM 1; kill -INT 1; kill -9 $PPID"], limits=LONG)
    assert result.exit_code == 137
    become = "import os\nos.setuid(5)"
    assert "Operation not permitted" in (await sandbox.run(["python3", "-c", become], limits=LONG)).stderr
    assert (await sandbox.run(["echo", "next"], limits=LONG)).stdout == "next\n"


async def test_the_container_is_closed_in(sandbox: DockerSandbox) -> None:
    """Case F6: what the engine was told, and what a command inside sees of it."""
    about = await sandbox.engine.call(lambda: sandbox.engine.client.api.inspect_container(sandbox.id))
    config = about["HostConfig"]
    assert config["NetworkMode"] == "none"
    assert config["Memory"] == config["MemorySwap"] == 256 * 2**20
    assert config["PidsLimit"] == 64
    assert config["NanoCpus"] == 10**9
    assert config["CapDrop"] == ["ALL"]
    assert sorted(config["CapAdd"]) == ["CHOWN", "DAC_OVERRIDE", "FOWNER"]
    assert config["SecurityOpt"] == ["no-new-privileges"]
    assert config["AutoRemove"] is True
    assert not config["Privileged"]
    assert not config["Binds"]
    status = (await sandbox.run(["cat", "/proc/self/status"], limits=LONG)).stdout
    lines = dict(line.split(":\t", 1) for line in status.splitlines() if ":\t" in line)
    allowed = 1 << 0 | 1 << 1 | 1 << 3
    assert int(lines["CapBnd"], 16) == int(lines["CapEff"], 16) == allowed
    assert lines["NoNewPrivs"] == "1"
    assert lines["Seccomp"] == "2"
    interfaces = (await sandbox.run(["cat", "/proc/net/dev"], limits=LONG)).stdout
    assert [line.split(":")[0].strip() for line in interfaces.splitlines()[2:]] == ["lo"]
    assert (await sandbox.run(["sh", "-c", "mount -t tmpfs none /mnt"], limits=LONG)).exit_code != 0


async def test_the_init_reaps_orphans(sandbox: DockerSandbox) -> None:
    """Case F6: an orphan that ends is no zombie."""
    orphans = "for i in 1 2 3 4 5; do (sleep 0.1 &) ; done; sleep 1; grep -l '^State:.Z' /proc/[0-9]*/status"
    result = await sandbox.run(["sh", "-c", orphans], limits=LONG)
    assert result.stdout == ""


async def test_background_processes_stay_if_asked_to(sandbox: DockerSandbox) -> None:
    serve = "sleep 400 >/dev/null 2>&1 & echo started"
    assert (await sandbox.run(["sh", "-c", serve], limits=LONG, background=True)).stdout == "started\n"
    assert any("sleep 400" in line for line in await processes(sandbox))
    await sandbox.put("/tmp/new/folder/file", b"")
    late = await sandbox.run(["python3", "-c", HIDING, "500"], limits=SOON, background=True)
    assert late.timed_out
    assert not any("sleep 500" in line for line in await processes(sandbox))
    assert any("sleep 400" in line for line in await processes(sandbox))
    await sandbox.run(["true"], limits=LONG)
    assert await only_the_init(sandbox)


async def test_an_open_shell_lives_beside_runs_and_their_ends(sandbox: DockerSandbox) -> None:
    """A run's end and a run's limit kill what is theirs and leave the shell; the shell's end takes all below it."""
    shell = await sandbox.open(["sh"], cwd="/tmp")
    heard, more = bytearray(), asyncio.Event()

    def hear(_: int, data: bytes) -> None:
        heard.extend(data)
        more.set()

    reading = asyncio.create_task(shell.stream.frames(hear))

    async def say(text: str, answer: bytes) -> None:
        await shell.stream.write(text.encode())
        async with asyncio.timeout(30):
            while answer not in heard:
                more.clear()
                await more.wait()

    await say("x=41; sleep 300 & pwd\n", b"/tmp\n")
    assert (await sandbox.run(["python3", "-c", HIDING, "500"], limits=SOON)).timed_out
    await sandbox.run(["sh", "-c", "setsid sleep 200 & true"], limits=LONG)
    left = await processes(sandbox)
    assert any("sleep 300" in line for line in left)
    assert not any("sleep 200" in line or "sleep 500" in line for line in left)
    await say("echo $((x + 1))\n", b"42\n")
    await sandbox.end(shell)
    await reading
    assert await only_the_init(sandbox)


async def test_files_go_in_and_out_as_they_are(sandbox: DockerSandbox) -> None:
    data = bytes(range(256)) * 2**16
    await sandbox.put("/code/a b/é/x.bin", data, mode=0o750)
    assert await sandbox.get("/code/a b/é/x.bin") == data
    assert (await sandbox.run(["stat", "-c", "%a %u", "/code/a b/é/x.bin"], limits=LONG)).stdout == "750 0\n"
    await sandbox.put("/code/a b/é/x.bin", b"")
    assert await sandbox.get("/code/a b/é/x.bin") == b""
    await sandbox.run(["ln", "-s", "a b/é/x.bin", "/code/link"], limits=LONG)
    assert await sandbox.get("/code/link") == b""
    await sandbox.run(["sh", "-c", "ln -s loop /code/loop; mkfifo /code/pipe"], limits=LONG)
    with pytest.raises(FileNotFoundError):
        await sandbox.get("/code/none")
    with pytest.raises(IsADirectoryError):
        await sandbox.get("/code")
    with pytest.raises(IsADirectoryError):
        await sandbox.put("/code", b"x")
    for path in ("/code/loop", "/code/pipe", "/code/link/below"):
        with pytest.raises(OSError, match="code"):
            await sandbox.get(path)
    with pytest.raises(OSError, match="code"):
        await sandbox.put("/code/link/below/file", b"x")


async def test_archives_go_in_and_out(sandbox: DockerSandbox) -> None:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        for name, mode in (("one", 0o600), ("run.sh", 0o755)):
            entry = tarfile.TarInfo(name)
            entry.size, entry.mode = 3, mode
            archive.addfile(entry, io.BytesIO(b"abc"))
    with pytest.raises(FileNotFoundError):
        await sandbox.put_archive("/nowhere", buffer.getvalue())
    await sandbox.put_archive("/opt", buffer.getvalue())
    with tarfile.open(fileobj=io.BytesIO(await sandbox.get_archive("/opt"))) as archive:
        modes = {entry.name: entry.mode & 0o7777 for entry in archive if entry.isreg()}
    assert modes == {"opt/one": 0o600, "opt/run.sh": 0o755}


async def test_another_user_owns_what_is_put_for_it(
    docker_image: str, docker_engine: DockerEngine, small: DockerSettings
) -> None:
    settings = dataclasses.replace(small, user="games", workdir="/tmp")
    async with DockerSandbox(docker_image, settings=settings, engine=docker_engine) as sandbox:
        await sandbox.put("mine", b"x")
        result = await sandbox.run(["sh", "-c", "stat -c '%U %n' mine; id -un; setsid sleep 99 & true"], limits=LONG)
        assert result.stdout == "games mine\ngames\n"
        assert await only_the_init(sandbox)


async def test_states_are_kept(docker_image: str, docker_engine: DockerEngine, small: DockerSettings) -> None:
    sandbox = DockerSandbox(docker_image, settings=small, engine=docker_engine)
    with pytest.raises(SandboxFault, match="not running"):
        await sandbox.run(["true"])
    await sandbox.close()
    other = DockerSandbox(docker_image, settings=small, engine=docker_engine)
    await other.start()
    with pytest.raises(SandboxFault, match="started before"):
        await other.start()
    await other.close()
    await other.close()
    with pytest.raises(SandboxFault, match="not running"):
        await other.run(["true"])
