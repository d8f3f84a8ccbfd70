"""A resource server of NeMo Gym in small, after its documented protocol: a counter for each session, by cookie.

The library itself needs Python 3.13.14 and a newer set of packages than the project's, so it is not installed here.
`kind`: "sound", or a way to be wrong.
"""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import AsyncIterator, Iterator
from typing import Any

from aiohttp import web


class Counters:
    """Seeded by `initial_count`; right is worth 1 where the counter is `expected_count` at the end."""

    def __init__(self, kind: str = "sound") -> None:
        self.kind = kind
        self.counts: dict[str, int] = {}
        self.verified: list[dict[str, Any]] = []

    def app(self) -> web.Application:
        app = web.Application()
        for path in ("seed_session", "increment_counter", "get_counter_value", "verify"):
            app.router.add_post(f"/{path}", getattr(self, path))
        return app

    def _session(self, request: web.Request) -> str:
        return request.cookies["session"]  # a request without one is an error: 500

    async def seed_session(self, request: web.Request) -> web.Response:
        body = await request.json()
        if self.kind == "unseeded":
            return web.json_response({"detail": "initial_count is missing"}, status=422)
        session = secrets.token_hex(8)
        self.counts[session] = body["initial_count"]
        response = web.json_response({})
        response.set_cookie("session", session)
        return response

    async def increment_counter(self, request: web.Request) -> web.Response:
        body = await request.json()
        if not isinstance(body.get("count"), int):
            return web.json_response({"detail": [{"msg": "count must be a whole number"}]}, status=422)
        if self.kind == "gateway":
            return web.Response(status=502)
        self.counts[self._session(request)] += body["count"]
        return web.json_response({"success": True})

    async def get_counter_value(self, request: web.Request) -> web.Response:
        return web.json_response({"count": self.counts[self._session(request)]})

    async def verify(self, request: web.Request) -> web.Response:
        body = await request.json()
        self.verified.append(body)
        right = self.counts[self._session(request)] == body["expected_count"]
        wrong = {
            "no json": web.Response(text="<html>"),
            "no reward": web.json_response({}),
            "text reward": web.json_response({"reward": "1"}),
            "masked": web.json_response({"reward": 0, "mask_sample": True, "failure_reason": "out of memory"}),
            "fails": web.json_response({"detail": "x"}, status=500),
        }
        if self.kind in wrong:
            return wrong[self.kind]
        return web.json_response({**body, "reward": float(right), "calls": len(body["response"]["output"])})


@contextlib.asynccontextmanager
async def counting(kind: str = "sound") -> AsyncIterator[tuple[str, Counters]]:
    """The server's address, and the server."""
    counters = Counters(kind)
    runner = web.AppRunner(counters.app(), shutdown_timeout=1.0)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}", counters
    finally:
        await runner.cleanup()


@contextlib.contextmanager
def counting_beside() -> Iterator[str]:
    """The same in a thread, for a run in other processes."""
    import asyncio
    import threading

    started, ended, found = threading.Event(), asyncio.Event(), []

    async def serve() -> None:
        async with counting() as (url, _):
            found.append((url, asyncio.get_running_loop()))
            started.set()
            await ended.wait()

    thread = threading.Thread(target=lambda: asyncio.run(serve()))
    thread.start()
    assert started.wait(60)
    url, loop = found[0]
    try:
        yield url
    finally:
        loop.call_soon_threadsafe(ended.set)
        thread.join()
