"""The episode store that a server starts itself, started again at the same address when it dies."""

from __future__ import annotations

import asyncio
import logging
from asyncio.subprocess import Process

from agent.engines.launch import stop_local
from agent.serve.config import ServeError, ServeRecipe
from agent.serve.processes import start_store

log = logging.getLogger(__name__)

_FIRST_WAIT_S, _LONGEST_WAIT_S = 0.2, 10.0


class StoreChild:
    """Owns the store's process. What it has acknowledged is in its file; what it has not is still in the journal."""

    def __init__(self, recipe: ServeRecipe) -> None:
        self._recipe = recipe
        self._process: Process | None = None
        self.url = ""

    async def start(self) -> str:
        """Start it; its URL, which stays. Raises `ServeError`."""
        port = int(self.url.rpartition(":")[2]) if self.url else 0
        self._process, self.url = await start_store(self._recipe, port)
        return self.url

    async def keep(self) -> None:
        """Start it again whenever it ends; never returns."""
        while True:
            assert self._process is not None
            code = await self._process.wait()
            log.error("the episode store ended with code %d; feedback waits in the journal", code)
            wait_s = _FIRST_WAIT_S
            while self._process.returncode is not None:
                await asyncio.sleep(wait_s)
                wait_s = min(2 * wait_s, _LONGEST_WAIT_S)
                try:
                    await self.start()
                except ServeError as error:
                    log.error("the episode store does not start: %s", error)

    async def close(self) -> None:
        """End it."""
        if self._process is not None:
            await stop_local(self._process)
