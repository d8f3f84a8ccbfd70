"""The other processes of a run: store, engine, runtime. What has no address in the recipe is started here.

    async with Services.start(recipe, model=..., store_path=..., ...) as services:
        claim = await services.store.claim(128, version=0, wait_s=5)

Children live in sessions of their own: Ctrl-C reaches this process only, which takes them down in order (runtime,
engine, store). They also end by themselves when this process dies, by SIGKILL too.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import sys
from asyncio.subprocess import DEVNULL, PIPE, Process
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from agent.engines.base import Engine
from agent.engines.client import HttpEngine
from agent.engines.launch import launch_local, launch_vllm, log_tail, stop_local
from agent.store.client import StoreClient
from learner.cli import LearnerFault
from learner.config import Recipe

_START_LIMIT_S = 120.0
_STOP_LIMIT_S = 15.0
_POLL_S = 0.05


@dataclass
class Services:
    """Clients of everything the learner talks to, and the children that it owns, by name."""

    store: StoreClient
    engines: list[Engine]
    children: dict[str, tuple[Process, Path]] = field(default_factory=dict)

    def check(self) -> None:
        """Raise `LearnerFault` if a child has ended: nothing good comes of waiting for it."""
        for name, (process, log) in self.children.items():
            if process.returncode is not None:
                raise LearnerFault(
                    f"the {name} ended with code {process.returncode}. The end of its log, {log}:\n{log_tail(log)}\n"
                    "Run the same command again to go on from the last checkpoint"
                )

    async def publish(self, version: int, weights: Path, *, timeout_s: float) -> None:
        """Give every engine the snapshot, then tell the store that `version` is served."""
        async with asyncio.timeout(timeout_s):
            await asyncio.gather(*(engine.publish(version, weights) for engine in self.engines))
            await self.store.set_version(version)

    @classmethod
    @contextlib.asynccontextmanager
    async def start(
        cls,
        recipe: Recipe,
        *,
        model: Path,
        folder: Path,
        store_config: dict[str, Any],
        version: int | None = None,
        use_addresses: bool = True,
    ) -> AsyncIterator[Services]:
        """Start what the recipe gives no address for; logs, ports and the store's file go to `folder`.

        `version` None: the store's own, which only grows, so that a version never names two sets of weights.
        `use_addresses=False` ignores the recipe's store and engine (for stages that are not the run itself).
        """
        await asyncio.to_thread(folder.mkdir, parents=True, exist_ok=True)
        services = cls(StoreClient("http://127.0.0.1:1"), [])
        try:
            if use_addresses and recipe.store.url:
                services.store = StoreClient(recipe.store.url)
            else:
                url = await _start_store(services, folder, store_config)
                services.store = StoreClient(url)
            if version is None:
                version = (await services.store.status()).version
            urls = recipe.engine.urls if use_addresses else ()
            if not urls:
                process, url = await _start_engine(recipe, model, version, folder / "engine.log")
                services.children["engine"] = (process, folder / "engine.log")
                urls = (url,)
            services.engines = [HttpEngine(url) for url in urls]
            if recipe.runtime.launch:
                await _start_runtime(services, recipe, model, urls, folder)
            yield services
        finally:
            await services._stop()

    async def _stop(self) -> None:
        # Shielded: a second Ctrl-C must not leave a child behind; SIGKILL cannot, see the children's own watch.
        await asyncio.shield(asyncio.ensure_future(self._take_down()))

    async def _take_down(self) -> None:
        for name in ("runtime", "engine", "store"):
            if name == "engine":
                await asyncio.gather(*(engine.close() for engine in self.engines), return_exceptions=True)
            if name == "store":
                await self.store.close()
            if name in self.children:
                await stop_local(self.children[name][0], grace_s=_STOP_LIMIT_S)


async def _start_engine(recipe: Recipe, model: Path, version: int, log: Path) -> tuple[Process, str]:
    section = recipe.engine
    shared: dict[str, Any] = {
        "version": version,
        "log": log,
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


async def _start_store(services: Services, folder: Path, config: dict[str, Any]) -> str:
    command = ["-m", "agent.store", "--path", str(folder / "episodes.sqlite"), "--exit-with-parent"]
    port_file = folder / "store.port"
    port_file.unlink(missing_ok=True)
    words = [f"{key}={json.dumps(value)}" for key, value in config.items() if value is not None]
    await _spawn(services, "store", [*command, "--port-file", str(port_file), *words], folder)
    async with asyncio.timeout(_START_LIMIT_S):
        while not port_file.exists() or not port_file.read_text().strip():
            services.check()
            await asyncio.sleep(_POLL_S)
    return f"http://127.0.0.1:{int(port_file.read_text())}"


async def _start_runtime(services: Services, recipe: Recipe, model: Path, urls: tuple[str, ...], folder: Path) -> None:
    section = recipe.runtime
    config = {
        "store": services.store.url,
        "engines": list(urls),
        "model": str(model),
        "env": recipe.env.model_dump(mode="json"),
        "evaluation_env": (recipe.evaluation.env or recipe.env).model_dump(mode="json"),
        "worker": f"{recipe.name}-0",
        "spool": str(folder / "undelivered"),
        **section.model_dump(mode="json", exclude={"launch"}),
    }
    process = await _spawn(services, "runtime", ["-m", "agent.runtime", "--exit-with-parent"], folder, stdin=PIPE)
    assert process.stdin is not None
    process.stdin.write(json.dumps(config).encode())
    await process.stdin.drain()
    process.stdin.close()


async def _spawn(services: Services, name: str, words: list[str], folder: Path, stdin: int = DEVNULL) -> Process:
    log = folder / f"{name}.log"
    with log.open("ab") as output:
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            *words,
            stdin=stdin,
            stdout=output,
            stderr=output,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            start_new_session=True,
        )
    services.children[name] = (process, log)
    return process
