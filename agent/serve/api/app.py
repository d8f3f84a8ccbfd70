"""The public application: routes, and the handlers that are too small for files of their own."""

from __future__ import annotations

import asyncio
import contextlib
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
from agent.serve.api.events import EventHub, Figures
from agent.serve.api.guide import Guide
from agent.serve.api.limits import Keys, RateLimit, caller_of
from agent.serve.api.metrics import Metrics
from agent.serve.api.page import Page
from agent.serve.api.page_api import PageApi
from agent.serve.api.progress import Progress, as_json
from agent.serve.api.samples import Samples
from agent.serve.children.learner import LearnerState
from agent.serve.children.simulated import SimulatedUsers
from agent.serve.config import ServeRecipe
from agent.serve.conversations.delivery import Delivery
from agent.serve.conversations.feedback import read_feedback
from agent.serve.conversations.journal import Journal
from agent.serve.versions.publishing import Versions
from agent.store.client import StoreClient
from agent.store.database_thread import DatabaseThread
from agent.store.protocol import StoreFault
from agent.wire.body import body_of
from agent.wire.errors import ApiError, errors_as_json, json_response


class _VersionRequest(msgspec.Struct, forbid_unknown_fields=True):
    version: int


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
    samples: Samples = field(default_factory=Samples)
    progress: Callable[[], Progress | None] = lambda: None
    guide: Guide | None = None
    simulated: SimulatedUsers | None = None
    started_at: float = field(default_factory=time.time)


class PublicApi:
    """Handlers over `Parts`."""

    def __init__(self, parts: Parts) -> None:
        self._parts = parts
        config = parts.recipe.serve
        self._feedback_rate = RateLimit(config.feedback_per_minute, config.burst)
        self._page = PageApi(parts.keys, parts.thread, parts.journal, parts.guide, parts.simulated)

    def application(self) -> web.Application:
        """The aiohttp application."""
        app = web.Application(
            client_max_size=self._parts.recipe.serve.max_body_bytes, middlewares=[self._counted, errors_as_json]
        )
        app.add_routes(
            [
                web.get("/v1/models", self._models),
                web.get("/v1/models/{name}", self._model),
                web.post("/v1/chat/completions", self._parts.chat.complete),
                web.post("/v1/feedback", self._feedback),
                web.get("/v1/conversations/{id}", self._conversation),
                web.delete("/v1/conversations/{id}", self._delete_conversation),
                web.get("/v1/versions", self._versions),
                web.post("/v1/versions/pin", self._pin),
                web.post("/v1/versions/unpin", self._unpin),
                web.post("/v1/versions/rollback", self._rollback),
                web.get("/v1/events", self._events),
                web.get("/healthz", self._healthz),
                web.get("/metrics", self._metrics),
            ]
        )
        app.add_routes([*Page().routes(), *self._page.routes()])
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

    async def _feedback(self, request: web.Request) -> web.Response:
        parts, config = self._parts, self._parts.recipe.serve
        key = parts.keys.caller(request)
        self._feedback_rate.take(caller_of(request, key))
        given = read_feedback(await body_of(request))
        answered = await parts.thread.run(lambda: parts.journal.give(given, key, config.feedback_ttl_s))
        # On the disk from here on, whatever happens next.
        if not answered.duplicate:
            parts.metrics.feedback.labels("final" if answered.closed else "open").inc()
            parts.figures.judged(given.reward, await self._page.with_style(given, answered.conversation))
            if answered.closed:
                parts.figures.finished()
            parts.hub.publish(
                "feedback",
                {
                    "response_id": given.response_id,
                    "reward": given.reward,
                    "version": answered.version,
                    "final": answered.closed,
                    "metadata": _shown(given.metadata),
                    **parts.figures.snapshot(),
                },
            )
        delivered = answered.closed and answered.trainable and await self._deliver(answered.conversation)
        return json_response(
            {
                "response_id": given.response_id,
                "conversation": answered.conversation,
                "reward": given.reward,
                "final": answered.closed,
                "duplicate": answered.duplicate,
                "trainable": answered.trainable,
                "in_store": delivered,
                "policy_version": answered.version,
            }
        )

    async def _deliver(self, conversation: str) -> bool:
        """Give the store a moment to take the episode; if it does not, the journal keeps it and delivers later."""
        parts = self._parts
        try:
            async with asyncio.timeout(parts.recipe.serve.delivery_wait_s):
                await asyncio.shield(asyncio.ensure_future(_quietly(parts.delivery, conversation)))
        except TimeoutError:
            parts.delivery.wake()
            return False
        status = await parts.thread.run(lambda: parts.journal.status_of(conversation))
        if status == "answered":
            parts.delivery.wake()
        return status == "delivered"

    async def _conversation(self, request: web.Request) -> web.Response:
        key, name = self._parts.keys.caller(request), request.match_info["id"]
        conversation = await self._parts.thread.run(lambda: self._parts.journal.conversation(name))
        if conversation is None or conversation.key != key or conversation.status in ("wiping", "wiped"):
            raise ApiError(404, f"no conversation {name}", code="conversation_not_found")
        return json_response(
            {
                "id": conversation.id,
                "session": conversation.session or None,
                "status": conversation.status,
                "trainable": conversation.trainable,
                "messages": conversation.messages,
                "responses": [
                    {
                        "id": turn.response_id,
                        "policy_version": turn.version,
                        "reward": turn.reward,
                        "final": turn.final,
                        "created_at": turn.created_at,
                    }
                    for turn in conversation.turns
                ],
            }
        )

    async def _delete_conversation(self, request: web.Request) -> web.Response:
        key, name = self._parts.keys.caller(request), request.match_info["id"]
        await self._parts.thread.run(lambda: self._parts.journal.delete(name, key))
        self._parts.delivery.wake()
        return json_response({"id": name, "object": "conversation.deleted", "deleted": True})

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
        new = await parts.versions.rollback(wanted.version)
        with contextlib.suppress(StoreFault):  # said again at the next start
            await parts.store.set_version(new)
        return json_response({"version": new, **await parts.versions.listing()})

    async def _events(self, request: web.Request) -> web.StreamResponse:
        parts = self._parts
        parts.keys.caller(request)
        hello = {"model": parts.recipe.model_name, **self.figures(), **await parts.versions.listing()}
        hello |= {"samples": parts.samples.rows, "page": self._page.hello(request)}
        return await parts.hub.serve(request, hello, write_s=parts.recipe.serve.write_s)

    def figures(self) -> dict[str, Any]:
        """The running figures, with what is served now."""
        parts = self._parts
        return {
            **parts.figures.snapshot(),
            "version": parts.versions.served,
            "pinned": parts.versions.pinned,
            "running": parts.chat.gate.inside,
            "learner": parts.learner().state,
            "progress": as_json(parts.progress()),
            "simulated": self._page.simulated(),
        }

    async def _healthz(self, _: web.Request) -> web.Response:
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
        well = not (engine or store or parts.delivery.fault or learner.state in ("waiting", "failed"))
        body = {
            "status": "ok" if well else "down" if engine else "degraded",
            "engine": engine or "ok",
            "store": store or parts.delivery.fault or "ok",
            "learner": msgspec.to_builtins(learner),
            "version": parts.versions.served,
            "pinned": parts.versions.pinned,
            "uptime_s": time.time() - parts.started_at,
        }
        return json_response(body, 503 if engine else 200)

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


def _shown(metadata: dict[str, Any]) -> dict[str, Any]:
    """What watchers see of feedback's metadata: what the charts need, and no words that a user may have written."""
    return {
        k: v if not isinstance(v, str) else v[:40]
        for k in ("style", "phase", "target")
        if isinstance(v := metadata.get(k), str | int)
    }


async def _quietly(delivery: Delivery, conversation: str) -> None:
    with contextlib.suppress(StoreFault, TimeoutError):  # the deliverer tries again, and says so in /healthz
        await delivery.deliver(conversation)
