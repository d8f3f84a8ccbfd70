"""The other processes of a run: store, engines, runtime. What has no address in the recipe is started here.

    async with Services.start(recipe, model=..., store_path=..., ...) as services:
        claim = await services.store.claim(128, version=0, wait_s=5)

Children live in sessions of their own: Ctrl-C reaches this process only, which takes them down in order (runtime,
engines, store). They also end by themselves when this process dies, by SIGKILL too.
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

from agent.engines.base import Engine, EngineFault, EngineHealth
from agent.engines.client import HttpEngine
from agent.engines.launch import log_tail, stop_local
from agent.store.client import StoreClient
from learner.cli import LearnerFault
from learner.config import Recipe
from learner.engines import Fleet, Weights

_START_LIMIT_S = 120.0
_STOP_LIMIT_S = 15.0
_ASK_LIMIT_S = 10.0
_POLL_S = 0.05


@dataclass
class Services:
    """Clients of everything the learner talks to, and the store and runtime that it owns, by name."""

    store: StoreClient
    fleet: Fleet | None = None
    children: dict[str, tuple[Process, Path]] = field(default_factory=dict)

    @property
    def engines(self) -> list[Engine]:
        """The engines that serve the newest version now; see `learner.engines`."""
        return self.fleet.engines if self.fleet is not None else []

    async def engine_healths(self) -> list[EngineHealth]:
        """What the engines that answer say of themselves."""
        return await self.fleet.healths() if self.fleet is not None else []

    def check(self) -> None:
        """Raise `LearnerFault` if store or runtime has ended, or an engine for good: nothing good comes of waiting."""
        for name, (process, log) in self.children.items():
            if process.returncode is not None:
                raise LearnerFault(
                    f"the {name} ended with code {process.returncode}. The end of its log, {log}:\n{log_tail(log)}\n"
                    "Run the same command again to go on from the last checkpoint"
                )
        if self.fleet is not None:
            self.fleet.check()

    @contextlib.asynccontextmanager
    async def weights_change(self) -> AsyncIterator[None]:
        """See `Fleet.weights_change`."""
        assert self.fleet is not None
        async with self.fleet.weights_change():
            yield

    async def publish(self, version: int, weights: Weights, *, timeout_s: float) -> None:
        """Give the engines the weights (see `Fleet.publish`), then tell the store that `version` is served."""
        assert self.fleet is not None
        await self.fleet.publish(version, weights, timeout_s=timeout_s)
        async with asyncio.timeout(timeout_s):
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
        held: int = 0,
        own_store: bool = False,
        own_engines: bool = False,
    ) -> AsyncIterator[Services]:
        """Start what the recipe gives no address for; logs, ports and the store's file go to `folder`.

        When this returns the engines serve `model` as `version`. None: as the store's own, if that is `held`, the
        version that a checkpoint gives `model`; else as one that nobody has seen, for what a session before has
        published, and a checkpoint does not hold, is of other weights. `own_store`: start a store even so, and with it
        a runtime (one elsewhere cannot know of that store): for stages that are not the run itself. `own_engines`:
        start engines even if the recipe has addresses, for what must not disturb them.
        """
        await asyncio.to_thread(folder.mkdir, parents=True, exist_ok=True)
        services = cls(StoreClient("http://127.0.0.1:1"))
        async with contextlib.AsyncExitStack() as stack:
            stack.push_async_callback(services._shut, "store")
            if recipe.store.url and not own_store:
                services.store = StoreClient(recipe.store.url)
            else:
                services.store = StoreClient(await _start_store(services, folder, store_config))
            stack.push_async_callback(_closed, services)
            if version is None:
                version = (await services.store.status()).version
                if not recipe.learner.online:  # there the server names what its engines serve
                    version = await _free_version(version, held, () if own_engines else recipe.engine.urls)
            services.fleet = await stack.enter_async_context(
                Fleet.start(
                    recipe,
                    model=model,
                    version=version,
                    folder=folder,
                    use_addresses=not own_engines,
                    adopt=recipe.learner.online and not own_engines,
                )
            )
            if (recipe.runtime.launch and not recipe.learner.online) or own_store:
                # A runtime ends its own sandboxes, and is given the time for it.
                grace_s = max(_STOP_LIMIT_S, recipe.runtime.limits.shutdown_s + 5.0)
                stack.push_async_callback(services._shut, "runtime", grace_s)
                await _start_runtime(services, recipe, model, services.fleet.urls, folder)
            yield services

    async def _shut(self, name: str, grace_s: float = _STOP_LIMIT_S) -> None:
        # Shielded: a second Ctrl-C must not leave a child behind; SIGKILL cannot, see the children's own watch.
        if name in self.children:
            await asyncio.shield(asyncio.ensure_future(stop_local(self.children[name][0], grace_s=grace_s)))


async def _free_version(served: int, held: int, urls: tuple[str, ...]) -> int:
    """`served` if that is what is held, or the run is new; else one above what store, checkpoint and engines say."""
    newest = max(served, held)
    if newest == 0:  # whatever the engines have is of another run
        return 0
    for answer in await asyncio.gather(*map(_version_at, urls)):
        newest = max(newest, answer)
    return served if newest == served == held else newest + 1


async def _version_at(url: str) -> int:
    """What the engine at `url` serves; -1 if it does not say."""
    engine = HttpEngine(url)
    try:
        async with asyncio.timeout(_ASK_LIMIT_S):
            return (await engine.health()).version
    except (EngineFault, TimeoutError):
        return -1
    finally:
        await engine.close()


async def _closed(services: Services) -> None:
    await services.store.close()


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
        **section.model_dump(mode="json", exclude={"launch", "python"}),
    }
    words = ["-m", "agent.runtime", "--exit-with-parent"]
    try:
        process = await _spawn(services, "runtime", words, folder, stdin=PIPE, python=section.python)
    except OSError as error:
        raise LearnerFault(f"runtime.python: cannot start {section.python}: {error.strerror or error}") from error
    assert process.stdin is not None
    process.stdin.write(json.dumps(config).encode())
    await process.stdin.drain()
    process.stdin.close()


async def _spawn(
    services: Services, name: str, words: list[str], folder: Path, *, stdin: int = DEVNULL, python: Path | None = None
) -> Process:
    log = folder / f"{name}.log"
    with log.open("ab") as output:
        process = await asyncio.create_subprocess_exec(
            str(python or sys.executable),
            *words,
            stdin=stdin,
            stdout=output,
            stderr=output,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            start_new_session=True,
        )
    services.children[name] = (process, log)
    return process
