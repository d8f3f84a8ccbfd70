"""Start a `local` engine as a child process, and leave nothing of it. Works without torch (the child needs it)."""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator
from pathlib import Path
from typing import BinaryIO

from agent.engines.base import EngineFault

_POLL_S = 0.02


async def launch_local(
    model: Path,
    *,
    version: int,
    log: Path,
    max_sequences: int = 64,
    max_context: int = 4096,
    threads: int = 1,
    port: int = 0,
    device: str = "cpu",
    ready_timeout_s: float = 120.0,
) -> tuple[Process, str]:
    """Start a `local` engine for the model folder `model`; returns the process and its URL once it listens.

    Its output is appended to `log`. It ends by itself when this process does, by SIGKILL too. Raises `EngineFault`
    (with the end of the log) if it dies or is not ready within `ready_timeout_s`; nothing is left running then.
    End it with `stop_local`.
    """
    _check(model)
    output = _open(log)
    port_file = log.with_suffix(".port")
    port_file.unlink(missing_ok=True)
    # A session of its own: Ctrl-C in the terminal reaches the parent, which takes the engine down in its own time.
    command = [sys.executable, "-m", "agent.engines.local", "--exit-with-parent", "--model", str(model)]
    command += ["--version", str(version), "--port", str(port), "--port-file", str(port_file), "--device", device]
    command += ["--max-sequences", str(max_sequences), "--max-context", str(max_context), "--threads", str(threads)]
    # Before torch is imported there: later, some of its thread pools have their size already.
    env = {**os.environ, "OMP_NUM_THREADS": str(threads)}
    try:
        process = await asyncio.create_subprocess_exec(
            *command, stdin=PIPE, stdout=output, stderr=output, env=env, start_new_session=True
        )
    finally:
        output.close()
    try:
        async with asyncio.timeout(ready_timeout_s):
            while not port_file.exists():
                if process.returncode is not None:
                    raise EngineFault(f"the engine ended with code {process.returncode} at its start:\n{_tail(log)}")
                await asyncio.sleep(_POLL_S)
        url = f"http://127.0.0.1:{int(port_file.read_text())}"
    except TimeoutError as error:
        await stop_local(process, grace_s=0)
        raise EngineFault(f"the engine was not ready within {ready_timeout_s:g} s:\n{_tail(log)}") from error
    except BaseException:
        await stop_local(process, grace_s=0)
        raise
    finally:
        port_file.unlink(missing_ok=True)
    return process, url


async def stop_local(process: Process, *, grace_s: float = 10.0) -> int:
    """End the engine: SIGTERM, after `grace_s` SIGKILL. Returns its exit code; harmless on one that has ended."""
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


@contextlib.asynccontextmanager
async def local_engine(model: Path, *, version: int = 0, log: Path, **options: int | float | str) -> AsyncIterator[str]:
    """`launch_local` and `stop_local` as a block; gives the URL."""
    process, url = await launch_local(model, version=version, log=log, **options)  # type: ignore[arg-type]
    try:
        yield url
    finally:
        await stop_local(process)


def _check(model: Path) -> None:
    # The engine says so as well, but only after it has imported torch.
    if not (model / "config.json").is_file():
        raise EngineFault(f"no model in {model}: it must be a folder with config.json and model.safetensors")


def _open(log: Path) -> BinaryIO:
    log.parent.mkdir(parents=True, exist_ok=True)
    return log.open("ab")


def _tail(log: Path, characters: int = 2000) -> str:
    return log.read_text(errors="replace")[-characters:]
