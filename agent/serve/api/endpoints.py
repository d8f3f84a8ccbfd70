"""The paths that clients of language models know: each reads its wire, and has `ChatApi` answer in it."""

from __future__ import annotations

from typing import Any

import msgspec
from aiohttp import web

from agent.chat.renderer import ChatRenderer
from agent.serve.api.asked import Asked, Begun
from agent.serve.api.chat import SESSION_HEADER, ChatApi
from agent.serve.api.tokenizing import detokenized, tokenized
from agent.serve.config import ClientsConfig
from agent.serve.conversations.earlier import earlier
from agent.serve.conversations.journal import Journal
from agent.store.database_thread import DatabaseThread
from agent.wire.chat import ChatWire
from agent.wire.completions import CompletionWire, read_completion_request
from agent.wire.errors import json_response
from agent.wire.messages import MessagesWire, read_messages
from agent.wire.request import KEYS, chat_request, decoded
from agent.wire.responses import ResponsesRequest, going_on, read_responses_request
from agent.wire.responses_stream import ResponsesWire
from agent.wire.wishes import read_wishes


class Endpoints:
    """Handlers over one `ChatApi`."""

    def __init__(self, chat: ChatApi, config: ClientsConfig, thread: DatabaseThread, journal: Journal) -> None:
        self._chat, self._config, self._thread, self._journal = chat, config, thread, journal

    def routes(self) -> list[web.RouteDef]:
        """Everything but /v1/models, which is no question to the model."""
        return [
            web.post("/v1/chat/completions", self._completions_of_chats),
            web.post("/v1/completions", self._completions),
            web.post("/v1/responses", self._responses),
            web.post("/v1/messages", self._messages),
            web.post("/v1/messages/count_tokens", self._count),
            web.post("/tokenize", self._tokenize),
            web.post("/detokenize", self._detokenize),
        ]

    async def _completions_of_chats(self, request: web.Request) -> web.StreamResponse:
        session = request.headers.get(SESSION_HEADER, "")

        def read(data: bytes) -> Asked:
            raw = decoded(data)
            asked = chat_request(raw, session)
            return Asked(asked, read_wishes(raw, known=KEYS, most_n=self._config.max_n))

        def wire(asked: Asked, begun: Begun) -> ChatWire:
            include = asked.request.include_usage
            return ChatWire(_head(begun), include_usage=include, wants_logprobs=asked.wishes.logprobs)

        return await self._chat.answer(request, read, prefix="chatcmpl", wire=wire)

    async def _completions(self, request: web.Request) -> web.StreamResponse:
        def read(data: bytes) -> Asked:
            asked, wishes, prompts = read_completion_request(data, most_n=self._config.max_n)
            return Asked(asked, wishes, prompts=prompts)

        def wire(asked: Asked, begun: Begun) -> CompletionWire:
            return CompletionWire(_head(begun), include_usage=asked.request.include_usage, n=asked.wishes.n)

        return await self._chat.answer(request, read, prefix="cmpl", wire=wire)

    async def _responses(self, request: web.Request) -> web.StreamResponse:
        session = request.headers.get(SESSION_HEADER, "")

        def read(data: bytes) -> Asked:
            asked = read_responses_request(data, session)
            return Asked(asked.request, asked.wishes, more=asked)

        async def opening(key: str, asked: Asked) -> Asked:
            given: ResponsesRequest = asked.more
            if not given.previous:
                return asked
            found, before = await self._thread.run(
                lambda: earlier(self._journal, key, asked.request.user, given.previous)
            )
            request = going_on(given, before, found.tools)
            request = msgspec.structs.replace(request, session=request.session or found.session)
            return msgspec.structs.replace(asked, request=request, known=(found,))

        def wire(asked: Asked, begun: Begun) -> ResponsesWire:
            head = {"id": begun.response_id, "created_at": begun.created, "model": begun.model}
            return ResponsesWire(head | {"policy_version": begun.version}, asked.more.echo)

        return await self._chat.answer(request, read, prefix="resp", wire=wire, opening=opening)

    async def _messages(self, request: web.Request) -> web.StreamResponse:
        session = request.headers.get(SESSION_HEADER, "")

        def read(data: bytes) -> Asked:
            asked, wishes, shows_thinking = read_messages(data, session)
            return Asked(asked, wishes, more=shows_thinking)

        def wire(asked: Asked, begun: Begun) -> MessagesWire:
            return MessagesWire(begun.response_id, begun.model, shows_thinking=asked.more)

        return await self._chat.answer(request, read, prefix="msg", wire=wire)

    async def _count(self, request: web.Request) -> web.Response:
        self._chat.caller(request)

        def count(data: bytes) -> int:
            asked, _, _ = read_messages(data, "", count_only=True)
            self._chat.check_model(asked.model)
            return len(self._chat.renderer.start(asked.messages, asked.tools).token_ids)

        return json_response({"input_tokens": await self._chat.read(request, count)})

    async def _tokenize(self, request: web.Request) -> web.Response:
        return await self._about_tokens(request, tokenized)

    async def _detokenize(self, request: web.Request) -> web.Response:
        return await self._about_tokens(request, detokenized)

    async def _about_tokens(self, request: web.Request, work: Any) -> web.Response:
        self._chat.caller(request)
        renderer: ChatRenderer = self._chat.renderer

        def answer(data: bytes) -> dict[str, Any]:
            raw = decoded(data)
            if raw.get("model") is not None:
                self._chat.check_model(str(raw["model"]))
            found: dict[str, Any] = work(raw, renderer, self._chat.max_context)
            return found

        return json_response(await self._chat.read(request, answer))


def _head(begun: Begun) -> dict[str, Any]:
    """What stands in every chunk of OpenAI's."""
    return {
        "id": begun.response_id,
        "created": begun.created,
        "model": begun.model,
        "system_fingerprint": f"policy-v{begun.version}",
        "policy_version": begun.version,
    }
