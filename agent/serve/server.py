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
from agent.serve.children.learner import LearnerChild, LearnerState, learner_command, why_ended
from agent.serve.children.simulated import SimulatedUsers
from agent.serve.children.store import StoreChild
from agent.serve.config import ServeError, ServeRecipe
from agent.serve.conversations.delivery import Delivery
from agent.serve.conversations.journal import Journal
from agent.serve.conversations.judges import Judges
from agent.serve.doors.listening import Bounds, Listener, bounds_of, listening
from agent.serve.doors.own_key import OWN_KEY_NAME, OwnKey, own_key
from agent.serve.doors.private_files import tighten
from agent.serve.versions.canary import Canary
from agent.serve.versions.engine_proxy import EngineProxy
from agent.serve.versions.following import Follower
from agent.serve.versions.publishing import Versions
from agent.serve.versions.rollback import Rollbacks
from agent.serve.versions.starting_adapter import starting_weights
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
        self.own_key: OwnKey | None = None
        """The key that people show, where the server has made it itself."""
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
        if learn and config.replicas.owner is not None:
            raise ServeError("--learn: a replica has no learner; the owner (serve.replicas.owner) has it")
        keys, metrics = Keys.read(config), Metrics()
        bounds = bounds_of(config.doors, generations=config.max_concurrent, write_s=2 * config.write_s)
        await asyncio.to_thread(tighten, recipe.run_dir, recipe.folder)
        self._key = await asyncio.to_thread(run_key, recipe.run_dir, recipe.key_file)
        model = recipe.model_folder(str(source))
        renderer = await asyncio.to_thread(recipe.runtime.chat.load, model)
        recipe.folder.mkdir(parents=True, exist_ok=True)
        if not keys and not config.doors.open:
            self.own_key = await asyncio.to_thread(own_key, recipe.folder)
            keys = Keys({self.own_key.key: OWN_KEY_NAME})
        journal = await asyncio.to_thread(Journal, recipe.folder / "journal.sqlite", max_bytes=config.max_journal_bytes)
        thread = DatabaseThread(journal)
        stack.push_async_callback(asyncio.to_thread, thread.close)
        hub, figures = EventHub(), Figures(config.figures.styles)
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
            tried_first=config.canary is not None,
            on_change=lambda version, pinned: _tell(hub, version, pinned),
        )
        start = await asyncio.to_thread(starting_weights, recipe, model)
        follower: Follower | None = None
        if config.replicas.owner is not None:
            follower = Follower(config.replicas.owner, self._key, poll_s=config.replicas.poll_s)
            versions.owner = follower.owner
            if (owned := await follower.first(versions)) is not None:
                start, stored = await versions.adopt(owned.version, Path(owned.path)), owned.version
        current = await versions.load(start, stored)
        engine = await self._open_engine(stack, versions)
        stack.push_async_callback(versions.settle)
        if follower is not None:
            await self._background(stack, follower.run(versions))
        elif stored < current.number:
            await store.set_version(current.number)
        recordings = recipe.run_dir / "batches"  # where the learner of the run keeps some, with learner.record_batches
        worker = f"{recipe.name}-{recipe.folder.name}"
        delivery = Delivery(thread, journal, store, config, worker=worker, recordings=recordings)
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
        rollbacks = Rollbacks(
            thread, journal, versions, store, recipe.run_dir, end_learner=lambda: _interrupted(self.learner)
        )
        await rollbacks.load()
        canary = None
        if config.canary is not None and follower is None:
            canary = Canary(versions, config.canary, on_change=lambda trial: hub.publish("canary", trial))
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
            rollbacks=rollbacks,
            canary=canary,
            judges=Judges(self._key, config.judged_by),
            engine_fault=lambda: self._engine_child.fault if self._engine_child is not None else "",
            owner_fault=lambda: follower.fault if follower is not None else "",
            progress=lambda: self._progress,
            guide=guide,
            simulated=simulated,
        )
        api = PublicApi(parts)
        proxy = EngineProxy(versions, lambda: engine.url, timeout_s=config.generate_s, key=self._key)
        self.engine_proxy_url, _ = await _listen(
            stack, proxy.application(), config.replicas.host, config.replicas.port, bounds
        )
        await self._background(stack, delivery.run())
        await self._background(stack, rollbacks.run())
        if canary is not None:
            await self._background(stack, canary.run())
        await self._background(stack, self._watch(parts, api))
        if learn:
            command = learner_command(source, overrides, store=self.store_url, engine=self.engine_proxy_url)
            self.learner = LearnerChild(
                command,
                recipe.run_dir / "learner.log",
                restarts=config.learner_restarts,
                first_backoff_s=config.learner_backoff_s,
                settled_s=config.learner_settled_s,
                pinned=lambda: versions.pinned or rollbacks.unfinished,
                key=self._key,
                why_ended=lambda: why_ended(recipe.run_dir, recipe.learner.steps),
            )
            await self._background(stack, self.learner.run())
        self.url, door = await _listen(stack, api.application(), config.host, config.port, bounds)
        metrics.connections.set_function(lambda: door.visitors.inside)
        metrics.connections_refused.set_function(lambda: door.visitors.refused + door.visitors.dropped)
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
        trials = self.recipe.serve.canary is not None
        engine = HttpEngine(urls[0], timeout_s=self.recipe.serve.generate_s, key=self._key, goes_back=trials)
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
        said = ""
        progress, progress_log = ProgressWatch(self.recipe.learner.batch_size), ProgressLog()
        while True:
            state = parts.learner()
            if state.learning != said:
                said = state.learning
                parts.hub.publish("learning", {"learning": said, "reason": state.detail})
            for line in await asyncio.to_thread(metrics.lines):
                learner = {k: v for k, v in line.items() if k in _SHOWN}
                parts.hub.publish("learner", learner)
            store: dict[str, Any] = {}
            status = None
            with contextlib.suppress(StoreFault):
                status = await parts.store.status()
                store = {"ready": status.ready, "claimed": status.claimed, "trained": status.trained}
                store["takeable"] = status.metrics.get("takeable", status.ready)
                parts.metrics.ready.set(status.ready)
            self._progress = progress.look(status, parts.learner(), parts.versions.pinned)
            if told := progress_log.line(self._progress, time.monotonic()):
                log.info("%s", told)
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


async def _interrupted(learner: LearnerChild | None) -> None:
    if learner is not None:
        await learner.interrupt()


async def _listen(
    stack: contextlib.AsyncExitStack, app: web.Application, host: str, port: int, bounds: Bounds
) -> tuple[str, Listener]:
    try:
        return await stack.enter_async_context(listening(app, host, port, bounds))
    except OSError as error:
        raise EngineFault(f"cannot listen on {host}:{port}: {error.strerror or error}; choose another port") from error
