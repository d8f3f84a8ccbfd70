"""/v1/feedback and /v1/feedback/preference: what people say about responses."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from typing import Any

from aiohttp import web

from agent.serve.api.events import EventHub, Figures
from agent.serve.api.limits import Keys, RateLimit, caller_of
from agent.serve.api.metrics import Metrics
from agent.serve.api.whose import Owner, trusts
from agent.serve.children.learner import LearnerState
from agent.serve.config import ServeConfig
from agent.serve.conversations.delivery import Delivery
from agent.serve.conversations.feedback import Feedback, read_feedback, read_preference
from agent.serve.conversations.journal import Answered, Journal
from agent.serve.conversations.judges import Judges
from agent.serve.conversations.judging import Judging
from agent.serve.versions.canary import Canary
from agent.store.database_thread import DatabaseThread
from agent.store.protocol import StoreFault
from agent.wire.body import body_of
from agent.wire.errors import json_response


class VerdictApi:
    """The handlers. An answer of 200 means that the verdict is on the disk."""

    def __init__(
        self,
        config: ServeConfig,
        *,
        keys: Keys,
        thread: DatabaseThread,
        journal: Journal,
        delivery: Delivery,
        hub: EventHub,
        figures: Figures,
        metrics: Metrics,
        judges: Judges,
        canary: Canary | None,
        learner: Callable[[], LearnerState],
        with_style: Callable[[dict[str, Any], str, str], Awaitable[dict[str, Any]]],
    ) -> None:
        self._config, self._keys, self._thread, self._journal, self._delivery = config, keys, thread, journal, delivery
        self._hub, self._figures, self._metrics = hub, figures, metrics
        self._judges, self._canary, self._learner, self._with_style = judges, canary, learner, with_style
        self._judging = Judging(thread, journal, delivery, ttl_s=config.feedback_ttl_s)
        self._rate = RateLimit(config.feedback_per_minute, config.burst)

    def routes(self) -> list[web.RouteDef]:
        """Both paths."""
        return [
            web.post("/v1/feedback", self._feedback),
            web.post("/v1/feedback/preference", self._preference),
        ]

    async def _feedback(self, request: web.Request) -> web.Response:
        key = self._caller(request)
        given = read_feedback(await body_of(request), self._config.feedback.signals)
        [answered] = await self._judging.give([given], key, self._judge(request, key))
        await self._tell(key, given, answered)
        return json_response(await self._answer(answered))

    async def _preference(self, request: web.Request) -> web.Response:
        key = self._caller(request)
        pair = read_preference(await body_of(request))
        answers = await self._judging.prefer(pair, key, self._judge(request, key))
        for given, answered in zip(pair, answers, strict=True):
            await self._tell(key, given, answered)
        chosen, rejected = [await self._answer(answered) for answered in answers]
        return json_response({"chosen": chosen, "rejected": rejected})

    def _caller(self, request: web.Request) -> str:
        key = self._keys.caller(request)
        self._rate.take(caller_of(request, key))
        return key

    def _judge(self, request: web.Request, key: str) -> Callable[[str], str]:
        """The name under which a verdict counts, of the user whose conversation it is about."""
        return lambda user: self._judges.name(key, user, request.remote or "")

    async def _tell(self, key: str, given: Feedback, answered: Answered) -> None:
        """Count what was given, and tell the watchers."""
        if answered.duplicate:
            return
        self._metrics.feedback.labels("final" if answered.closed else "open").inc()
        trusted = trusts(self._config.figures, key)
        if answered.counted and answered.reward is not None:
            metadata = given.metadata if trusted else {}
            metadata = await self._with_style(metadata, answered.response, answered.conversation)
            self._figures.judged(answered.reward, metadata)
            if self._canary is not None:
                self._canary.judged(answered.sampled_by, answered.reward, answered.judge)
        if answered.closed:
            self._figures.finished()
        self._hub.publish(
            "feedback",
            {},  # a mean before and after one verdict would tell that verdict: figures come once a second
            owner=Owner(key, answered.user),
            details={
                **self._figures.snapshot(),
                "response_id": answered.response,
                "reward": answered.reward,
                "version": answered.version,
                "final": answered.closed,
                "metadata": given.metadata,
            },
        )

    async def _answer(self, answered: Answered) -> dict[str, Any]:
        delivered = answered.closed and answered.trainable and await self._deliver(answered.conversation)
        learner = self._learner()
        return {
            "response_id": answered.response,
            "conversation": answered.conversation,
            "reward": answered.reward,
            "final": answered.closed,
            "counted": answered.counted,
            "duplicate": answered.duplicate,
            "trainable": answered.trainable,
            "in_store": delivered,
            "learning": learner.learning != "ended" and learner.state != "off",
            "policy_version": answered.version,
        }

    async def _deliver(self, conversation: str) -> bool:
        """Give the store a moment to take the episode; if it does not, the journal keeps it and delivers later."""
        try:
            async with asyncio.timeout(self._config.delivery_wait_s):
                await asyncio.shield(asyncio.ensure_future(_quietly(self._delivery, conversation)))
        except TimeoutError:
            self._delivery.wake()
            return False
        status = await self._thread.run(lambda: self._journal.status_of(conversation))
        if status == "answered":
            self._delivery.wake()
        return status == "delivered"


async def _quietly(delivery: Delivery, conversation: str) -> None:
    with contextlib.suppress(StoreFault, TimeoutError):  # the deliverer tries again, and says so in /healthz
        await delivery.deliver(conversation)
