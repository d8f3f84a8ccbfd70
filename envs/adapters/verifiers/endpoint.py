"""The model that a verifiers rollout asks: a chat-completions endpoint on this machine whose answers come from outside.

A rollout's requests wait here until the policy's action is there. `line()` gives an address of its own for each
rollout; whoever holds the `Line` takes requests and answers them.
"""

from __future__ import annotations

import asyncio
import json
import secrets
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web

from envs.core import Message

ENDED = "the policy's episode has ended"
"""In the error that a request gets instead of an answer when its episode is cut short."""
LARGEST_BYTES = 64 * 2**20


@dataclass(slots=True, eq=False)
class Asked:
    """One request: the whole conversation and the tools, as OpenAI's chat format has them."""

    messages: list[Message]
    tools: list[dict[str, Any]]
    answer: asyncio.Future[dict[str, Any] | None] = field(repr=False)

    def say(self, content: str, calls: list[dict[str, Any]], finish_reason: str) -> None:
        """Answer with a message; `calls` are tool calls in OpenAI's form."""
        message: dict[str, Any] = {"role": "assistant", "content": content or None}
        if calls:
            message["tool_calls"] = calls
        self._settle({"index": 0, "message": message, "finish_reason": finish_reason})

    def end(self) -> None:
        """Refuse: there is no more of this conversation."""
        self._settle(None)

    def _settle(self, choice: dict[str, Any] | None) -> None:
        if not self.answer.done():
            self.answer.set_result(choice)


@dataclass(slots=True, eq=False)
class Line:
    """One rollout's own address: `base_url` for an OpenAI client, `asked` for what it asks."""

    base_url: str
    asked: asyncio.Queue[Asked] = field(default_factory=asyncio.Queue)


class PolicyEndpoint:
    """new ──start()──▶ listening on a port of this machine ──close()──▶ closed; belongs to one event loop."""

    def __init__(self) -> None:
        self._lines: dict[str, Line] = {}
        self._runner: web.AppRunner | None = None
        self._port = 0

    async def start(self) -> None:
        """Listen. Raises OSError."""
        app = web.Application(client_max_size=LARGEST_BYTES)
        app.router.add_post("/{line}/v1/chat/completions", self._complete)
        self._runner = web.AppRunner(app, shutdown_timeout=1.0)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", 0).start()
        self._port = self._runner.addresses[0][1]

    def line(self) -> Line:
        """A new address, which nobody else knows."""
        name = secrets.token_hex(16)
        self._lines[name] = line = Line(f"http://127.0.0.1:{self._port}/{name}/v1")
        return line

    def drop(self, line: Line) -> None:
        """Forget an address; requests that wait there are refused."""
        self._lines = {name: kept for name, kept in self._lines.items() if kept is not line}
        while not line.asked.empty():
            line.asked.get_nowait().end()

    async def close(self) -> None:
        """Stop listening. Any number of times."""
        runner, self._runner = self._runner, None
        if runner is not None:
            await runner.cleanup()

    async def _complete(self, request: web.Request) -> web.Response:
        line = self._lines.get(request.match_info["line"])
        if line is None:
            return web.json_response({"error": {"message": ENDED}}, status=400)
        body = json.loads(await request.read())
        asked = Asked(body["messages"], body.get("tools") or [], asyncio.get_running_loop().create_future())
        line.asked.put_nowait(asked)
        choice = await asked.answer
        if choice is None:
            return web.json_response({"error": {"message": ENDED}}, status=400)
        usage = {"prompt_tokens": 0, "completion_tokens": 0, "total_tokens": 0}
        named = {"id": f"chatcmpl-{secrets.token_hex(8)}", "object": "chat.completion", "created": 0, "model": "policy"}
        return web.json_response({**named, "choices": [choice], "usage": usage})
