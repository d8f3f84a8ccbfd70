"""The processes of one simulated run: a cold start, once for all runs, and a server that learns."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os
import shutil
import signal
import sys
from asyncio.subprocess import DEVNULL, Process
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

from agent.engines.launch import log_tail, stop_local

_START_S = 300.0
_STOP_S = 60.0
_POLL_S = 0.05
_PR_SET_PDEATHSIG = 1
START = "start"
"""The name of the run that holds the cold-started model of all the others."""


class ProcessFault(RuntimeError):
    """A process that did not start or ended; the message has the end of its log."""


async def cold_start(recipe: Path, runs: Path, overrides: Sequence[str]) -> Path:
    """The model that every run starts from, in `runs`/start/sft; made once by `python -m learner.sft`."""
    target = runs / START / "sft"
    if await asyncio.to_thread((target / "config.json").is_file):
        return target
    await asyncio.to_thread(runs.mkdir, parents=True, exist_ok=True)
    log = runs / "cold_start.log"
    with log.open("ab") as output:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "learner.sft", str(recipe), *overrides, f"runs_dir={runs}", f"name={START}"),
            stdin=DEVNULL,
            stdout=output,
            stderr=output,
            env=_environment(),
            start_new_session=True,
            preexec_fn=_die_with_parent if sys.platform == "linux" else None,
        )
    try:
        code = await process.wait()
    finally:
        await asyncio.shield(asyncio.ensure_future(stop_local(process, grace_s=_STOP_S)))
    if code:
        raise ProcessFault(f"the cold start ended with code {code}:\n{log_tail(log)}")
    return target


@contextlib.asynccontextmanager
async def learning_server(
    recipe: Path, runs: Path, name: str, model: Path, overrides: Sequence[str]
) -> AsyncIterator[str]:
    """A server of `recipe` that learns, from `model`, as the run `name`; its URL. Nothing is left of it afterwards.

    What an unfinished run of this name has left is removed first. Raises `ProcessFault` if it does not start.
    """
    folder = runs / name
    await asyncio.to_thread(shutil.rmtree, folder, ignore_errors=True)
    await asyncio.to_thread(shutil.copytree, model, folder / "sft")  # makes the folder too
    log, port_file = folder / "server.log", folder / "server.port"
    with log.open("ab") as output:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "agent.serve", str(recipe), "--learn", "--port-file", str(port_file), *overrides),
            *(f"runs_dir={runs}", f"name={name}", "serve.host=127.0.0.1", "serve.port=0", "serve.model_name=policy"),
            stdin=DEVNULL,
            stdout=output,
            stderr=output,
            env=_environment(),
            start_new_session=True,
            preexec_fn=_die_with_parent if sys.platform == "linux" else None,
        )
    try:
        await _listening(process, port_file, log)
        yield f"http://127.0.0.1:{int(port_file.read_text())}"
    finally:
        await asyncio.shield(asyncio.ensure_future(stop_local(process, grace_s=_STOP_S)))


async def _listening(process: Process, port_file: Path, log: Path) -> None:
    try:
        async with asyncio.timeout(_START_S):
            while not await asyncio.to_thread(port_file.exists):
                if process.returncode is not None:
                    raise ProcessFault(f"the server ended with code {process.returncode}:\n{log_tail(log)}")
                await asyncio.sleep(_POLL_S)
    except TimeoutError as error:
        raise ProcessFault(f"the server was not ready within {_START_S:g} s:\n{log_tail(log)}") from error


def clear(runs: Path, name: str, keep: Path) -> None:
    """Remove a finished run's weights and conversations; the learner's figures go to `keep`."""
    metrics = runs / name / "metrics.jsonl"
    if metrics.is_file():
        shutil.copyfile(metrics, keep / f"{name}.metrics.jsonl")
    shutil.rmtree(runs / name, ignore_errors=True)


def _environment() -> dict[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")}


def _die_with_parent() -> None:
    # A simulation that is killed must not leave a server behind.
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
