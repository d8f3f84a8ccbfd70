"""Reading the body of a request."""

from __future__ import annotations

import asyncio

from aiohttp import web

from agent.wire.errors import ApiError

BODY_S = 60.0
"""How long a client may take to send a body."""


async def body_of(request: web.Request, *, within_s: float = BODY_S) -> bytes:
    """The request's body; raises `ApiError` 408 for a client that does not finish it in time."""
    try:
        async with asyncio.timeout(within_s):
            return await request.read()
    except TimeoutError as error:
        raise ApiError(
            408, f"the request's body was not whole within {within_s:g} s", code="request_timeout"
        ) from error
