"""/v1/chat/completions, as OpenAI's clients speak it, streaming and not."""

from __future__ import annotations

import asyncio
import time
import uuid
from dataclasses import dataclass
from typing import Any

from aiohttp import web

from agent.chat.renderer import ChatRenderer
from agent.engines.base import ContextOverflow
from agent.episode import SamplingParams
from agent.serve.api.events import EventHub, Figures
from agent.serve.api.limits import Gate, Keys, RateLimit, caller_of
from agent.serve.api.metrics import Metrics
from agent.serve.config import ServeRecipe
from agent.serve.conversations.conversation import Plan, plan_turn
from agent.serve.conversations.journal import Journal
from agent.serve.conversations.reply import Reply, StreamingEngine, sample_reply
from agent.serve.versions.publishing import Versions
from agent.store.database_thread import DatabaseThread
from agent.wire.body import body_of
from agent.wire.errors import ApiError, as_api_error, json_response
from agent.wire.event_stream import EventWriter, SlowClient
from agent.wire.reply import shown_message, usage
from agent.wire.request import ChatRequest, read_chat_request

SESSION_HEADER = "X-Session-Id"
_LONG = 20_000  # characters from which on rendering would hold up the other streams
VERSION_HEADER = "X-Policy-Version"


@dataclass(frozen=True)
class _Work:
    """One request on its way: what was asked, from where it goes on, how it is sampled."""

    key: str
    request: ChatRequest
    plan: Plan
    sampling: SamplingParams
    trainable: bool
    response_id: str
    version: int
    started_at: float


class ChatApi:
    """The handler of chat completions. Everything that it needs comes from outside; it owns the order of things:

    check, plan, sample, write to the journal (durable), and only then the end of the answer.
    """

    def __init__(
        self,
        recipe: ServeRecipe,
        renderer: ChatRenderer,
        engine: StreamingEngine,
        max_context: int,
        *,
        thread: DatabaseThread,
        journal: Journal,
        versions: Versions,
        keys: Keys,
        hub: EventHub,
        figures: Figures,
        metrics: Metrics,
    ) -> None:
        self._recipe, self._config = recipe, recipe.serve
        self._renderer, self._engine = renderer, engine
        self._max_context = min(max_context, recipe.runtime.max_context_tokens) or recipe.runtime.max_context_tokens
        self._thread, self._journal, self._versions = thread, journal, versions
        self._keys, self._hub, self._figures, self._metrics = keys, hub, figures, metrics
        self._rate = RateLimit(self._config.requests_per_minute, self._config.burst)
        self.gate = Gate(self._config.max_concurrent)
        self._created = int(time.time())

    def models(self) -> dict[str, Any]:
        """The answer of /v1/models."""
        card = {
            "id": self._recipe.model_name,
            "object": "model",
            "created": self._created,
            "owned_by": "sao-agents",
            "max_model_len": self._max_context,
            "policy_version": self._versions.served,
        }
        return {"object": "list", "data": [card]}

    async def complete(self, request: web.Request) -> web.StreamResponse:
        """POST /v1/chat/completions."""
        key = self._keys.caller(request)
        self._rate.take(caller_of(request, key))
        asked = read_chat_request(await body_of(request), request.headers.get(SESSION_HEADER, ""))
        if asked.model != self._recipe.model_name:
            raise ApiError(
                404,
                f"the model {asked.model!r} does not exist; this server has {self._recipe.model_name!r}",
                code="model_not_found",
                param="model",
            )
        with self.gate.enter():
            work = await self._prepare(key, asked)
            return await (self._stream(request, work) if asked.stream else self._at_once(work))

    async def _prepare(self, key: str, asked: ChatRequest) -> _Work:
        started_at = time.time()
        known = []
        if asked.session:
            known = await self._thread.run(lambda: self._journal.candidates(key, asked.user, asked.session))
        if sum(len(message["content"]) for message in asked.messages) > _LONG:
            plan = await asyncio.to_thread(plan_turn, asked, known, self._renderer)
        else:
            plan = plan_turn(asked, known, self._renderer)
        room = self._max_context - len(plan.prompt_ids)
        if room < 1:
            raise ContextOverflow(
                f"the prompt has {len(plan.prompt_ids)} tokens and the maximum context length is {self._max_context}: "
                "shorten the messages"
            )
        base = self._recipe.runtime.sampling
        most = self._config.max_tokens or self._recipe.runtime.max_tokens_per_turn
        sampling = SamplingParams(
            temperature=base.temperature if asked.temperature is None else asked.temperature,
            top_p=base.top_p if asked.top_p is None else asked.top_p,
            top_k=base.top_k if asked.top_k is None else asked.top_k,
            max_tokens=min(room, most, asked.max_tokens or most),
            seed=asked.seed,
            stop_token_ids=self._renderer.stop_token_ids,
        )
        # The learner recomputes log-probs of the recipe's distribution; ratios of any other one would be wrong.
        used = (sampling.temperature, sampling.top_p, sampling.top_k)
        version = self._versions.on_engine
        return _Work(
            key=key,
            request=asked,
            plan=plan,
            sampling=sampling,
            trainable=used == (base.temperature, base.top_p, base.top_k) and base.temperature > 0,
            response_id=f"chatcmpl-v{version}-{uuid.uuid4().hex}",
            version=version,
            started_at=started_at,
        )

    async def _at_once(self, work: _Work) -> web.Response:
        async def nothing(_: str) -> None: ...

        reply = await self._sample(work, nothing)
        conversation = await self._record(work, reply)
        message = shown_message(reply.message)
        choice = {"index": 0, "message": message, "finish_reason": reply.finish_reason, "logprobs": None}
        body = {
            **self._head(work, "chat.completion"),
            "choices": [choice],
            "usage": _usage(work, reply),
            **_extras(work, reply, conversation),
        }
        response = json_response(body)
        response.headers[VERSION_HEADER] = str(work.version)
        return response

    async def _stream(self, request: web.Request, work: _Work) -> web.StreamResponse:
        writer = EventWriter(
            request,
            write_s=self._config.write_s,
            buffer_bytes=self._config.write_buffer_bytes,
            headers={VERSION_HEADER: str(work.version)},
        )
        head = self._head(work, "chat.completion.chunk")

        def chunk(delta: dict[str, Any], finish_reason: str | None = None) -> dict[str, Any]:
            choice = {"index": 0, "delta": delta, "finish_reason": finish_reason, "logprobs": None}
            return {**head, "choices": [choice]}

        async def begin() -> None:
            if not writer.started:
                await writer.start()
                await writer.send(chunk({"role": "assistant", "content": ""}))

        async def text(piece: str) -> None:
            await begin()
            await writer.send(chunk({"content": piece}))

        try:
            reply = await self._sample(work, text)
            conversation = await self._record(work, reply)
            await begin()
            if reply.rest:
                await writer.send(chunk({"content": reply.rest}))
            if "tool_calls" in reply.message:
                calls = [{"index": i, **call} for i, call in enumerate(reply.message["tool_calls"])]
                await writer.send(chunk({"tool_calls": calls}))
            await writer.send({**chunk({}, reply.finish_reason), **_extras(work, reply, conversation)})
            if work.request.include_usage:
                await writer.send({**head, "choices": [], "usage": _usage(work, reply)})
            await writer.end()
        except (SlowClient, ConnectionResetError):
            pass  # nobody is there to be told
        except Exception as error:
            failure = as_api_error(error)
            if failure is None or not writer.started:  # the middleware answers with a status
                raise
            await writer.send(failure.body)
            await writer.end()
        return writer.response

    async def _sample(self, work: _Work, on_text: Any) -> Reply:
        first = True

        async def told(piece: str) -> None:
            nonlocal first
            if first:
                self._metrics.first_token.observe(time.time() - work.started_at)
                first = False
            await on_text(piece)

        reply = await sample_reply(
            self._engine,
            self._renderer.decode,
            work.plan.prompt_ids,
            work.sampling,
            stops=(*work.request.stops, *self._recipe.runtime.sampling.stop),
            tools=work.request.tools,
            tool_format=self._renderer.tool_format,
            timeout_s=self._config.generate_s,
            on_text=told,
        )
        self._metrics.duration.observe(time.time() - work.started_at)
        return reply

    async def _record(self, work: _Work, reply: Reply) -> str:
        """Write the response to the journal: its id is a receipt from here on."""
        asked = work.request
        conversation = await self._thread.run(
            lambda: self._journal.record(
                work.plan,
                work.response_id,
                reply.action,
                key=work.key,
                user=asked.user,
                session=asked.session,
                messages=[*asked.messages, reply.message],
                tools=asked.tools,
                sampling=work.sampling,
                trainable=work.trainable,
                version=work.version,
                started_at=work.started_at,
            )
        )
        tokens = len(reply.action.token_ids)
        self._metrics.tokens.inc(tokens)
        self._figures.served(tokens)
        self._hub.publish(
            "response",
            {
                "response_id": work.response_id,
                "version": work.version,
                "tokens": tokens,
                "seconds": time.time() - work.started_at,
            },
            keep=False,
        )
        return conversation

    def _head(self, work: _Work, kind: str) -> dict[str, Any]:
        return {
            "id": work.response_id,
            "object": kind,
            "created": int(work.started_at),
            "model": self._recipe.model_name,
            "system_fingerprint": f"policy-v{work.version}",
            "policy_version": work.version,
        }


def _usage(work: _Work, reply: Reply) -> dict[str, int]:
    return usage(len(work.plan.prompt_ids), len(reply.action.token_ids))


def _extras(work: _Work, reply: Reply, conversation: str) -> dict[str, Any]:
    """Fields of our own, which OpenAI's clients keep and do not mind."""
    return {
        "conversation": conversation,
        "session": work.request.session or None,
        "policy_versions": reply.versions,
        "trainable": work.trainable,
    }
