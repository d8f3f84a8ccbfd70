"""Start a `local` engine as a child process. Works without torch (the child needs it)."""

from __future__ import annotations

import contextlib
import os
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator
from pathlib import Path

from agent.child_processes import start_service, stop_child
from agent.doors.door import KEY_VARIABLE
from agent.engines.adapters import base_of
from agent.engines.base import EngineFault, check_model_folder


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
    key: str | None = None,
    ready_timeout_s: float = 120.0,
) -> tuple[Process, str]:
    """Start a `local` engine for the model folder `model`; returns the process and its URL once it listens.

    `key`: the shared key that it asks for, "" for none; None: that of $SAO_KEY, if there is one. It travels in the
    child's environment. Its output is appended to `log`. It ends by itself when this process does, by SIGKILL too.
    Raises `EngineFault` (with the end of the log) if it dies or is not ready within `ready_timeout_s`; nothing is left
    running then.
    End it with `stop_child`.
    """
    check_model_folder(base_of(model) or model)
    command = [sys.executable, "-m", "agent.engines.local", "--exit-with-parent", "--model", str(model)]
    command += ["--version", str(version), "--port", str(port), "--device", device]
    command += ["--max-sequences", str(max_sequences), "--max-context", str(max_context), "--threads", str(threads)]
    # Before torch is imported there: later, some of its thread pools have their size already.
    env = {**os.environ, "OMP_NUM_THREADS": str(threads), **({} if key is None else {KEY_VARIABLE: key})}
    process, number = await start_service(
        *command, name="the engine", log=log, env=env, stdin=PIPE, limit_s=ready_timeout_s, fault=EngineFault
    )
    return process, f"http://127.0.0.1:{number}"


@contextlib.asynccontextmanager
async def local_engine(model: Path, *, version: int = 0, log: Path, **options: int | float | str) -> AsyncIterator[str]:
    """`launch_local` and `stop_child` as a block; gives the URL."""
    process, url = await launch_local(model, version=version, log=log, **options)  # type: ignore[arg-type]
    try:
        yield url
    finally:
        await stop_child(process)
