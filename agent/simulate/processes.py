"""The processes of one simulated run: a cold start, once for all runs, and a server that learns."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import signal
import sys
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

from agent.child_processes import log_tail, start_child, start_service, stop_child
from agent.serve.api.limits import KEYS_VARIABLE

_START_S = 300.0
_STOP_S = 60.0
_WHEN_PARENT_DIES = signal.SIGTERM  # a simulation that is killed must not leave a server behind
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
    process = await start_child(
        *(sys.executable, "-m", "learner.sft", str(recipe), *overrides, f"runs_dir={runs}", f"name={START}"),
        log=log,
        env=_environment(),
        when_parent_dies=_WHEN_PARENT_DIES,
    )
    try:
        code = await process.wait()
    finally:
        await asyncio.shield(asyncio.ensure_future(stop_child(process, grace_s=_STOP_S)))
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
    process, port = await start_service(
        *(sys.executable, "-m", "agent.serve", str(recipe), "--learn", *overrides),
        *(f"runs_dir={runs}", f"name={name}", "serve.host=127.0.0.1", "serve.port=0", "serve.model_name=policy"),
        *("serve.keys_file=null", "serve.doors.open=false"),  # the users show the key that the server makes
        name="the server",
        log=folder / "server.log",
        env=_environment(),
        when_parent_dies=_WHEN_PARENT_DIES,
        limit_s=_START_S,
        fault=ProcessFault,
    )
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        await asyncio.shield(asyncio.ensure_future(stop_child(process, grace_s=_STOP_S)))


def clear(runs: Path, name: str, keep: Path) -> None:
    """Remove a finished run's weights and conversations; the learner's figures go to `keep`."""
    metrics = runs / name / "metrics.jsonl"
    if metrics.is_file():
        shutil.copyfile(metrics, keep / f"{name}.metrics.jsonl")
    shutil.rmtree(runs / name, ignore_errors=True)


def _environment() -> dict[str, str]:
    inherited = {name: value for name, value in os.environ.items() if name != KEYS_VARIABLE}
    return {**inherited, "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")}
