"""A chat endpoint over real HTTP whose model is a function, and which can fail in every way that endpoints do."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

from aiohttp import web

Script = Callable[[dict[str, Any]], dict[str, Any]]
"""A request's body to the message that answers it; a `finish_reason` and `usage` in it are the completion's."""
Door = Callable[[int, dict[str, Any]], Awaitable[web.Response | None]]
"""What stands before the model: the number of the request and its body to an answer, or None to let it through."""


async def _open(number: int, body: dict[str, Any]) -> web.Response | None:
    return None


class ChatServer:
    """Serves `script` at `url`; `door` may answer first."""

    def __init__(self, script: Script, door: Door = _open) -> None:
        self.script, self.door = script, door
        self.bodies: list[dict[str, Any]] = []
        self.headers: list[dict[str, str]] = []
        self.times: list[float] = []
        self.in_flight = self.most_in_flight = 0
        self.url = ""

    async def handle(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.bodies.append(body)
        self.headers.append(dict(request.headers))
        self.times.append(asyncio.get_running_loop().time())
        self.in_flight += 1
        self.most_in_flight = max(self.most_in_flight, self.in_flight)
        try:
            return await self.door(len(self.bodies), body) or web.json_response(completion(self.script(body)))
        finally:
            self.in_flight -= 1

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[ChatServer]:
        app = web.Application(client_max_size=2**26)
        app.router.add_post("/v1/chat/completions", self.handle)
        runner = web.AppRunner(app, shutdown_timeout=0.1, handler_cancellation=True)
        await runner.setup()
        try:
            await web.TCPSite(runner, "127.0.0.1", 0).start()
            self.url = f"http://127.0.0.1:{runner.addresses[0][1]}/v1"
            yield self
        finally:
            await runner.cleanup()


def completion(message: dict[str, Any]) -> dict[str, Any]:
    """A chat completion as OpenAI-compatible servers write it."""
    message = {"role": "assistant", "content": None, **message}
    finish = message.pop("finish_reason", "tool_calls" if message.get("tool_calls") else "stop")
    usage = message.pop("usage", {"prompt_tokens": 100, "completion_tokens": 20})
    return {"choices": [{"index": 0, "finish_reason": finish, "message": message}], "usage": usage}


def call(name: str, arguments: Any, identity: str = "call_abc") -> dict[str, Any]:
    """A structured call; `arguments` that are no text are written as JSON."""
    text = arguments if isinstance(arguments, str) else json.dumps(arguments)
    return {"id": identity, "type": "function", "function": {"name": name, "arguments": text}}


def refuses(status: int, text: str = "no", **headers: str) -> web.Response:
    """An error as endpoints write it."""
    body = {"error": {"message": text, "type": "error"}}
    return web.json_response(body, status=status, headers={k.replace("_", "-"): v for k, v in headers.items()})


def asked(body: dict[str, Any]) -> str:
    """The task: the first message of the user."""
    return next(str(message["content"]) for message in body["messages"] if message["role"] == "user")


def calculates(body: dict[str, Any]) -> dict[str, Any]:
    """Asks Python first, then answers with what it said: "What is I*7?"."""
    last = body["messages"][-1]
    if last["role"] == "tool":
        return {"content": rf"It is \boxed{{{last['content'].strip()}}}", "reasoning_content": "<b>easy</b>"}
    number = asked(body).partition("What is ")[2].partition("*")[0]
    return {"content": "Let me see.", "tool_calls": [call("python", {"code": f"print({number}*7)"})]}
