"""Checks of what `ContainerSandbox` promises beyond `Sandbox`."""

from __future__ import annotations

import asyncio
import io
import os
import pty
import subprocess
import tarfile
from dataclasses import replace

from sandboxes.base import ContainerSandbox
from sandboxes.conformance.check import LIMITS, Check, Make, check, expect, started
from sandboxes.conformance.sandbox_checks import BEAT, WAIT

CONTAINER_CHECKS: list[Check[ContainerSandbox]] = []

PLACE = "/var/tmp/checked"


def _tar(files: dict[str, tuple[bytes, int]]) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        for name, (data, mode) in files.items():
            entry = tarfile.TarInfo(name)
            entry.size, entry.mode, entry.uid, entry.gid = len(data), mode, 12, 34
            archive.addfile(entry, io.BytesIO(data))
    return buffer.getvalue()


@check(CONTAINER_CHECKS)
async def it_says_what_it_is_made_from(make: Make[ContainerSandbox]) -> None:
    """The image has a name, before the start too."""
    expect(make(LIMITS).image != "", "the image has no name")


@check(CONTAINER_CHECKS)
async def files_go_anywhere_with_their_mode(make: Make[ContainerSandbox]) -> None:
    """`put` writes at any place of the system, with the mode that is asked for."""
    async with started(make) as sandbox:
        for mode in (0o644, 0o750):
            await sandbox.put(f"{PLACE}/{mode}", b"text", mode=mode)
            shown = await sandbox.run(["stat", "-c", "%a", f"{PLACE}/{mode}"])
            expect(shown.stdout == f"{mode:o}\n", shown)
        mine = await sandbox.run(["sh", "-c", f'test "$(stat -c %u {PLACE}/{0o644})" = "$(id -u)"'])
        expect(mine.exit_code == 0, "the file is not the system's own user's")


@check(CONTAINER_CHECKS)
async def commands_run_in_any_folder(make: Make[ContainerSandbox]) -> None:
    """`cwd` is where a command starts; one that is no folder is the command's fault, 126."""
    async with started(make) as sandbox:
        result = await sandbox.run(["pwd"], cwd="/usr/bin")
        expect(result.stdout == "/usr/bin\n", result)
        result = await sandbox.run(["pwd"], cwd="/no/such/folder")
        expect(result.exit_code == 126 and result.stdout == "", result)
        result = await sandbox.run(["/usr"])
        expect(result.exit_code == 126, result)


@check(CONTAINER_CHECKS)
async def commands_run_as_root(make: Make[ContainerSandbox]) -> None:
    """User "0" is root, and may write where nobody else may."""
    async with started(make) as sandbox:
        result = await sandbox.run(["sh", "-c", "id -u; echo text > /usr/written"], user="0")
        expect((result.exit_code, result.stdout) == (0, "0\n"), result)


@check(CONTAINER_CHECKS)
async def background_is_kept_if_asked_for(make: Make[ContainerSandbox]) -> None:
    """`background` keeps what a run left, through further such runs and their time-outs, until one without it ends."""
    async with started(make) as sandbox:
        result = await sandbox.run(["sh", "-c", f"({BEAT}) >/dev/null 2>&1 & {WAIT}"], background=True)
        expect((result.exit_code, result.stdout) == (0, "begun\n"), result)
        late = await sandbox.run(["sleep", "60"], limits=replace(LIMITS, wall_clock_s=1), background=True)
        expect(late.timed_out, late)
        expect(await _beats(sandbox), "what was to stay has ended")
        await sandbox.run(["true"])
        expect(not await _beats(sandbox), "a run without `background` has not ended it")


async def _beats(sandbox: ContainerSandbox) -> bool:
    before = await sandbox.get("beat")
    await asyncio.sleep(0.5)
    return await sandbox.get("beat") != before


@check(CONTAINER_CHECKS)
async def each_run_has_a_mark_of_its_own(make: Make[ContainerSandbox]) -> None:
    """`run_variable` is in each run's environment, with another value each time."""
    async with started(make) as sandbox:
        if not sandbox.run_variable:
            return
        values = [(await sandbox.run(["printenv", sandbox.run_variable])).stdout for _ in range(2)]
        expect(all(values) and values[0] != values[1], values)


@check(CONTAINER_CHECKS)
async def archives_go_in_and_out(make: Make[ContainerSandbox]) -> None:
    """Archives keep names, bytes, modes and owners; what comes out begins with the last part of the path."""
    async with started(make) as sandbox:
        try:
            await sandbox.put_archive("/no/such/folder", _tar({"one": (b"1", 0o600)}))
        except OSError:
            pass
        else:
            expect(False, "an archive was unpacked where no folder is")
        await sandbox.put(f"{PLACE}/here", b"")
        await sandbox.put_archive(PLACE, _tar({"one": (b"1", 0o600), "below/two.sh": (b"22", 0o755)}))
        owner = await sandbox.run(["stat", "-c", "%u %g", f"{PLACE}/one"])
        expect(owner.stdout == "12 34\n", owner)
        with tarfile.open(fileobj=io.BytesIO(await sandbox.get_archive(PLACE))) as archive:
            files = {entry.name: entry.mode & 0o7777 for entry in archive if entry.isreg()}
        expected = {"checked/here": 0o644, "checked/one": 0o600, "checked/below/two.sh": 0o755}
        expect(files == expected, files)
        try:
            await sandbox.get_archive("/no/such/folder")
        except OSError:
            return
        expect(False, "an archive of nothing came out")


@check(CONTAINER_CHECKS)
async def a_disk_with_space_is_no_fault(make: Make[ContainerSandbox]) -> None:
    """`assert_disk` raises nothing while there is space, and leaves the sandbox as it is."""
    async with started(make) as sandbox:
        await sandbox.assert_disk()
        expect((await sandbox.run(["echo", "next"])).stdout == "next\n", "the next run failed")


@check(CONTAINER_CHECKS)
async def a_terminal_can_be_had(make: Make[ContainerSandbox]) -> None:
    """`terminal_command` gives a terminal inside, in the folder and with the variables that were asked for."""
    script = 'test -t 0 && test -t 1 && printf "%s|%s|%s|%s." "$PWD" "$A" "$B" "$0"'
    async with started(make) as sandbox:
        command = sandbox.terminal_command(["sh", "-c", script], env={"A": "a b", "B": None}, cwd="/usr/bin", user="0")
        said = await asyncio.to_thread(_on_terminal, [*command, "appended"], {**os.environ, "B": "from here"})
        expect("/usr/bin|a b|from here|appended." in said, said)
        expect((await sandbox.run(["echo", "next"])).stdout == "next\n", "the next run failed")


def _on_terminal(command: list[str], env: dict[str, str]) -> str:
    """What `command` writes on a pseudo-terminal."""
    ours, theirs = pty.openpty()
    try:
        process = subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=theirs, env=env, start_new_session=True)
        try:
            process.wait(60)
        finally:
            process.kill()
        os.set_blocking(ours, False)
        return os.read(ours, 1 << 16).decode("utf-8", "replace")
    except BlockingIOError:
        return ""
    finally:
        os.close(theirs)
        os.close(ours)
