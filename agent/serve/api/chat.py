"""From a request of any wire to its answers, streaming and not: the order of things, and what is sampled."""

from __future__ import annotations

import asyncio
import functools
import time
import uuid
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import msgspec
from aiohttp import web

from agent.chat.renderer import ChatRenderer
from agent.engines.base import ContextOverflow, EngineRefused
from agent.engines.wire import Likely
from agent.episode import SamplingParams, Segment
from agent.event_stream import EventWriter, SlowClient
from agent.serve.api.asked import Asked, Begun, Work, size_of
from agent.serve.api.events import EventHub, Figures
from agent.serve.api.limits import Gate, Keys, RateLimit, caller_of
from agent.serve.api.metrics import Metrics
from agent.serve.api.streaming import Stream, first_fault
from agent.serve.api.whose import Owner
from agent.serve.config import ServeRecipe
from agent.serve.conversations.conversation import Plan, plan_turn
from agent.serve.conversations.journal import Journal
from agent.serve.conversations.reasoning import ReasoningFilter
from agent.serve.conversations.reply import Reply, StreamingEngine, sample_reply
from agent.serve.versions.publishing import Versions
from agent.store.database_thread import DatabaseThread
from agent.wire.answer import Answer, Said, Wire
from agent.wire.body import body_of
from agent.wire.errors import ApiError, as_api_error, json_response

T = TypeVar("T")

SESSION_HEADER = "X-Session-Id"
VERSION_HEADER = "X-Policy-Version"


class ChatApi:
    """Answers requests. Everything that it needs comes from outside; it owns the order of things:

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
        self._reasoning = (
            renderer.reasoning_form if self._config.clients.reasoning == "auto" else self._config.clients.reasoning
        )
        self._long_work = ThreadPoolExecutor(1, "long-request")

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

    async def answer(
        self,
        request: web.Request,
        read: Callable[[bytes], Asked],
        *,
        prefix: str,
        wire: Callable[[Asked, Begun], Wire],
        opening: Callable[[str, Asked], Awaitable[Asked]] | None = None,
    ) -> web.StreamResponse:
        """Answer one request of any wire: `read` makes sense of its body, `wire` writes what comes of it.

        `prefix` begins the ids of its responses. `opening`: what else is to be looked up once the caller is known.
        """
        key = self._keys.caller(request)
        self._rate.take(caller_of(request, key))
        asked = await self.read(request, read)
        if opening is not None:
            asked = await opening(key, asked)
        self.check_model(asked.request.model)
        with self.gate.enter(len(asked.prompts or (1,)) * asked.wishes.n):
            works = await self._prepare(key, asked, prefix)
            head = Begun(works[0].response_id, int(works[0].started_at), self._recipe.model_name, works[0].version)
            written = wire(asked, head)
            if asked.request.stream:
                return await self._stream(request, works, written)
            return await self._at_once(works, written)

    async def read(self, request: web.Request, read: Callable[[bytes], T]) -> T:
        """The request's body; one that is long is read beside the loop."""
        data = await body_of(request)
        return await self.beside(len(data), read, data)

    async def beside(self, size: int, work: Callable[..., T], *arguments: Any) -> T:
        """`work` of a request of `size` characters: beside the loop if that is many, one at a time.

        One at a time, because several would take the processor and the interpreter from everybody's streams.
        """
        if size <= self._config.clients.long_body_bytes:
            return work(*arguments)
        return await asyncio.get_running_loop().run_in_executor(self._long_work, work, *arguments)

    def check_model(self, name: str) -> None:
        """Raise `ApiError` 404 for a model that is not served here."""
        if name != self._recipe.model_name:
            raise ApiError(
                404,
                f"the model {name!r} does not exist; this server has {self._recipe.model_name!r}",
                code="model_not_found",
                param="model",
            )

    @property
    def max_context(self) -> int:
        """Most tokens of prompt and reply together."""
        return self._max_context

    @property
    def renderer(self) -> ChatRenderer:
        """Messages to tokens, and back."""
        return self._renderer

    def caller(self, request: web.Request) -> str:
        """The name behind the request's key, its call counted; raises `ApiError` 401 or 429."""
        key = self._keys.caller(request)
        self._rate.take(caller_of(request, key))
        return key

    async def _prepare(self, key: str, all_asked: Asked, prefix: str) -> list[Work]:
        """What is to be sampled: for each prompt `n` responses, each an episode or a branch of its own."""
        started_at = time.time()
        asked, wishes, known = all_asked.request, all_asked.wishes, list(all_asked.known)
        if asked.session:
            known = await self._thread.run(lambda: self._journal.candidates(key, asked.user, asked.session))
        if all_asked.prompts:
            plans = [await self.beside(len(prompt), self._bare, prompt) for prompt in all_asked.prompts]
        else:
            plans = [await self.beside(size_of(asked), plan_turn, asked, known, self._renderer)]
        for plan in plans:
            if len(plan.prompt_ids) >= self._max_context:
                raise ContextOverflow(
                    f"the prompt has {len(plan.prompt_ids)} tokens and the maximum context length is "
                    f"{self._max_context}: shorten the messages"
                )
        version = self._versions.served
        return [
            self._work(key, all_asked, plan, place * wishes.n + i, prefix, version, started_at)
            for place, plan in enumerate(plans)
            for i in range(wishes.n)
        ]

    def _bare(self, prompt: str | list[int]) -> Plan:
        """A text (or tokens) that no template is put around, as the beginning of an episode."""
        if isinstance(prompt, str):
            ids, text = self._renderer.encode_text(prompt), prompt
        else:
            ids = tuple(prompt)
            if ids and max(ids) >= self._renderer.vocabulary:
                raise ApiError(400, "prompt: not the tokens of this model", param="prompt")
            text = self._renderer.text_of(ids)
        if not ids:
            raise ApiError(400, "prompt must hold at least one token", param="prompt")
        opening = Segment("prompt", ids, text)
        return Plan("", 0, opening.token_ids, text, opening)

    def _work(
        self,
        key: str,
        all_asked: Asked,
        plan: Plan,
        index: int,
        prefix: str,
        version: int,
        started_at: float,
    ) -> Work:
        asked, wishes, bare = all_asked.request, all_asked.wishes, bool(all_asked.prompts)
        if bare:  # what the record shows as said
            asked = msgspec.structs.replace(asked, messages=[{"role": "user", "content": plan.prompt_text}])
        room = self._max_context - len(plan.prompt_ids)
        base = self._recipe.runtime.sampling
        most = self._config.max_tokens or self._recipe.runtime.max_tokens_per_turn
        sampling = SamplingParams(
            temperature=base.temperature if asked.temperature is None else asked.temperature,
            top_p=base.top_p if asked.top_p is None else asked.top_p,
            top_k=base.top_k if asked.top_k is None else asked.top_k,
            max_tokens=min(room, most, asked.max_tokens or most),
            # The same seed for all would make the same response of each.
            seed=None if asked.seed is None else (asked.seed + index) % 2**63,
            stop_token_ids=self._renderer.stop_token_ids,
        )
        # The learner recomputes log-probs of the recipe's distribution; ratios of any other one would be wrong.
        version = self._versions.on_engine
        bent = [key for key in ("temperature", "top_p", "top_k") if getattr(sampling, key) != getattr(base, key)]
        if base.temperature == 0 and not bent:
            bent = ["temperature"]
        return Work(
            key=key,
            request=asked,
            wishes=wishes,
            plan=plan,
            sampling=sampling,
            untrainable_because=(*bent, *wishes.bending),
            index=index,
            bare=bare,
            response_id=f"{prefix}-v{version}-{uuid.uuid4().hex}",
            version=version,
            started_at=started_at,
        )

    async def _at_once(self, works: list[Work], wire: Wire) -> web.Response:
        async def nothing(_: Said) -> None: ...

        try:
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(self._answer(work, nothing)) for work in works]
        except ExceptionGroup as faults:
            raise first_fault(faults) from None
        response = json_response(wire.whole([task.result() for task in tasks]))
        response.headers[VERSION_HEADER] = str(works[0].version)
        return response

    async def _stream(self, request: web.Request, works: list[Work], wire: Wire) -> web.StreamResponse:
        writer = EventWriter(
            request,
            write_s=self._config.write_s,
            buffer_bytes=self._config.write_buffer_bytes,
            headers={VERSION_HEADER: str(works[0].version)},
        )
        stream = Stream(writer, wire, self._config.clients.alive_every_s)

        async def one(work: Work) -> Answer:
            answer = await self._answer(work, lambda said: stream.send(lambda: wire.said(work.index, said)))
            await stream.send(lambda: wire.answered(answer))
            return answer

        try:
            async with stream.alive(), asyncio.TaskGroup() as group:
                tasks = [group.create_task(one(work)) for work in works]
            await stream.send(lambda: wire.ending([task.result() for task in tasks]))
            await writer.end(mark=wire.mark)
        except Exception as fault:
            error = first_fault(fault)
            if isinstance(error, SlowClient | ConnectionResetError):
                return writer.response  # nobody is there to be told
            failure = as_api_error(error)
            if failure is None or not writer.started:  # the middleware answers with a status
                raise error from None
            name, data = wire.failed(failure)
            await writer.send(data, event=name)
            await writer.end(mark=wire.mark)
        return writer.response

    async def _answer(self, work: Work, on_text: Callable[[Said], Awaitable[None]]) -> Answer:
        """Sample and record one response; its end is told to nobody before it is on the disk."""
        try:
            reply = await self._sample(work, on_text)
        except EngineRefused as error:
            if work.wishes.bending and not isinstance(error, ContextOverflow):
                keys = work.wishes.bending
                said = f"the engine does not serve {', '.join(keys)}: {error}"
                raise ApiError(400, said, param=keys[0], code="unsupported_parameter") from error
            raise
        conversation = await self._record(work, reply)
        return Answer(
            index=work.index,
            response_id=work.response_id,
            message=reply.message,
            reasoning=reply.reasoning,
            rest=reply.rest,
            finish_reason=reply.finish_reason,
            prompt_tokens=len(work.plan.prompt_ids),
            completion_tokens=len(reply.action.token_ids),
            logprobs=reply.logprobs,
            # Fields of our own, which clients keep and do not mind.
            extras={
                "conversation": conversation,
                "session": work.request.session or None,
                "policy_versions": reply.versions,
                "trainable": work.trainable,
                **({} if work.trainable else {"untrainable_because": list(work.untrainable_because)}),
            },
        )

    async def _sample(self, work: Work, on_text: Callable[[Said], Awaitable[None]]) -> Reply:
        first = True

        async def told(said: Said) -> None:
            nonlocal first
            if first:
                self._metrics.first_token.observe(time.time() - work.started_at)
                first = False
            await on_text(said)

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
            steering=work.wishes.steering,
            reasoning=ReasoningFilter("none" if work.bare else self._reasoning, work.plan.prompt_text),
            forced=work.wishes.forced,
            one_call=work.wishes.one_call,
            entry=functools.partial(self._logprob, most=work.wishes.steering.top_logprobs)
            if work.wishes.logprobs
            else None,
        )
        self._metrics.duration.observe(time.time() - work.started_at)
        return reply

    async def _record(self, work: Work, reply: Reply) -> str:
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
            {},
            keep=False,
            owner=Owner(work.key, asked.user),
            details={
                "response_id": work.response_id,
                "version": work.version,
                "tokens": tokens,
                "seconds": time.time() - work.started_at,
            },
        )
        return conversation

    def _logprob(self, token: int, logprob: float, likeliest: Sequence[Likely], *, most: int) -> dict[str, Any]:
        """OpenAI's entry of a sampled token; the likeliest in order, of which the engine tells one more than asked."""

        def shown(token: int, logprob: float) -> dict[str, Any]:
            text = self._renderer.piece(token)
            whole = "\ufffd" not in text
            return {"token": text, "logprob": logprob, "bytes": list(text.encode()) if whole else None}

        ranked = sorted(likeliest, key=lambda one: -one.logprob)[:most]
        return {**shown(token, logprob), "top_logprobs": [shown(one.token_id, one.logprob) for one in ranked]}
