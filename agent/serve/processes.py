"""The processes that a server starts where the recipe gives no address: engine and store.

Both end by themselves when this process dies, by SIGKILL too.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from asyncio.subprocess import DEVNULL, Process
from pathlib import Path
from typing import Any

from agent.engines.launch import launch_local, launch_vllm, log_tail, stop_local
from agent.serve.config import ServeError, ServeRecipe

_START_S = 60.0
_POLL_S = 0.02


async def start_engine(recipe: ServeRecipe, model: Path, version: int) -> tuple[Process, str]:
    """The recipe's engine on `model`, serving it as `version`; its process and its URL. Raises `EngineFault`."""
    section = recipe.engine
    shared: dict[str, Any] = {
        "version": version,
        "log": recipe.run_dir / "engine.log",
        "max_sequences": section.max_sequences,
        "max_context": section.max_context,
        "threads": section.threads,
    }
    if section.launch == "local":
        return await launch_local(model, **shared)
    return await launch_vllm(
        model,
        **shared,
        dtype=recipe.model.dtype,
        eager=section.vllm_eager,
        environment=section.vllm_environment,
        options=section.vllm_options,
    )


async def start_store(recipe: ServeRecipe, port: int = 0) -> tuple[Process, str]:
    """An episode store on the run's file that deals no training tickets; its process and its URL.

    Raises `ServeError`.
    """
    folder = recipe.run_dir
    folder.mkdir(parents=True, exist_ok=True)
    keys = {
        "tasks": 0,
        "seed": recipe.seed,
        "batch": recipe.learner.batch_size,
        "drop_truncated": recipe.learner.truncation == "drop",
        **recipe.store.model_dump(exclude={"url"}),
    }
    port_file, log = folder / "store.port", folder / "store.log"
    port_file.unlink(missing_ok=True)
    words = [f"{key}={json.dumps(value)}" for key, value in keys.items() if value is not None]
    with log.open("ab") as output:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "agent.store", "--path", str(folder / "episodes.sqlite"), "--exit-with-parent"),
            *("--port-file", str(port_file), "--port", str(port), *words),
            stdin=DEVNULL,
            stdout=output,
            stderr=output,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            start_new_session=True,
        )
    try:
        async with asyncio.timeout(_START_S):
            while not port_file.exists() or not port_file.read_text().strip():
                if process.returncode is not None:
                    raise ServeError(f"the episode store ended with code {process.returncode}:\n{log_tail(log)}")
                await asyncio.sleep(_POLL_S)
        return process, f"http://127.0.0.1:{int(port_file.read_text())}"
    except TimeoutError as error:
        await stop_local(process, grace_s=0)
        raise ServeError(f"the episode store was not ready within {_START_S:g} s:\n{log_tail(log)}") from error
    except BaseException:
        await stop_local(process, grace_s=0)
        raise
