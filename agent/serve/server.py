"""The server's life: journal, engine, store, learner up in this order, and down in the other."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import time
from collections.abc import AsyncIterator, Coroutine
from pathlib import Path
from typing import Any

from aiohttp import web

from agent.doors.keys import run_key
from agent.engines.base import EngineFault
from agent.engines.client import HttpEngine
from agent.serve.api.app import Parts, PublicApi
from agent.serve.api.chat import ChatApi
from agent.serve.api.events import EventHub, Figures
from agent.serve.api.guide import Guide
from agent.serve.api.limits import Keys
from agent.serve.api.metrics import Metrics
from agent.serve.api.progress import Progress, ProgressLog, ProgressWatch
from agent.serve.api.samples import sample_of
from agent.serve.children.engine import EngineChild
from agent.serve.children.learner import LearnerChild, LearnerState, learner_command
from agent.serve.children.simulated import SimulatedUsers
from agent.serve.children.store import StoreChild
from agent.serve.config import ServeError, ServeRecipe
from agent.serve.conversations.delivery import Delivery
from agent.serve.conversations.journal import Journal
from agent.serve.versions.engine_proxy import EngineProxy
from agent.serve.versions.publishing import Versions
from agent.serve.versions.version_table import Version
from agent.store.client import StoreClient
from agent.store.database_thread import DatabaseThread
from agent.store.protocol import StoreFault

log = logging.getLogger(__name__)

_STATUS_S = 1.0
_PUBLISH_S = 600.0


class Server:
    """One server of one recipe.

        async with Server.running(recipe, recipe_path, overrides, learn=True) as server:
            print(server.url); await stop.wait()

    `learn`: the learner is started as a child that shares nothing but HTTP with this process.
    """

    def __init__(self, recipe: ServeRecipe) -> None:
        self.recipe = recipe
        self.url = ""
        self.failed = asyncio.Event()
        """Set when a part of the server has failed that it cannot do without; the log says which."""
        self.engine_proxy_url = ""
        self.store_url = ""
        self.learner: LearnerChild | None = None
        self._engine_child: EngineChild | None = None
        self._key = ""
        self._progress: Progress | None = None

    @classmethod
    @contextlib.asynccontextmanager
    async def running(
        cls, recipe: ServeRecipe, source: Path, overrides: list[str], *, learn: bool
    ) -> AsyncIterator[Server]:
        """Start everything; it serves when the block begins.

        Raises `ServeError`, `DoorFault`, `EngineFault` or `StoreFault`.
        """
        server = cls(recipe)
        async with contextlib.AsyncExitStack() as stack:
            await server._start(stack, source, overrides, learn=learn)
            yield server

    async def _start(
        self, stack: contextlib.AsyncExitStack, source: Path, overrides: list[str], *, learn: bool
    ) -> None:
        recipe, config = self.recipe, self.recipe.serve
        keys, metrics = Keys.read(config), Metrics()
        self._key = await asyncio.to_thread(run_key, recipe.run_dir, recipe.key_file)
        model = recipe.model_folder(str(source))
        renderer = await asyncio.to_thread(recipe.runtime.chat.load, model)
        recipe.folder.mkdir(parents=True, exist_ok=True)
        journal = await asyncio.to_thread(Journal, recipe.folder / "journal.sqlite", max_bytes=config.max_journal_bytes)
        thread = DatabaseThread(journal)
        stack.push_async_callback(asyncio.to_thread, thread.close)
        hub, figures = EventHub(), Figures()
        guide = await asyncio.to_thread(_guide_of, recipe)
        simulated = None
        if guide is not None:
            log_file = recipe.run_dir / "simulated.log"
            simulated = SimulatedUsers(source, overrides, log_file, per_minute=config.simulated_per_minute)
            stack.push_async_callback(simulated.stop)
        store = await self._open_store(stack)
        stored = (await store.status()).version
        versions = Versions(
            thread,
            journal,
            recipe.folder / "versions",
            keep=config.keep_versions,
            publish_s=_PUBLISH_S,
            on_change=lambda version, pinned: _tell(hub, version, pinned),
        )
        current = await versions.load(model, stored)
        engine = await self._open_engine(stack, versions)
        stack.push_async_callback(versions.settle)
        if stored < current.number:
            await store.set_version(current.number)
        delivery = Delivery(thread, journal, store, config, worker=f"{recipe.name}-serve")
        chat = ChatApi(
            recipe,
            renderer,
            engine,
            (await engine.health()).max_context,
            thread=thread,
            journal=journal,
            versions=versions,
            keys=keys,
            hub=hub,
            figures=figures,
            metrics=metrics,
        )
        parts = Parts(
            recipe=recipe,
            thread=thread,
            journal=journal,
            engine=engine,
            store=store,
            versions=versions,
            delivery=delivery,
            chat=chat,
            keys=keys,
            hub=hub,
            figures=figures,
            metrics=metrics,
            learner=lambda: self.learner.state if self.learner is not None else LearnerState(),
            engine_fault=lambda: self._engine_child.fault if self._engine_child is not None else "",
            progress=lambda: self._progress,
            guide=guide,
            simulated=simulated,
        )
        api = PublicApi(parts)
        proxy = EngineProxy(versions, lambda: engine.url, timeout_s=config.generate_s, key=self._key)
        self.engine_proxy_url = await _listen(stack, proxy.application(), "127.0.0.1", 0)
        await self._background(stack, delivery.run())
        await self._background(stack, self._watch(parts, api))
        if learn:
            command = learner_command(source, overrides, store=self.store_url, engine=self.engine_proxy_url)
            self.learner = LearnerChild(
                command,
                recipe.run_dir / "learner.log",
                restarts=config.learner_restarts,
                first_backoff_s=config.learner_backoff_s,
                settled_s=config.learner_settled_s,
                pinned=lambda: versions.pinned,
                key=self._key,
            )
            await self._background(stack, self.learner.run())
        self.url = await _listen(stack, api.application(), config.host, config.port)
        if simulated is not None:
            simulated.url = self.url

    async def _open_store(self, stack: contextlib.AsyncExitStack) -> StoreClient:
        self.store_url = self.recipe.store.url or ""
        if not self.store_url:
            child = StoreChild(self.recipe, self._key)
            self.store_url = await child.start()
            stack.push_async_callback(child.close)
            await self._background(stack, child.keep())
        store = StoreClient(self.store_url, key=self._key)
        stack.push_async_callback(store.close)
        return store

    async def _open_engine(self, stack: contextlib.AsyncExitStack, versions: Versions) -> HttpEngine:
        """The engine, serving what `versions` says."""
        urls = self.recipe.engine.urls
        if not urls:
            self._engine_child = EngineChild(self.recipe, versions.weights, self._key)
            urls = (await self._engine_child.start(),)
            stack.push_async_callback(self._engine_child.close)
        engine = HttpEngine(urls[0], timeout_s=self.recipe.serve.generate_s, key=self._key)
        stack.push_async_callback(engine.close)
        await versions.align(engine)
        if self._engine_child is not None:
            await self._background(stack, self._engine_child.keep(engine, versions))
        return engine

    async def _background(self, stack: contextlib.AsyncExitStack, work: Coroutine[Any, Any, None]) -> None:
        """Run `work` until the end; a fault that nobody foresaw ends the server, so that someone starts it again."""
        task = asyncio.create_task(work)

        async def end() -> None:
            task.cancel()
            await asyncio.wait((task,))

        def ended(done: asyncio.Task[None]) -> None:
            if not done.cancelled() and (error := done.exception()) is not None:
                log.critical("a part of the server has failed", exc_info=error)
                self.failed.set()

        task.add_done_callback(ended)
        stack.push_async_callback(end)

    async def _watch(self, parts: Parts, api: PublicApi) -> None:
        """Tell the watchers how things stand, every second; the learner's metrics as they are written."""
        metrics = _Tail(self.recipe.run_dir / "metrics.jsonl")
        learner: dict[str, Any] = {}
        progress, progress_log = ProgressWatch(self.recipe.learner.batch_size), ProgressLog()
        while True:
            for line in await asyncio.to_thread(metrics.lines):
                learner = {k: v for k, v in line.items() if k in _SHOWN}
                parts.hub.publish("learner", learner)
            store: dict[str, Any] = {}
            status = None
            with contextlib.suppress(StoreFault):
                status = await parts.store.status()
                store = {"ready": status.ready, "claimed": status.claimed, "trained": status.trained}
                parts.metrics.ready.set(status.ready)
            self._progress = progress.look(status, parts.learner(), parts.versions.pinned)
            if line := progress_log.line(self._progress, time.monotonic()):
                log.info("%s", line)
            figures = {**api.figures(), "store": store, "learner_metrics": learner}
            with contextlib.suppress(StoreFault, TimeoutError):
                figures["conversations"] = await parts.thread.run(parts.journal.statuses)
            sample = sample_of(time.time(), figures)
            parts.samples.add(sample)
            parts.hub.publish("status", {**figures, "sample": sample}, keep=False)
            await asyncio.sleep(_STATUS_S)


_SHOWN = (
    "step",
    "policy/version",
    "rollout/reward",
    "gate/share",
    "lag/mean",
    "lag/max",
    "queue/ready",
    "critic/explained_variance",
    "evaluation/success",
    "time/step_s",
)


class _Tail:
    """The lines of a growing JSONL file that have come since the last look; from its end on at first."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._at = path.stat().st_size if path.exists() else 0

    def lines(self) -> list[dict[str, Any]]:
        if not self._path.exists():
            return []
        with self._path.open("rb") as file:
            file.seek(0, os.SEEK_END)
            if file.tell() < self._at:  # begun anew
                self._at = 0
            file.seek(self._at)
            whole, _, _ = file.read().rpartition(b"\n")
        self._at += len(whole) + bool(whole)
        parsed = []
        for line in whole.splitlines():
            with contextlib.suppress(ValueError):
                parsed.append(json.loads(line))
        return parsed


def _guide_of(recipe: ServeRecipe) -> Guide | None:
    try:
        return Guide.of(recipe)
    except ValueError as error:
        raise ServeError(f"env.kwargs: {error}") from error


def _tell(hub: EventHub, version: Version, pinned: bool) -> None:
    hub.publish(
        "version", {"version": version.number, "source": version.source, "origin": version.origin, "pinned": pinned}
    )


async def _listen(stack: contextlib.AsyncExitStack, app: web.Application, host: str, port: int) -> str:
    # A client that goes away cancels its handler, which ends its generation.
    runner = web.AppRunner(app, handler_cancellation=True, access_log=None, shutdown_timeout=5.0)
    await runner.setup()
    stack.push_async_callback(runner.cleanup)
    try:
        await web.TCPSite(runner, host, port, backlog=1024).start()
    except OSError as error:
        raise EngineFault(f"cannot listen on {host}:{port}: {error.strerror or error}; choose another port") from error
    actual = runner.addresses[0][1]
    return f"http://{f'[{host}]' if ':' in host else host}:{actual}"
