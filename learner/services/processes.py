"""The other processes of a run: store, engines, runtime. What has no address in the recipe is started here.

async with Services.start(recipe, model=..., folder=..., store_config=...) as services:
    claim = await services.store.claim(128, version=0, wait_s=5)

The end comes in order: runtime, engines, store.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from agent.engines.adapters import base_of
from agent.engines.base import Engine, EngineFault, EngineHealth
from agent.engines.client import HttpEngine
from agent.store.client import StoreClient
from learner.config import Recipe
from learner.services.engine_fleet import Fleet
from learner.services.shared_key import shared_key
from learner.services.store_and_runtime import RUNTIME, STOP_LIMIT_S, Children
from learner.services.weight_transfer import Weights

_ASK_LIMIT_S = 10.0
_EVALUATION_RUNTIME = "evaluation-runtime"


@dataclass
class Services:
    """Clients of everything the learner talks to, and the store and runtimes that were started here.

    `evaluation_fleet`: the engines of `evaluation.engines`, inside `evaluation_engines`.
    """

    store: StoreClient
    children: Children
    fleet: Fleet | None = None
    evaluation_fleet: Fleet | None = None

    @property
    def engines(self) -> list[Engine]:
        """The engines that serve the newest version now; see `learner.services.engine_fleet`."""
        return self.fleet.engines if self.fleet is not None else []

    async def engine_healths(self) -> list[EngineHealth]:
        """What the engines that answer say of themselves."""
        return await self.fleet.healths() if self.fleet is not None else []

    def check(self) -> None:
        """Raise `LearnerFault` if store or runtime has ended, or an engine for good: nothing good comes of waiting."""
        self.children.check()
        for fleet in (self.fleet, self.evaluation_fleet):
            if fleet is not None:
                fleet.check()

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
        checkpoint_version: int = 0,
        private_store: bool = False,
        private_engines: bool = False,
    ) -> AsyncIterator[Services]:
        """Start what the recipe gives no address for; logs, ports and the store's file go to `folder`.

        When this returns the engines serve `model` as `version`. None: as the store's own, if that is
        `checkpoint_version`, the one that a checkpoint gives `model`; else as one that nobody has seen, for what a
        session before has published, and a checkpoint does not hold, is of other weights. `private_store`: start a
        store even so, and with it a runtime (one elsewhere cannot know of that store): for stages that are not the run
        itself. `private_engines`: start engines even if the recipe has addresses, for what must not disturb them.
        """
        await asyncio.to_thread(folder.mkdir, parents=True, exist_ok=True)
        key = await asyncio.to_thread(shared_key, recipe)
        children = Children(folder, key)
        async with contextlib.AsyncExitStack() as stack:
            stack.push_async_callback(children.stop, "store", STOP_LIMIT_S)
            if recipe.store.url and not private_store:
                url = recipe.store.url
            else:
                url = await children.start_store(store_config)
            services = cls(StoreClient(url, key=key), children)
            stack.push_async_callback(services.store.close)
            if version is None:
                version = (await services.store.status()).version
                if not recipe.learner.online:  # there the server names what its engines serve
                    # What engines have when a run is new is of another run.
                    is_new = max(version, checkpoint_version) == 0
                    asked = () if private_engines or is_new else recipe.engine.urls
                    served = await asyncio.gather(*(_version_at(address, key) for address in asked))
                    version = free_version(version, checkpoint_version, served)
            services.fleet = await stack.enter_async_context(
                Fleet.start(
                    recipe,
                    model=model,
                    version=version,
                    folder=folder,
                    use_addresses=not private_engines,
                    adopt=recipe.learner.online and not private_engines,
                )
            )
            if (recipe.runtime.launch and not recipe.learner.online) or private_store:
                # A runtime ends its own sandboxes, and is given the time for it.
                grace_s = max(STOP_LIMIT_S, recipe.runtime.limits.shutdown_s + 5.0)
                stack.push_async_callback(children.stop_all, RUNTIME, grace_s)
                own = recipe.evaluation.engines is not None and not private_store
                await children.start_runtimes(
                    recipe,
                    base_of(model) or model,  # an adapter says nothing of turns and their ends
                    store=services.store.url,
                    engines=services.fleet.urls,
                    tickets="train" if own else "all",
                )
            yield services

    @contextlib.asynccontextmanager
    async def evaluation_engines(
        self, recipe: Recipe, *, model: Path, version: int, folder: Path
    ) -> AsyncIterator[None]:
        """The engines of `evaluation.engines`, and a runtime of their own that runs evaluations alone, on this store.

        They serve `model` as `version` at first, whatever the engines of training do. Logs go to `folder`.
        """
        await asyncio.to_thread(folder.mkdir, parents=True, exist_ok=True)
        engine = recipe.engine.model_copy(
            update={"urls": (), "count": recipe.evaluation.engines, "transfer": "snapshot", "keep_stale_cache": False}
        )
        own = recipe.model_copy(update={"engine": engine})
        before = 0 if recipe.engine.urls else recipe.engine.count
        async with contextlib.AsyncExitStack() as stack:
            fleet = await stack.enter_async_context(
                Fleet.start(own, model=model, version=version, folder=folder, first_device=before)
            )
            grace_s = max(STOP_LIMIT_S, recipe.runtime.limits.shutdown_s + 5.0)
            stack.push_async_callback(self.children.stop, _EVALUATION_RUNTIME, grace_s)
            await self.children.start_runtime(
                own,
                base_of(model) or model,
                store=self.store.url,
                engines=fleet.urls,
                tickets="evaluate",
                name=_EVALUATION_RUNTIME,
            )
            self.evaluation_fleet = fleet
            try:
                yield
            finally:
                self.evaluation_fleet = None


def free_version(store: int, checkpoint: int, engines: Sequence[int]) -> int:
    """The store's version if it is the checkpoint's and no engine's is above it; else one above all that is known.

    An engine that does not say counts as -1.
    """
    newest = max(store, checkpoint, *engines)
    return store if newest == store == checkpoint else newest + 1


async def _version_at(url: str, key: str) -> int:
    """What the engine at `url` serves; -1 if it does not say."""
    engine = HttpEngine(url, key=key)
    try:
        async with asyncio.timeout(_ASK_LIMIT_S):
            return (await engine.health()).version
    except (EngineFault, TimeoutError):
        return -1
    finally:
        await engine.close()
