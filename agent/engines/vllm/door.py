"""A door for `vllm serve`: `--middleware agent.engines.vllm.door.Door` with VLLM_API_KEY in its environment.

vLLM's own check covers the paths that sample (/v1, /inference). Those that pause an engine and change its weights are
open to everybody who reaches the port, in 0.32. This covers all but /health.
It is imported in the server's environment, so it needs nothing but the standard library.
"""

from __future__ import annotations

import json
import os
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from agent.doors.door import ALWAYS_OPEN, opens, refusal

KEY_VARIABLE = "VLLM_API_KEY"
"""vLLM's own variable: the same key as `--api-key`, without being in a list of processes."""

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]


class Door:
    """ASGI middleware around `app`: 401 without the key of $VLLM_API_KEY; no key there, and everybody may come in."""

    def __init__(self, app: App) -> None:
        self._app, self._key = app, os.environ.get(KEY_VARIABLE, "")

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] not in ("http", "websocket") or scope.get("path") in ALWAYS_OPEN:
            await self._app(scope, receive, send)
            return
        shown = next((value.decode("latin-1") for name, value in scope["headers"] if name == b"authorization"), "")
        if opens(self._key, shown):
            await self._app(scope, receive, send)
        elif scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1008})
        else:
            body = json.dumps({"error": {"message": refusal(shown), "type": "Unauthorized", "code": 401}}).encode()
            headers = [(b"content-type", b"application/json"), (b"www-authenticate", b"Bearer")]
            await send({"type": "http.response.start", "status": 401, "headers": headers})
            await send({"type": "http.response.body", "body": body})
