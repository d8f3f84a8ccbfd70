"""The address of sessions: both wires, and the few questions that are of a session itself, over HTTP.

POST /sessions/SECRET/v1/chat/completions          OpenAI's; GET .../v1/models
POST /sessions/SECRET/v1/messages                  Anthropic's; .../v1/messages/count_tokens
GET  /sessions/SECRET/task                         the task, see `agent.harness.task`
POST /sessions/SECRET/call    {"name", "arguments"}   a tool of the environment
POST /sessions/SECRET/answer  {"answer"}              what the environment is to grade
POST /sessions/SECRET/reward  {"reward", "metrics"?}
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from typing import Any

import msgspec
from aiohttp import web

from agent.event_stream import EventWriter, SlowClient
from agent.harness.chains import Turn
from agent.harness.session import Reply, Session
from agent.runtime.settings import ConfigError, HarnessConfig
from agent.wire import anthropic
from agent.wire.body import body_of
from agent.wire.errors import ApiError, as_api_error, json_response
from agent.wire.reply import shown_message, usage
from agent.wire.request import ChatRequest, read_chat_request
from envs.core import EnvironmentFault

log = logging.getLogger(__name__)

MAX_BODY_BYTES = 64 << 20
"""A long transcript with all its tool output."""
ALIVE_EVERY_S = 10.0
"""How often a stream that waits for its reply says that it is alive."""
WRITE_S = 60.0
_BUFFER_BYTES = 1 << 16
_LONG_BODY = 1 << 18


class _Reward(msgspec.Struct, forbid_unknown_fields=True):
    reward: float
    metrics: dict[str, Any] = {}


class _Answer(msgspec.Struct, forbid_unknown_fields=True):
    answer: str


class _ToolCall(msgspec.Struct, forbid_unknown_fields=True):
    name: str
    arguments: dict[str, Any] = {}


class SessionDoor:
    """Listens for all sessions of a runtime; a secret in the path says which one is meant.

    async with SessionDoor.listening(config) as door:
        url = door.new_url()
        with door.open(url, session): ...       # requests below `url` are the session's; afterwards they are 404
    """

    def __init__(self, config: HarnessConfig) -> None:
        self._config = config
        self._sessions: dict[str, Session] = {}
        self._base = ""

    @classmethod
    @contextlib.asynccontextmanager
    async def listening(cls, config: HarnessConfig) -> AsyncIterator[SessionDoor]:
        """The door, open; raises `ConfigError` where its port cannot be had."""
        door = cls(config)
        # A handler outlives its client, so that one who asks again is given the reply that was being sampled.
        runner = web.AppRunner(door.application(), access_log=None, handler_cancellation=False, shutdown_timeout=1.0)
        await runner.setup()
        try:
            await web.TCPSite(runner, config.host, config.port).start()
        except OSError as error:
            await runner.cleanup()
            raise ConfigError(f"`harness`: cannot listen on {config.host}:{config.port}: {error.strerror}") from error
        try:
            host = f"[{config.host}]" if ":" in config.host else config.host
            door._base = config.url or f"http://{host}:{runner.addresses[0][1]}"
            yield door
        finally:
            await runner.cleanup()

    def new_url(self) -> str:
        """The address of a session to be."""
        return f"{self._base.rstrip('/')}/sessions/{secrets.token_urlsafe(24)}"

    @contextlib.contextmanager
    def open(self, url: str, session: Session) -> Iterator[None]:
        """Answer for `session` below `url`."""
        secret = url.rsplit("/", 1)[-1]
        self._sessions[secret] = session
        try:
            yield
        finally:
            del self._sessions[secret]

    def application(self) -> web.Application:
        """The aiohttp application."""
        app = web.Application(client_max_size=MAX_BODY_BYTES, middlewares=[_errors])
        session = "/sessions/{secret}"
        app.add_routes(
            [
                web.post(f"{session}/v1/chat/completions", self._chat),
                web.get(f"{session}/v1/models", self._models),
                web.get(f"{session}/v1/models/{{name:.+}}", self._model),
                web.post(f"{session}/v1/messages", self._messages),
                web.post(f"{session}/v1/messages/count_tokens", self._count),
                web.get(f"{session}/task", self._task),
                web.post(f"{session}/call", self._call),
                web.post(f"{session}/answer", self._answer),
                web.post(f"{session}/reward", self._reward),
            ]
        )
        return app

    def _session(self, request: web.Request) -> Session:
        session = self._sessions.get(request.match_info["secret"])
        if session is None:
            raise ApiError(404, "no such session, or it has ended", code="session_not_found")
        return session

    # -- OpenAI's wire

    async def _chat(self, request: web.Request) -> web.StreamResponse:
        session = self._session(request)
        asked = await _asked(request, read_chat_request)
        head = {"id": f"chatcmpl-{uuid.uuid4().hex}", "created": int(time.time()), "model": asked.model}
        if asked.stream:
            return await self._chat_stream(request, session, asked, head)
        turn, reply = await session.ask(asked, gone=_gone(request))
        choice = {
            "index": 0,
            "message": shown_message(reply.message),
            "finish_reason": reply.finish_reason,
            "logprobs": None,
        }
        spent = usage(reply.prompt_tokens, reply.completion_tokens)
        body = {**head, "object": "chat.completion", "choices": [choice], "usage": spent}
        return _delivered(request, session, turn, json_response(body))

    async def _chat_stream(
        self, request: web.Request, session: Session, asked: ChatRequest, head: dict[str, Any]
    ) -> web.StreamResponse:
        writer = _writer(request)

        def chunk(delta: dict[str, Any], finish_reason: str | None = None) -> dict[str, Any]:
            choice = {"index": 0, "delta": delta, "finish_reason": finish_reason, "logprobs": None}
            return {**head, "object": "chat.completion.chunk", "choices": [choice]}

        async def end(turn: Turn, reply: Reply) -> None:
            message = shown_message(reply.message)
            calls = [{"index": i, **call} for i, call in enumerate(message.get("tool_calls", ()))]
            await writer.send(chunk({"role": "assistant", "content": message["content"]}))
            if calls:
                await writer.send(chunk({"tool_calls": calls}))
            await writer.send(chunk({}, reply.finish_reason))
            if asked.include_usage:
                spent = usage(reply.prompt_tokens, reply.completion_tokens)
                await writer.send({**head, "object": "chat.completion.chunk", "choices": [], "usage": spent})
            await writer.end()

        async def fail(error: ApiError) -> None:
            await writer.send(error.body)
            await writer.end()

        return await _streamed(request, session, asked, writer, alive=writer.comment, end=end, fail=fail)

    async def _models(self, request: web.Request) -> web.Response:
        self._session(request)
        return json_response({"object": "list", "data": [self._card(self._config.model)]})

    async def _model(self, request: web.Request) -> web.Response:
        self._session(request)
        return json_response(self._card(request.match_info["name"]))

    def _card(self, name: str) -> dict[str, Any]:
        return {"id": name, "object": "model", "created": 0, "owned_by": "sao-agents"}

    # -- Anthropic's wire

    async def _messages(self, request: web.Request) -> web.StreamResponse:
        session = self._session(request)
        asked = await _asked(request, anthropic.read_messages_request)

        def body_for(reply: Reply) -> dict[str, Any]:
            tokens = (reply.prompt_tokens, reply.completion_tokens)
            return anthropic.message_json(
                reply.message, model=asked.model, finish_reason=reply.finish_reason, tokens=tokens
            )

        if not asked.stream:
            turn, reply = await session.ask(asked, gone=_gone(request))
            return _delivered(request, session, turn, json_response(body_for(reply)))
        writer = _writer(request)

        async def alive() -> None:
            await writer.send({"type": "ping"}, event="ping")

        async def end(turn: Turn, reply: Reply) -> None:
            for name, data in anthropic.message_events(body_for(reply)):
                await writer.send(data, event=name)
            await writer.end(mark=False)

        async def fail(error: ApiError) -> None:
            await writer.send(error.anthropic_body, event="error")
            await writer.end(mark=False)

        return await _streamed(request, session, asked, writer, alive=alive, end=end, fail=fail)

    async def _count(self, request: web.Request) -> web.Response:
        session = self._session(request)
        asked = anthropic.read_messages_request(await body_of(request), count_only=True)
        return json_response({"input_tokens": await session.count(asked)})

    # -- the session's own

    async def _task(self, request: web.Request) -> web.Response:
        return json_response(self._session(request).task)

    async def _call(self, request: web.Request) -> web.Response:
        session, given = self._session(request), _read(await body_of(request), _ToolCall)
        return json_response(await session.call(given.name, given.arguments))

    async def _answer(self, request: web.Request) -> web.Response:
        session, given = self._session(request), _read(await body_of(request), _Answer)
        session.answer = given.answer
        return json_response({"answer": given.answer})

    async def _reward(self, request: web.Request) -> web.Response:
        session, given = self._session(request), _read(await body_of(request), _Reward)
        if self._config.reward != "posted":
            raise ApiError(
                409,
                "the environment grades this episode: set runtime.harness.reward=posted for rewards of your own",
                code="reward_not_posted",
            )
        session.post(given.reward, given.metrics)
        return json_response({"reward": session.posted})


async def _asked(request: web.Request, read: Callable[[bytes], ChatRequest]) -> ChatRequest:
    """The request's body; one that takes milliseconds to read is read in a thread."""
    data = await body_of(request)
    return await asyncio.to_thread(read, data) if len(data) > _LONG_BODY else read(data)


def _read(data: bytes, kind: type[Any]) -> Any:
    try:
        return msgspec.json.decode(data, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ApiError(400, f"bad request: {error}") from error


def _gone(request: web.Request) -> Callable[[], bool]:
    """Whether the client of `request` has hung up."""
    return lambda: request.transport is None or request.transport.is_closing()


def _delivered(request: web.Request, session: Session, turn: Turn, response: web.Response) -> web.Response:
    if not _gone(request)():
        session.delivered(turn)
    return response


def _writer(request: web.Request) -> EventWriter:
    return EventWriter(request, write_s=WRITE_S, buffer_bytes=_BUFFER_BYTES, headers={})


async def _streamed(
    request: web.Request,
    session: Session,
    asked: ChatRequest,
    writer: EventWriter,
    *,
    alive: Callable[[], Awaitable[None]],
    end: Callable[[Turn, Reply], Awaitable[None]],
    fail: Callable[[ApiError], Awaitable[None]],
) -> web.StreamResponse:
    """Stream a reply once it is whole, and `alive` until then.

    Not token by token: a turn whose engine dies is sampled again from where it was, and what has been sent could not
    be taken back. An error of the first moments still has a status of its own.
    """
    work = asyncio.ensure_future(session.ask(asked, gone=_gone(request)))
    try:
        while not (await asyncio.wait({work}, timeout=ALIVE_EVERY_S))[0]:
            if not writer.started:
                await writer.start()
            await alive()
        turn, reply = work.result()
        if not writer.started:
            await writer.start()
        await end(turn, reply)
        session.delivered(turn)
    except (SlowClient, ConnectionResetError):
        pass  # nobody is there to be told
    except Exception as error:
        failure = as_api_error(error)
        if failure is None or not writer.started:  # the middleware answers with a status
            raise
        await fail(failure)
    finally:
        if not work.done():
            work.cancel()
            await asyncio.wait({work})
    return writer.response


@web.middleware
async def _errors(
    request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
) -> web.StreamResponse:
    """Every error as JSON in the shape of the wire that was used."""
    try:
        return await handler(request)
    except web.HTTPException as error:
        if error.status < 400:
            raise
        failure = ApiError(error.status, f"{request.method} {request.path.rsplit('/', 1)[-1]}: {error.reason}")
    except EnvironmentFault as fault:
        failure = ApiError(503, f"the environment failed, and the episode is void: {fault}", code="environment_failed")
    except Exception as error:  # a fault of ours must not look like one of the network
        known = as_api_error(error)
        if known is None:
            log.exception("a request of a harness failed")
        failure = known or ApiError(500, "the session failed; the runtime's log has the details", code="internal_error")
    theirs = "/v1/messages" in request.path
    return json_response(failure.anthropic_body if theirs else failure.body, failure.status)
