"""An HTTP server that plays a judge in every way one can go wrong."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import Any

from aiohttp import web

from envs.style_shift.judging.llm import LLMJudge

Make = Callable[..., LLMJudge]
"""Makes a judge that asks the server; keywords are settings."""

GOOD = {"reasoning": "It is sweet and complete.", "quality": 1, "style": "cute"}
Answer = Callable[[dict[str, Any]], Awaitable[web.StreamResponse]]


def completion(content: str | None, *, finish: str = "stop", **message: Any) -> web.Response:
    """A chat completion as OpenAI-compatible servers write it."""
    choice = {"index": 0, "finish_reason": finish, "message": {"role": "assistant", "content": content, **message}}
    return web.json_response({"choices": [choice], "usage": {"prompt_tokens": 100, "completion_tokens": 20}})


def says(content: str | None = json.dumps(GOOD), **kwargs: Any) -> Answer:
    async def answer(body: dict[str, Any]) -> web.Response:
        return completion(content, **kwargs)

    return answer


def status(code: int, **headers: str) -> Answer:
    async def answer(body: dict[str, Any]) -> web.Response:
        return web.Response(status=code, text="no", headers=headers)

    return answer


async def hangs(body: dict[str, Any]) -> web.Response:
    await asyncio.sleep(60)
    return completion(json.dumps(GOOD))


class Server:
    """Answers the n-th request as `answers[n]` says, and all after the last one like it."""

    def __init__(self) -> None:
        self.answers: list[Answer] = [says()]
        self.bodies: list[dict[str, Any]] = []
        self.headers: list[dict[str, str]] = []
        self.at_once = self.most_at_once = 0
        self.url = ""

    async def handle(self, request: web.Request) -> web.StreamResponse:
        self.bodies.append(body := await request.json())
        self.headers.append(dict(request.headers))
        self.at_once += 1
        self.most_at_once = max(self.most_at_once, self.at_once)
        try:
            return await self.answers[min(len(self.bodies), len(self.answers)) - 1](body)
        finally:
            self.at_once -= 1
