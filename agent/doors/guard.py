"""A door as aiohttp's middleware. Put it first: without the key nobody has a body read."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from aiohttp import web
from aiohttp.typedefs import Middleware

from agent.doors.door import ALWAYS_OPEN, opens, refusal

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


def guard(key: str, answer: Callable[[str], web.Response] | None = None) -> Middleware:
    """Middleware that answers 401 to requests without `key`; "": it lets everybody in.

    `answer`: makes the answer from a text, in the server's own form.
    """

    @web.middleware
    async def check(request: web.Request, handler: Handler) -> web.StreamResponse:
        shown = request.headers.get("Authorization", "")
        if request.path in ALWAYS_OPEN or opens(key, shown):
            return await handler(request)
        text = refusal(shown)
        refused = web.Response(status=401, text=text) if answer is None else answer(text)
        refused.headers["WWW-Authenticate"] = "Bearer"
        return refused

    return check
