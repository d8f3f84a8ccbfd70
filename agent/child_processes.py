"""A process started by another one: started, waited for, ended with all it has started itself. Both sides of it.

The parent:

    process = await start_child(sys.executable, "-m", "agent.store", "--port-file", str(port_file), log=log, env=env)
    port = await announced_port(process, port_file, name="the episode store", log=log, limit_s=60.0, fault=StoreFault)
    ...
    await stop_child(process)

The child writes its port with `announce_port` once it listens. It has a session of its own: Ctrl-C in the terminal
reaches the parent alone, which takes its children down in its own time.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os
import signal
import sys
from asyncio.subprocess import DEVNULL, STDOUT, Process
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import BinaryIO

_PR_SET_PDEATHSIG = 1
_POLL_S = 0.02


async def start_child(
    *command: str,
    log: Path | int,
    env: Mapping[str, str],
    stdin: int = DEVNULL,
    cwd: Path | None = None,
    when_parent_dies: signal.Signals | None = None,
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
            preexec_fn=_dying_with_parent(when_parent_dies),
        )

    if isinstance(log, int):
        return await start(log)
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("ab") as output:
        return await start(output)


def _dying_with_parent(number: signal.Signals | None) -> Callable[[], None] | None:
    if number is None or sys.platform != "linux":
        return None

    def ask() -> None:
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, number)

    return ask


async def announced_port(
    process: Process, port_file: Path, *, name: str, log: Path, limit_s: float, fault: type[Exception]
) -> int:
    """The port that the child has written to `port_file`. A child that is not ready is left to the caller to end.

    Raises `fault`, which shows the end of `log`, if the child ends or is not ready within `limit_s`. Remove an old file
    before the start.
    """
    try:
        async with asyncio.timeout(limit_s):
            while not (written := await asyncio.to_thread(_text, port_file)):
                if process.returncode is not None:
                    raise fault(f"{name} ended with code {process.returncode} at its start:\n{log_tail(log)}")
                await asyncio.sleep(_POLL_S)
    except TimeoutError as error:
        raise fault(f"{name} was not ready within {limit_s:g} s:\n{log_tail(log)}") from error
    return int(written)


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


def _text(port_file: Path) -> str:
    return port_file.read_text() if port_file.exists() else ""


def log_tail(log: Path, characters: int = 2000) -> str:
    """The end of a child's log, for an error message; "" if there is none."""
    return log.read_text(errors="replace")[-characters:] if log.exists() else ""


def announce_port(port_file: Path | None, port: int) -> None:
    """The child's side: say in `port_file`, if there is one, that it listens on `port`."""
    if port_file is None:
        return
    port_file.parent.mkdir(parents=True, exist_ok=True)
    # Renamed into place: whoever polls for the file never reads half of it.
    part = port_file.with_name(f".{port_file.name}.{os.getpid()}")
    part.write_text(f"{port}\n")
    part.replace(port_file)
