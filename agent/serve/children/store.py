"""The episode store that a server starts itself, started again at the same address when it dies."""

from __future__ import annotations

import json
import logging
import os
import sys
from asyncio.subprocess import Process

from agent.child_processes import start_service, stop_child
from agent.doors.door import KEY_VARIABLE
from agent.serve.children.keeping import keep_running
from agent.serve.config import ServeError, ServeRecipe

log = logging.getLogger(__name__)

_START_S = 60.0
_FIRST_WAIT_S, _LONGEST_WAIT_S = 0.2, 10.0


async def _start_store(recipe: ServeRecipe, key: str, port: int = 0) -> tuple[Process, str]:
    """An episode store on the run's file that deals no training tickets and asks for `key`; its process and its URL.

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
    log = folder / "store.log"
    words = [f"{key}={json.dumps(value)}" for key, value in keys.items() if value is not None]
    process, number = await start_service(
        *(sys.executable, "-m", "agent.store", "--path", str(folder / "episodes.sqlite"), "--exit-with-parent"),
        *("--port", str(port), *words),
        name="the episode store",
        log=log,
        env={**os.environ, "OMP_NUM_THREADS": "1", KEY_VARIABLE: key},
        limit_s=_START_S,
        fault=ServeError,
    )
    return process, f"http://127.0.0.1:{number}"


class StoreChild:
    """Owns the store's process. What it has acknowledged is in its file; what it has not is still in the journal."""

    def __init__(self, recipe: ServeRecipe, key: str) -> None:
        self._recipe, self._key = recipe, key
        self._process: Process | None = None
        self.url = ""

    async def start(self) -> str:
        """Start it; its URL, which stays. Raises `ServeError`."""
        port = int(self.url.rpartition(":")[2]) if self.url else 0
        self._process, self.url = await _start_store(self._recipe, self._key, port)
        return self.url

    async def keep(self) -> None:
        """Start it again whenever it ends; never returns."""

        async def run() -> int:
            assert self._process is not None
            if self._process.returncode is not None:
                await self.start()
            return await self._process.wait()

        def ended(how: int | Exception, failures: int) -> bool:
            if isinstance(how, int):
                log.error("the episode store ended with code %d; feedback waits in the journal", how)
            else:
                log.error("the episode store does not start: %s", how)
            return True

        await keep_running(run, ended, first_s=_FIRST_WAIT_S, most_s=_LONGEST_WAIT_S, faults=(ServeError,))

    async def close(self) -> None:
        """End it."""
        if self._process is not None:
            await stop_child(self._process)
