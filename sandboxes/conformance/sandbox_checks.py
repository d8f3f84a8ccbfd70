"""Checks of `Sandbox`: what every backend promises, and what is only asked of one that promises it."""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import sys
import tempfile
from collections.abc import Awaitable
from dataclasses import replace

from sandboxes.base import Limits, Sandbox, SandboxFault
from sandboxes.conformance.check import LIMITS, Check, Make, check, expect, started

SANDBOX_CHECKS: list[Check[Sandbox]] = []

# Goes on writing to the file `beat`; whoever reads that twice sees whether it still lives.
BEAT = "while :; do echo beat >> beat; sleep 0.05; done"
WAIT = "until [ -s beat ]; do sleep 0.05; done; echo begun"
QUIET_S = 0.5


async def _faults(work: Awaitable[object]) -> bool:
    try:
        await work
    except SandboxFault:
        return True
    return False


async def _still(sandbox: Sandbox) -> bool:
    """Whether nothing writes to `beat` any more."""
    before = await sandbox.get("beat")
    await asyncio.sleep(QUIET_S)
    return await sandbox.get("beat") == before


# commands


@check(SANDBOX_CHECKS)
async def output_and_exit_code_come_back(make: Make[Sandbox]) -> None:
    """Each stream comes back by itself, with the exit code."""
    async with started(make) as sandbox:
        result = await sandbox.run(["sh", "-c", "echo out; echo err >&2; exit 3"])
        expect((result.exit_code, result.stdout, result.stderr) == (3, "out\n", "err\n"), result)
        expect(not result.timed_out and result.omitted_bytes == 0 and result.duration_s > 0, result)


@check(SANDBOX_CHECKS)
async def arguments_arrive_as_they_are(make: Make[Sandbox]) -> None:
    """No shell reads the arguments."""
    async with started(make) as sandbox:
        result = await sandbox.run(["printf", "%s|", "a b", "", "$HOME", "é", "'\"\n*"])
        expect(result.stdout == "a b||$HOME|é|'\"\n*|", result)


@check(SANDBOX_CHECKS)
async def environment_is_added(make: Make[Sandbox]) -> None:
    """Variables of a run are there, as they are, beside the sandbox's own, and are gone in the next."""
    async with started(make) as sandbox:
        result = await sandbox.run(["sh", "-c", 'echo "$WORD"; test -n "$PATH"'], env={"WORD": "1 '2\" $3\n4"})
        expect((result.exit_code, result.stdout) == (0, "1 '2\" $3\n4\n"), result)
        result = await sandbox.run(["sh", "-c", 'echo "$WORD"'])
        expect(result.stdout == "\n", result)


@check(SANDBOX_CHECKS)
async def input_arrives_whole(make: Make[Sandbox]) -> None:
    """Standard input arrives byte for byte, and ends."""
    data = bytes(range(256)) * 2000
    async with started(make) as sandbox:
        result = await sandbox.run(["sh", "-c", "cat > data; wc -c < data"], stdin=data)
        expect(result.stdout.strip() == str(len(data)), result)
        expect(await sandbox.get("data") == data, "the bytes are others")


@check(SANDBOX_CHECKS)
async def no_input_is_an_empty_one(make: Make[Sandbox]) -> None:
    """A command that reads without having been given anything does not wait."""
    async with started(make) as sandbox:
        result = await sandbox.run(["cat"])
        expect((result.exit_code, result.stdout) == (0, ""), result)


@check(SANDBOX_CHECKS)
async def input_that_nobody_reads_is_no_fault(make: Make[Sandbox]) -> None:
    """A command may end without reading its input."""
    async with started(make) as sandbox:
        result = await sandbox.run(["true"], stdin=bytes(10**6))
        expect(result.exit_code == 0, result)


@check(SANDBOX_CHECKS)
async def a_signal_is_told(make: Make[Sandbox]) -> None:
    """A command that a signal killed has exit code -n or 128+n."""
    async with started(make) as sandbox:
        result = await sandbox.run(["sh", "-c", "kill -9 $$"])
        expect(result.exit_code in (-9, 137) and not result.timed_out, result)


@check(SANDBOX_CHECKS)
async def a_missing_command_is_its_own_fault(make: Make[Sandbox]) -> None:
    """A command that is not there is a result, 127, and says so."""
    async with started(make) as sandbox:
        result = await sandbox.run(["no-such-command"])
        expect(result.exit_code == 127 and result.stderr != "", result)
        expect((await sandbox.run(["echo", "next"])).stdout == "next\n", "the next run failed")


@check(SANDBOX_CHECKS)
async def an_impossible_command_is_a_mistake(make: Make[Sandbox]) -> None:
    """An empty command, and a NUL byte in one or in a variable, are a `ValueError`."""
    async with started(make) as sandbox:
        for argv, env in (([], None), (["a\0b"], None), (["true"], {"A": "\0"}), (["true"], {"A\0": ""})):
            try:
                await sandbox.run(argv, env=env)
            except ValueError:
                continue
            expect(False, f"{argv} with {env} was run")


@check(SANDBOX_CHECKS)
async def runs_wait_for_each_other(make: Make[Sandbox]) -> None:
    """Calls at the same time all come to their end, one after the other."""
    step = 'mkdir only && sleep 0.1 && rmdir only && echo "$1"'
    async with started(make) as sandbox:
        results = await asyncio.gather(*(sandbox.run(["sh", "-c", step, "sh", str(n)]) for n in range(3)))
        expect([result.stdout for result in results] == ["0\n", "1\n", "2\n"], results)


# output


@check(SANDBOX_CHECKS)
async def output_is_cut_told_and_counted(make: Make[Sandbox]) -> None:
    """Head and tail of too long output stay, the cut is announced in the text, and counted; the command goes on."""
    flood = "echo first; yes é | head -c 5000001; echo; echo last; echo short >&2"
    async with started(make) as sandbox:
        result = await sandbox.run(["sh", "-c", flood])
        expect(result.exit_code == 0, result.exit_code)
        head, _, tail = result.stdout.partition(f"[... {result.omitted_bytes} bytes of output cut here ...]")
        expect(head.startswith("first\n") and tail.endswith("last\n"), result.stdout[:200] + result.stdout[-200:])
        expect(len(result.stdout.encode()) < LIMITS.output_bytes + 100, len(result.stdout.encode()))
        expect(5_000_013 - LIMITS.output_bytes <= result.omitted_bytes < 5_000_020, result.omitted_bytes)
        expect(result.stderr == "short\n", result.stderr)
        short = await sandbox.run(["sh", "-c", "yes | head -c 10000"], limits=replace(LIMITS, output_bytes=100))
        expect(len(short.stdout.encode()) < 200 and short.omitted_bytes >= 9900, short)


@check(SANDBOX_CHECKS)
async def broken_text_is_replaced(make: Make[Sandbox]) -> None:
    """Output that is no UTF-8 comes back with replacement characters."""
    async with started(make) as sandbox:
        result = await sandbox.run(["printf", r"\377\303\251"])
        expect(result.stdout == "\ufffdé", result)


# the end of a run


@check(SANDBOX_CHECKS)
async def the_wall_clock_ends_a_run(make: Make[Sandbox]) -> None:
    """A run past its time is a result: no exit code, the output until then, and nothing of it is left."""
    hard = f"trap '' TERM INT HUP; ({BEAT}) & setsid sh -c '{BEAT}' & {WAIT}; while :; do sleep 1; done"
    async with started(make) as sandbox:
        result = await sandbox.run(["sh", "-c", hard], limits=replace(LIMITS, wall_clock_s=3))
        expect(result.timed_out and result.exit_code is None, result)
        expect(result.stdout == "begun\n" and 3 <= result.duration_s < 30, result)
        expect(await _still(sandbox), "a process of the run has gone on")
        expect((await sandbox.run(["echo", "next"])).stdout == "next\n", "the next run failed")


@check(SANDBOX_CHECKS)
async def nothing_outlives_its_run(make: Make[Sandbox]) -> None:
    """A command that ends takes along what it left behind, whatever its session, and does not wait for it."""
    async with started(make) as sandbox:
        for behind in (f"({BEAT}) &", f"setsid sh -c '{BEAT}' &", f"(setsid nohup sh -c '{BEAT}' &) ;"):
            result = await sandbox.run(["sh", "-c", f"rm -f beat; {behind} {WAIT}"])
            expect((result.exit_code, result.stdout, result.timed_out) == (0, "begun\n", False), result)
            expect(await _still(sandbox), f"{behind!r} has gone on")


@check(SANDBOX_CHECKS)
async def a_cancelled_run_hangs_nobody(make: Make[Sandbox]) -> None:
    """After a cancelled run the sandbox either goes on, without what the run started, or says that it is lost."""
    async with started(make) as sandbox:
        run = asyncio.create_task(sandbox.run(["sh", "-c", BEAT]))
        await asyncio.sleep(1)
        run.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await run
        expect(run.cancelled(), "the cancellation was swallowed")
        with contextlib.suppress(SandboxFault, FileNotFoundError):
            expect(await _still(sandbox), "the cancelled run has gone on")


# files


@check(SANDBOX_CHECKS)
async def files_go_in_and_out_as_they_are(make: Make[Sandbox]) -> None:
    """Bytes come back as they were put, folders are made, relative paths are those of commands, and files stay."""
    data = bytes(range(256)) * 1000
    async with started(make) as sandbox:
        await sandbox.put("some/new folder/é", data)
        expect(await sandbox.get("some/new folder/é") == data, "the bytes are others")
        counted = await sandbox.run(["sh", "-c", "wc -c < 'some/new folder/é'; echo made > made"])
        expect(counted.stdout.strip() == str(len(data)), counted)
        expect(await sandbox.get("made") == b"made\n", "what a run wrote is not there")
        await sandbox.put("some/new folder/é", b"")
        expect(await sandbox.get("some/new folder/é") == b"", "the file was not replaced")
        folder = (await sandbox.run(["pwd"])).stdout.strip()
        expect(await sandbox.get(f"{folder}/made") == b"made\n", "an absolute path leads elsewhere")


@check(SANDBOX_CHECKS)
async def links_are_followed(make: Make[Sandbox]) -> None:
    """A symbolic link to a file is the file; links that go round are an `OSError`."""
    async with started(make) as sandbox:
        await sandbox.run(["sh", "-c", "echo text > file; ln -s file link; ln -s loop loop"])
        expect(await sandbox.get("link") == b"text\n", "the link was not followed")
        await _expect_os_error(sandbox.get("loop"), "a loop of links")


@check(SANDBOX_CHECKS)
async def what_is_no_file_is_an_error_at_once(make: Make[Sandbox]) -> None:
    """Nothing, a folder, a pipe, and a folder where a file is to be put are an `OSError`, and nobody waits."""
    async with started(make) as sandbox:
        await sandbox.run(["sh", "-c", "mkdir folder; echo text > file; mkfifo pipe"])
        try:
            await sandbox.get("missing")
        except FileNotFoundError:
            pass
        else:
            expect(False, "a missing file was read")
        await _expect_os_error(sandbox.get("folder"), "a folder that is read")
        await _expect_os_error(sandbox.get("pipe"), "a pipe that is read")
        await _expect_os_error(sandbox.put("folder", b""), "a folder that is written")
        await _expect_os_error(sandbox.put("file/below", b""), "a file as a folder")
        expect(await sandbox.get("file") == b"text\n", "the sandbox does not go on")


async def _expect_os_error(work: Awaitable[object], what: str) -> None:
    try:
        async with asyncio.timeout(30):
            await work
    except TimeoutError:
        expect(False, f"{what} is waited for")
    except OSError:
        return
    expect(False, f"{what} is no error")


# life


@check(SANDBOX_CHECKS)
async def it_is_started_once(make: Make[Sandbox]) -> None:
    """Before its start a sandbox is a fault, a second start is one, and `close` takes any state, twice."""
    new = make(LIMITS)
    for work in (new.run(["true"]), new.put("file", b""), new.get("file")):
        expect(await _faults(work), "a sandbox that was not started does something")
    await new.close()
    await new.close()
    async with started(make) as sandbox:
        expect(await _faults(sandbox.start()), "a sandbox was started twice")
        expect((await sandbox.run(["echo", "on"])).stdout == "on\n", "the second start has harmed it")


@check(SANDBOX_CHECKS)
async def it_is_over_after_close(make: Make[Sandbox]) -> None:
    """After `close` every call is a `SandboxFault`, and so is the one that was under way."""
    async with started(make) as sandbox:
        run = asyncio.create_task(sandbox.run(["sleep", "60"]))
        await asyncio.sleep(1)
        await sandbox.close()
        expect(await _faults(run), "a run outlived its sandbox")
        await sandbox.close()
        for work in (sandbox.run(["true"]), sandbox.put("file", b""), sandbox.get("file"), sandbox.start()):
            expect(await _faults(work), "a closed sandbox does something")


@check(SANDBOX_CHECKS)
async def nothing_is_left_for_the_next(make: Make[Sandbox]) -> None:
    """What a closed sandbox held is not there for one that comes after it."""
    async with started(make) as sandbox:
        await sandbox.put("left behind", b"left behind")
        folder = (await sandbox.run(["pwd"])).stdout.strip()
    async with started(make) as sandbox:
        result = await sandbox.run(["cat", f"{folder}/left behind"])
        expect(result.exit_code != 0 and result.stdout == "", result)


# limits


@check(SANDBOX_CHECKS, needs="limits.cpu_s")
async def cpu_seconds_are_limited(make: Make[Sandbox]) -> None:
    """A command that uses up its seconds of CPU is killed, long before its wall clock."""
    async with started(make) as sandbox:
        result = await sandbox.run(["sh", "-c", "while :; do :; done"], limits=replace(LIMITS, cpu_s=1))
        expect(not result.timed_out and result.exit_code != 0, result)


@check(SANDBOX_CHECKS, needs="limits.memory_bytes")
async def memory_is_limited(make: Make[Sandbox]) -> None:
    """A command cannot have more memory than the limit, and the sandbox lives on."""
    async with started(make) as sandbox:
        result = await sandbox.run(["sh", "-c", "head -c 500000000 /dev/zero | tail -n 1 | wc -c"])
        expect(result.stdout.strip() != "500000000", "a line of 500 MB was held in 128 MiB")
        expect((await sandbox.run(["echo", "next"])).stdout == "next\n", "the next run failed")


@check(SANDBOX_CHECKS, needs="limits.processes")
async def processes_are_limited(make: Make[Sandbox]) -> None:
    """A command cannot have more processes than the limit, all are ended, and the sandbox lives on."""
    many = "n=0; while [ $n -lt 100 ]; do sleep 100 & n=$((n + 1)); done; sleep 1; echo all"
    async with started(make) as sandbox:
        result = await sandbox.run(["sh", "-c", many])
        expect("all" not in result.stdout, "100 processes were started where 32 may be")
        bomb = await sandbox.run(["sh", "-c", "f() { f | f & }; f; sleep 60"], limits=replace(LIMITS, wall_clock_s=2))
        expect(bomb.duration_s < 60, bomb)
        expect((await sandbox.run(["echo", "next"])).stdout == "next\n", "the next run failed")


@check(SANDBOX_CHECKS, needs="limits.file_bytes")
async def files_are_limited(make: Make[Sandbox]) -> None:
    """No file grows beyond the limit, neither by a command nor by `put`."""
    async with started(make) as sandbox:
        result = await sandbox.run(["sh", "-c", "head -c 5000000 /dev/zero > big; wc -c < big"])
        expect(int(result.stdout.split()[-1]) <= LIMITS.file_bytes, result)
        await _expect_os_error(sandbox.put("large", bytes(2 * LIMITS.file_bytes)), "a file beyond the limit")


# isolation


@check(SANDBOX_CHECKS, needs="isolates.network")
async def there_is_no_network(make: Make[Sandbox]) -> None:
    """Inside there is a loopback of its own and nothing else."""
    async with started(make) as sandbox:
        devices = (await sandbox.run(["cat", "/proc/net/dev"])).stdout.splitlines()[2:]
        expect([line.split(":")[0].strip() for line in devices] == ["lo"], devices)


@check(SANDBOX_CHECKS, needs="isolates.files")
async def files_of_the_machine_and_of_others_are_not_there(make: Make[Sandbox]) -> None:
    """Neither a file of this machine that all may read, nor one of another sandbox, can be read inside."""
    secret = secrets.token_hex(16)
    with tempfile.NamedTemporaryFile() as file:
        file.write(secret.encode())
        file.flush()
        os.chmod(file.name, 0o644)
        async with started(make) as one, started(make) as other:
            await one.put("secret", secret.encode())
            folder = (await one.run(["pwd"])).stdout.strip()
            result = await other.run(["cat", file.name, f"{folder}/secret"])
            expect(secret not in result.stdout, "a file of somebody else was read")


@check(SANDBOX_CHECKS, needs="limits.processes")
async def a_full_sandbox_harms_no_other(make: Make[Sandbox]) -> None:
    """One sandbox at its limit of processes leaves another one its own."""
    bomb = "f() { f | f & }; f; sleep 60"
    async with started(make) as one, started(make) as other:
        full = asyncio.create_task(one.run(["sh", "-c", bomb], limits=replace(LIMITS, wall_clock_s=3)))
        await asyncio.sleep(1)
        result = await other.run(["sh", "-c", "echo a | cat"])
        expect(result.stdout == "a\n", result)
        await full


@check(SANDBOX_CHECKS, needs="isolates.processes")
async def processes_of_the_machine_are_not_seen(make: Make[Sandbox]) -> None:
    """No process of this machine is in the list inside."""
    name = secrets.token_hex(16)
    # The last letter in brackets, or the search would find itself.
    search = f"grep -las '{name[:-1]}[{name[-1]}]' /proc/[0-9]*/cmdline"
    code = "import time; time.sleep(100)"
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", code, name)
    try:
        async with started(make) as sandbox:
            result = await sandbox.run(["sh", "-c", search])
            expect(result.stdout == "", result)
    finally:
        process.kill()
        await process.wait()


@check(SANDBOX_CHECKS, needs="isolates.ipc")
async def shared_memory_is_its_own(make: Make[Sandbox]) -> None:
    """What this machine shares in /dev/shm is not there inside."""
    secret = secrets.token_hex(16)
    with tempfile.NamedTemporaryFile(dir="/dev/shm") as file:
        file.write(secret.encode())
        file.flush()
        os.chmod(file.name, 0o644)
        async with started(make) as sandbox:
            result = await sandbox.run(["cat", file.name])
            expect(secret not in result.stdout, "shared memory of this machine was read")


@check(SANDBOX_CHECKS, needs="isolates.user")
async def no_rights_can_be_gained(make: Make[Sandbox]) -> None:
    """No command inside has rights of an administrator, nor gets any from a program that would give them."""
    async with started(make) as sandbox:
        result = await sandbox.run(["grep", "NoNewPrivs", "/proc/self/status"])
        expect(result.stdout.split()[-1:] == ["1"], result)
        result = await sandbox.run(["mount", "-t", "tmpfs", "none", "/mnt"], limits=Limits(wall_clock_s=30))
        expect(result.exit_code != 0, "something was mounted")
