"""Clients that send or read nothing: each has a time limit, and nothing of them is left."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable

from aiohttp import web

from agent.serve.api.events import EventHub
from agent.serve.api.limits import Keys
from agent.serve.api.whose import Viewer
from agent.serve.doors.listening import Bounds, listening
from agent.serve.owner_config import EventsConfig
from agent.wire.body import body_of
from agent.wire.errors import errors_as_json

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


@contextlib.asynccontextmanager
async def answering(handler: Handler) -> AsyncIterator[tuple[web.AppRunner, int]]:
    app = web.Application(middlewares=[errors_as_json])
    app.router.add_route("*", "/", handler)
    runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    try:
        yield runner, runner.addresses[0][1]
    finally:
        await runner.cleanup()


async def test_a_watcher_that_reads_nothing_is_let_go_with_its_connection() -> None:
    hub, ended = EventHub(), asyncio.Event()

    async def watch(request: web.Request) -> web.StreamResponse:
        try:
            viewer = Viewer("k", None, EventsConfig())
            return await hub.serve(request, {"samples": "x" * 20_000_000}, viewer=viewer, write_s=0.2)
        finally:
            ended.set()

    async with answering(watch) as (runner, port):
        _, writer = await asyncio.open_connection("127.0.0.1", port, limit=1024)
        writer.write(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
        async with asyncio.timeout(60):
            await ended.wait()
            assert runner.server is not None
            while runner.server.connections:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        writer.transport.abort()


async def test_a_body_that_never_ends_is_a_408() -> None:
    async def take(request: web.Request) -> web.StreamResponse:
        return web.Response(body=await body_of(request, within_s=0.2))

    async with answering(take) as (_, port), asyncio.timeout(60):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 10\r\n\r\nhalf")
        assert b" 408 " in await reader.readline()
        writer.transport.abort()


async def test_a_key_in_other_bytes_than_utf8_is_a_401_and_no_failure_of_ours() -> None:
    keys = Keys({"ann-secret-1": "ann"})

    async def take(request: web.Request) -> web.StreamResponse:
        return web.Response(text=keys.caller(request))

    async with answering(take) as (_, port), asyncio.timeout(60):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"GET / HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer \xff\xfe\r\n\r\n")
        assert b" 401 " in await reader.readline()
        writer.transport.abort()


async def test_headers_that_never_end_and_answers_that_nobody_reads_hold_no_connection() -> None:
    async def large(_: web.Request) -> web.StreamResponse:
        return web.Response(body=b"x" * 20_000_000)

    app = web.Application()
    app.router.add_get("/", large)
    bounds = Bounds(connections=100, each=50, header_s=0.2, keep_alive_s=60.0, write_s=0.2)
    async with listening(app, "127.0.0.1", 0, bounds) as (url, listener), asyncio.timeout(60):
        port = int(url.rpartition(":")[2])
        begun = [await asyncio.open_connection("127.0.0.1", port) for _ in range(60)]
        for _, writer in begun:
            writer.write(b"GET / HTTP/1.1\r\nHost: ")
        _, unread = await asyncio.open_connection("127.0.0.1", port, limit=1024)
        unread.write(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
        while listener.visitors.dropped < 11:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        while listener.visitors.inside:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        for _, writer in [*begun, (None, unread)]:
            writer.transport.abort()
