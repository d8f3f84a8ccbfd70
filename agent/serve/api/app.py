"""The public application: routes, and the handlers that are too small for files of their own."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

import msgspec
from aiohttp import web

from agent.engines.base import EngineFault
from agent.engines.client import HttpEngine
from agent.metrics_page import metrics_page
from agent.serve.api.chat import ChatApi
from agent.serve.api.endpoints import Endpoints
from agent.serve.api.events import EventHub, Figures
from agent.serve.api.guide import Guide
from agent.serve.api.limits import Keys
from agent.serve.api.metrics import Metrics
from agent.serve.api.owned import OwnedApi
from agent.serve.api.page import Page
from agent.serve.api.page_api import PageApi
from agent.serve.api.progress import Progress, as_json
from agent.serve.api.request_ids import request_ids, show_request_id
from agent.serve.api.samples import Samples
from agent.serve.api.verdicts import VerdictApi
from agent.serve.api.whose import Viewer
from agent.serve.children.learner import LearnerState
from agent.serve.children.simulated import SimulatedUsers
from agent.serve.config import ServeRecipe
from agent.serve.conversations.delivery import Delivery
from agent.serve.conversations.journal import Journal
from agent.serve.conversations.judges import Judges
from agent.serve.doors.audit import FILE as AUDIT_FILE
from agent.serve.doors.audit import Audit
from agent.serve.doors.door import PublicDoor
from agent.serve.versions.canary import Canary
from agent.serve.versions.publishing import Versions
from agent.serve.versions.rollback import Rollbacks
from agent.store.client import StoreClient
from agent.store.database_thread import DatabaseThread
from agent.wire.body import body_of
from agent.wire.errors import ApiError, errors_as_json, json_response


class _VersionRequest(msgspec.Struct, forbid_unknown_fields=True):
    version: int


class _ReturnRequest(msgspec.Struct, forbid_unknown_fields=True):
    without: list[str] = []


@dataclass
class Parts:
    """Everything that the public application stands on; `agent.serve.server` puts it together."""

    recipe: ServeRecipe
    thread: DatabaseThread
    journal: Journal
    engine: HttpEngine
    store: StoreClient
    versions: Versions
    delivery: Delivery
    chat: ChatApi
    keys: Keys
    hub: EventHub
    figures: Figures
    metrics: Metrics
    learner: Callable[[], LearnerState]
    engine_fault: Callable[[], str]
    judges: Judges
    rollbacks: Rollbacks
    canary: Canary | None
    owner_fault: Callable[[], str] = lambda: ""
    samples: Samples = field(default_factory=Samples)
    progress: Callable[[], Progress | None] = lambda: None
    guide: Guide | None = None
    simulated: SimulatedUsers | None = None
    started_at: float = field(default_factory=time.time)


class PublicApi:
    """Handlers over `Parts`."""

    def __init__(self, parts: Parts) -> None:
        self._parts = parts
        signals = parts.recipe.serve.feedback.signals
        self._page = PageApi(parts.keys, parts.thread, parts.journal, parts.guide, parts.simulated, signals)
        self._verdicts = VerdictApi(
            parts.recipe.serve,
            keys=parts.keys,
            thread=parts.thread,
            journal=parts.journal,
            delivery=parts.delivery,
            hub=parts.hub,
            figures=parts.figures,
            metrics=parts.metrics,
            judges=parts.judges,
            canary=parts.canary,
            learner=parts.learner,
            with_style=self._page.with_style,
        )
        self._owned = OwnedApi(parts.keys, parts.thread, parts.journal, parts.delivery)

    def application(self) -> web.Application:
        """The aiohttp application."""
        recipe, keys = self._parts.recipe, self._parts.keys
        door = PublicDoor(
            recipe.serve.doors, recipe.serve.host, caller=keys.caller, audit=Audit(recipe.folder / AUDIT_FILE)
        )
        app = web.Application(
            client_max_size=recipe.serve.max_body_bytes,
            middlewares=[request_ids, self._counted, errors_as_json, door.check],
        )
        app.on_response_prepare.append(door.mark)
        app.add_routes(
            [
                web.get("/v1/models", self._models),
                web.get("/v1/models/{name}", self._model),
                web.get("/v1/versions", self._versions),
                web.post("/v1/versions/pin", self._pin),
                web.post("/v1/versions/unpin", self._unpin),
                web.post("/v1/versions/rollback", self._rollback),
                web.get("/v1/set_aside", self._aside),
                web.post("/v1/set_aside/return", self._return_aside),
                web.get("/v1/events", self._events),
                web.get("/healthz", self._healthz),
                web.get("/health", self._healthz),
                web.get("/metrics", self._metrics),
            ]
        )
        parts = self._parts
        app.add_routes(Endpoints(parts.chat, parts.recipe.serve.clients, parts.thread, parts.journal).routes())
        app.add_routes(self._verdicts.routes())
        app.add_routes(self._owned.routes())
        app.add_routes([*Page().routes(), *self._page.routes()])
        app.on_response_prepare.append(show_request_id)
        app.on_shutdown.append(self._shutdown)
        return app

    async def _shutdown(self, _: web.Application) -> None:
        self._parts.hub.close()

    @web.middleware
    async def _counted(
        self, request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
    ) -> web.StreamResponse:
        response = await handler(request)
        route = request.match_info.route.resource
        name = route.canonical if route is not None else "unknown"
        self._parts.metrics.requests.labels(name, str(response.status)).inc()
        return response

    async def _models(self, request: web.Request) -> web.Response:
        self._parts.keys.caller(request)
        return json_response(self._parts.chat.models())

    async def _model(self, request: web.Request) -> web.Response:
        self._parts.keys.caller(request)
        [card] = self._parts.chat.models()["data"]
        if request.match_info["name"] != card["id"]:
            raise ApiError(404, f"no model {request.match_info['name']}", code="model_not_found")
        return json_response(card)

    async def _versions(self, request: web.Request) -> web.Response:
        self._parts.keys.caller(request)
        return json_response(await self._page.with_scores(await self._parts.versions.listing()))

    async def _pin(self, request: web.Request) -> web.Response:
        self._parts.keys.check_admin(request)
        await self._parts.versions.pin()
        return json_response(await self._parts.versions.listing())

    async def _unpin(self, request: web.Request) -> web.Response:
        self._parts.keys.check_admin(request)
        await self._parts.versions.unpin()
        return json_response(await self._parts.versions.listing())

    async def _rollback(self, request: web.Request) -> web.Response:
        parts = self._parts
        parts.keys.check_admin(request)
        try:
            wanted = msgspec.json.decode(await body_of(request), type=_VersionRequest)
        except msgspec.DecodeError as error:
            raise ApiError(400, f'bad request: {error}; write {{"version": 3}}') from error
        new, aside = await parts.rollbacks.to(wanted.version)
        return json_response({"version": new, "set_aside": aside, **await parts.versions.listing()})

    async def _aside(self, request: web.Request) -> web.Response:
        self._parts.keys.check_admin(request)
        return json_response({"judges": msgspec.to_builtins(await self._parts.store.aside())})

    async def _return_aside(self, request: web.Request) -> web.Response:
        self._parts.keys.check_admin(request)
        try:
            wanted = msgspec.json.decode(await body_of(request) or b"{}", type=_ReturnRequest)
        except msgspec.DecodeError as error:
            raise ApiError(400, f'bad request: {error}; write {{"without": ["<judge>"]}} or {{}}') from error
        return json_response({"returned": await self._parts.store.give_back(wanted.without)})

    async def _events(self, request: web.Request) -> web.StreamResponse:
        parts = self._parts
        viewer = Viewer(parts.keys.caller(request), request.query.get("user"), parts.recipe.serve.events)
        hello = {"model": parts.recipe.model_name, **self.figures(), **await parts.versions.listing()}
        hello |= {"samples": parts.samples.rows, "page": self._page.hello(request)}
        return await parts.hub.serve(request, hello, viewer=viewer, write_s=parts.recipe.serve.write_s)

    def figures(self) -> dict[str, Any]:
        """The running figures, with what is served now."""
        parts = self._parts
        return {
            **parts.figures.snapshot(),
            "version": parts.versions.served,
            "pinned": parts.versions.pinned,
            "running": parts.chat.gate.inside,
            "learner": parts.learner().state,
            "learning": parts.learner().learning,
            "progress": as_json(parts.progress()),
            "simulated": self._page.simulated(),
        }

    async def _healthz(self, request: web.Request) -> web.Response:
        parts = self._parts
        engine, store = parts.engine_fault(), ""
        if not engine:
            try:
                async with asyncio.timeout(5.0):
                    await parts.engine.health()
            except (EngineFault, TimeoutError) as error:
                engine = str(error) or "no answer"
        if not await parts.store.healthy():
            store = "the episode store does not answer; feedback waits in the journal"
        learner = parts.learner()
        detail = learner.detail if self._shows_a_key(request) else ""  # it may be the end of the learner's log
        behind = parts.owner_fault()
        idle = learner.state in ("waiting", "failed", "finished")
        well = not (engine or store or behind or parts.delivery.fault or idle)
        body = {
            "status": "ok" if well else "down" if engine else "degraded",
            "engine": engine or "ok",
            "store": store or parts.delivery.fault or "ok",
            "learner": msgspec.to_builtins(learner) | {"detail": detail},
            "learning": learner.learning,
            "learning_reason": detail,
            "version": parts.versions.served,
            "pinned": parts.versions.pinned,
            **({"owner": behind or "ok"} if parts.versions.owner else {}),
            "uptime_s": time.time() - parts.started_at,
        }
        return json_response(body, 503 if engine else 200)

    def _shows_a_key(self, request: web.Request) -> bool:
        try:
            self._parts.keys.caller(request)
        except ApiError:
            return False
        return True

    async def _metrics(self, _: web.Request) -> web.Response:
        parts = self._parts
        page, learner = parts.metrics, parts.learner()
        page.running.set(parts.chat.gate.inside)
        page.version.set(parts.versions.served)
        page.pinned.set(parts.versions.pinned)
        page.learner_up.set(learner.state == "running")
        page.learner_restarts.set(learner.restarts)
        for state, count in (await parts.thread.run(parts.journal.statuses)).items():
            page.queue.labels(state).set(count)
        return metrics_page(page.registry)
