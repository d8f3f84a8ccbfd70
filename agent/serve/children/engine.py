"""The engine that a server starts itself, started again with the served weights when it dies."""

from __future__ import annotations

import asyncio
import logging
from asyncio.subprocess import Process
from collections.abc import Callable
from pathlib import Path
from typing import Any

from agent.child_processes import stop_child
from agent.engines.base import EngineFault
from agent.engines.client import HttpEngine
from agent.engines.local.launch import launch_local
from agent.engines.vllm.launch import launch_vllm
from agent.serve.config import ServeRecipe
from agent.serve.versions.publishing import Versions

log = logging.getLogger(__name__)

_FIRST_WAIT_S, _LONGEST_WAIT_S = 0.5, 30.0


async def _start_engine(recipe: ServeRecipe, model: Path, version: int, key: str) -> tuple[Process, str]:
    """The recipe's engine on `model`, serving it as `version`; its process and its URL. Raises `EngineFault`."""
    section = recipe.engine
    shared: dict[str, Any] = {
        "version": version,
        "key": key,
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


class EngineChild:
    """Owns the engine's process. Life: start ──▶ running ──dies──▶ (back-off) ──▶ running ...; `close` ends it.

    `served` gives the weights' folder and number to start with. It asks for `key`. `fault` says why there is no engine,
    "" if there is.
    """

    def __init__(self, recipe: ServeRecipe, served: Callable[[], tuple[Path, int]], key: str) -> None:
        self._recipe, self._served, self._key = recipe, served, key
        self._process: Process | None = None
        self.url = ""
        self.fault = ""

    async def start(self) -> str:
        """Start it; its URL. Raises `EngineFault`."""
        path, number = self._served()
        self._process, self.url = await _start_engine(self._recipe, path, number, self._key)
        return self.url

    async def keep(self, engine: HttpEngine, versions: Versions) -> None:
        """Start it again whenever it ends, and point `engine` at it; never returns."""
        wait_s = _FIRST_WAIT_S
        while True:
            assert self._process is not None
            code = await self._process.wait()
            self.fault = f"the engine ended with code {code}; see {self._recipe.run_dir / 'engine.log'}"
            log.error("%s", self.fault)
            while self.fault:
                await asyncio.sleep(wait_s)
                wait_s = min(2 * wait_s, _LONGEST_WAIT_S)
                try:
                    engine.url = await self.start()
                    await versions.align(engine)
                except EngineFault as error:
                    self.fault = str(error)
                    log.error("the engine does not start: %s", error)
                    await stop_child(self._process)  # one that came up and does not take the weights
                else:
                    self.fault, wait_s = "", _FIRST_WAIT_S
                    log.info("the engine is back, serving version %d", versions.served)

    async def close(self) -> None:
        """End it."""
        if self._process is not None:
            await stop_child(self._process)
