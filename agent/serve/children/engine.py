"""The engine that a server starts itself, started again with the served weights when it dies."""

from __future__ import annotations

import logging
import os
from asyncio.subprocess import Process
from collections.abc import Callable
from pathlib import Path

from agent.child_processes import stop_child
from agent.engines.base import EngineFault
from agent.engines.client import HttpEngine
from agent.engines.launching import EngineLaunch, devices_after
from agent.serve.children.keeping import keep_running
from agent.serve.config import ServeRecipe
from agent.serve.versions.publishing import Versions

log = logging.getLogger(__name__)

_FIRST_WAIT_S, _LONGEST_WAIT_S = 0.5, 30.0


def engine_launch(recipe: ServeRecipe, visible: str | None) -> EngineLaunch:
    """How the recipe's engine is started; `visible`: this process's CUDA_VISIBLE_DEVICES. Raises `EngineFault`."""
    hardware, parallel, devices = recipe.hardware, 1, None
    if hardware.engine_gpus:
        parallel = hardware.gpus_per_engine
        devices = devices_after(hardware.learner_gpus, 0, parallel, visible)
    return EngineLaunch.of(recipe.engine, dtype=recipe.published_dtype, parallel=parallel, devices=devices)


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
        launch = engine_launch(self._recipe, os.environ.get("CUDA_VISIBLE_DEVICES"))
        self._process, self.url = await launch.start(path, version=number, log=self._recipe.engine_log, key=self._key)
        return self.url

    async def keep(self, engine: HttpEngine, versions: Versions) -> None:
        """Start it again whenever it ends, and point `engine` at it; never returns."""

        async def run() -> int:
            if self.fault:
                engine.url = await self.start()
                assert self._process is not None
                try:
                    await versions.align(engine)
                except EngineFault:
                    await stop_child(self._process)  # it came up and does not take the weights
                    raise
                self.fault = ""
                log.info("the engine is back, serving version %d", versions.served)
            assert self._process is not None
            return await self._process.wait()

        def ended(how: int | Exception, failures: int) -> bool:
            see = f"the engine ended with code {how}; see {self._recipe.engine_log}"
            self.fault = see if isinstance(how, int) else f"the engine does not start: {how}"
            log.error("%s", self.fault)
            return True

        await keep_running(run, ended, first_s=_FIRST_WAIT_S, most_s=_LONGEST_WAIT_S, faults=(EngineFault,))

    async def close(self) -> None:
        """End it."""
        if self._process is not None:
            await stop_child(self._process)
