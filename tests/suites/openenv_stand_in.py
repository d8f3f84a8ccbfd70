"""A server that speaks OpenEnv's session protocol as the library's own does, for tests without the library.

`kind`: "text" (echoes, a half for each message, done at "stop"), "tools" (a tool `add`), or a way to be wrong.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import AsyncIterator
from typing import Any

from aiohttp import web


def observed(observation: dict[str, Any], reward: Any = None, done: Any = False) -> str:
    data = {"observation": {**observation, "metadata": {}}, "reward": reward, "done": done}
    return json.dumps({"type": "observation", "data": data})


def answer(kind: str, message: dict[str, Any], seen: list[dict[str, Any]]) -> str:
    """What is sent back; `seen` collects what was asked."""
    seen.append(message)
    data = message["data"]
    if message["type"] == "reset":
        return observed({"echoed": f"seed {data['seed']}"}, done=kind == "over")
    wrong = {
        "no json": "{",
        "no data": json.dumps({"type": "observation"}),
        "no observation": json.dumps({"type": "observation", "data": {"reward": 1, "done": False}}),
        "another type": json.dumps({"type": "state", "data": {}}),
        "no reward": observed({"echoed": ""}, "much"),
        "refuses": json.dumps({"type": "error", "data": {"message": "no such field", "code": "VALIDATION_ERROR"}}),
        "other field": observed({"text": "x"}, 0.0),
        "not finite": '{"type": "observation", "data": {"observation": {"echoed": ""}, "reward": NaN, "done": false}}',
    }
    if kind in wrong:
        return wrong[kind]
    if kind == "text":
        return observed({"echoed": data["message"]}, 0.5, data["message"] == "stop")
    if data["type"] == "list_tools":
        schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
        return observed({"tools": [{"name": "add", "description": "Adds.", "input_schema": schema}]})
    if data["arguments"].get("a") == 0:
        return observed({"tool_name": "add", "result": None, "error": {"error_type": "invalid_args", "message": "0"}})
    result = {"content": [{"type": "text", "text": str(data["arguments"]["a"] + 1)}], "data": 1}
    return observed({"tool_name": "add", "result": result, "error": None}, 1.0, data["arguments"]["a"] == 9)


@contextlib.asynccontextmanager
async def serving(kind: str) -> AsyncIterator[tuple[str, list[dict[str, Any]]]]:
    """The server's address, and what it was asked."""
    seen: list[dict[str, Any]] = []

    async def session(request: web.Request) -> web.WebSocketResponse:
        socket = web.WebSocketResponse()
        await socket.prepare(request)
        async for message in socket:
            asked = json.loads(message.data)
            if asked["type"] == "close" or (kind == "leaves" and asked["type"] == "step"):
                break
            await socket.send_str(answer(kind, asked, seen))
        return socket

    app = web.Application()
    app.router.add_get("/ws", session)
    runner = web.AppRunner(app, shutdown_timeout=1.0)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}", seen
    finally:
        await runner.cleanup()
