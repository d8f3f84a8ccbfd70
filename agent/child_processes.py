"""A process started by another one: started, waited for, ended with all it has started itself. Both sides of it.

The parent:

    process, port = await start_service(
        *(sys.executable, "-m", "agent.store", "--path", str(path)),
        name="the episode store", log=log, env=env, limit_s=60.0, fault=StoreFault,
    )
    ...
    await stop_child(process)

The child says its port with `announce_port` once it listens: through a pipe that it was given, and in a file for people
who start it by hand. It has a session of its own: Ctrl-C in the terminal reaches the parent alone, which takes its
children down in its own time.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from asyncio.subprocess import DEVNULL, STDOUT, Process
from collections.abc import Collection, Mapping
from functools import partial
from pathlib import Path
from typing import BinaryIO

from agent import PORT_PIPE
from sandboxes.inside.parent_death import signal_at_parents_end

_LAST_WORDS_S = 5.0  # for a child that has closed its pipe to end


async def start_child(
    *command: str,
    log: Path | int,
    env: Mapping[str, str],
    stdin: int = DEVNULL,
    cwd: Path | None = None,
    when_parent_dies: signal.Signals | None = None,
    pass_fds: Collection[int] = (),
) -> Process:
    """Start `command` in a session of its own; its output is appended to `log`, a file or a descriptor. Raises OSError.

    `when_parent_dies`: what Linux sends it if this process dies, by SIGKILL too. None for children that watch for
    that themselves.
    """

    async def start(output: int | BinaryIO) -> Process:
        return await asyncio.create_subprocess_exec(
            *command,
            stdin=stdin,
            stdout=output,
            stderr=STDOUT,
            env={**env, "SAO_STARTED_BY": str(os.getpid())},
            cwd=cwd,
            start_new_session=True,
            pass_fds=pass_fds,
            preexec_fn=None if when_parent_dies is None else partial(signal_at_parents_end, when_parent_dies),
        )

    if isinstance(log, int):
        return await start(log)
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("ab") as output:
        return await start(output)


async def start_service(
    *command: str,
    name: str,
    log: Path,
    env: Mapping[str, str],
    limit_s: float,
    fault: type[Exception],
    stdin: int = DEVNULL,
    cwd: Path | None = None,
    when_parent_dies: signal.Signals | None = None,
) -> tuple[Process, int]:
    """`start_child`, and wait until the child has said the port on which it listens: `announce_port` there.

    Raises `fault`, which calls it `name` and shows the end of `log`, if it ends or is not ready within `limit_s`;
    nothing is left running then.
    """
    reading, writing = os.pipe()
    with os.fdopen(reading, "rb", buffering=0) as announced:
        try:
            process = await start_child(
                *command,
                log=log,
                env={**env, "SAO_PORT_PIPE": str(writing)},
                stdin=stdin,
                cwd=cwd,
                when_parent_dies=when_parent_dies,
                pass_fds=(writing,),
            )
        finally:
            os.close(writing)  # the child's end is the only one now: it closes when the child ends
        try:
            return process, await _announced(process, announced, name, log, limit_s, fault)
        except BaseException:
            await stop_child(process, grace_s=0)
            raise


async def _announced(
    process: Process, pipe: BinaryIO, name: str, log: Path, limit_s: float, fault: type[Exception]
) -> int:
    reader = asyncio.StreamReader()
    protocol = asyncio.StreamReaderProtocol(reader)
    transport, _ = await asyncio.get_running_loop().connect_read_pipe(lambda: protocol, pipe)
    try:
        async with asyncio.timeout(limit_s):
            said = await reader.readline()
    except TimeoutError as error:
        raise fault(f"{name} was not ready within {limit_s:g} s:\n{log_tail(log)}") from error
    finally:
        transport.close()
    if said:
        return int(said)
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(_LAST_WORDS_S):
            await process.wait()
    raise fault(f"{name} ended with code {process.returncode} at its start:\n{log_tail(log)}")


async def stop_child(process: Process, *, grace_s: float = 10.0) -> int:
    """End a child: SIGTERM, after `grace_s` SIGKILL, and what is left of its group. Returns its exit code.

    Harmless on one that has ended.
    """
    if process.returncode is None:
        try:
            return await _stop(process, grace_s)
        finally:
            end_group(process)
    return await _stop(process, grace_s)


def end_group(process: Process) -> None:
    """SIGKILL to what a child that has just ended has left: it had a session of its own, so the group is its own."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)


async def _stop(process: Process, grace_s: float) -> int:
    if process.returncode is None:
        with contextlib.suppress(ProcessLookupError):
            process.terminate()
        try:
            async with asyncio.timeout(grace_s):
                await process.wait()
        except TimeoutError:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
        except asyncio.CancelledError:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            raise
    if process.stdin is not None:
        process.stdin.close()
    return await process.wait()


def log_tail(log: Path, characters: int = 2000) -> str:
    """The end of a child's log, for an error message; "" if there is none."""
    return log.read_text(errors="replace")[-characters:] if log.exists() else ""


def announce_port(port_file: Path | None, port: int) -> None:
    """The child's side: say to whoever started it, and in `port_file` if there is one, that it listens on `port`."""
    if PORT_PIPE:
        with contextlib.suppress(OSError), os.fdopen(int(PORT_PIPE), "wb") as told:  # nobody may listen any more
            told.write(b"%d\n" % port)
    if port_file is None:
        return
    port_file.parent.mkdir(parents=True, exist_ok=True)
    # Renamed into place: whoever waits for the file never reads half of it.
    part = port_file.with_name(f".{port_file.name}.{os.getpid()}")
    part.write_text(f"{port}\n")
    part.replace(port_file)
