"""Whoever watches /v1/events gets every event while it reads, however much happens on the server."""

from __future__ import annotations

import asyncio

import aiohttp
from aiohttp import web

from agent.serve.api.events import EventHub


async def test_a_watcher_that_reads_is_not_dropped_when_events_come_in_crowds() -> None:
    hub, rounds, crowd = EventHub(), 20, 300

    async def watch(request: web.Request) -> web.StreamResponse:
        return await hub.serve(request, {}, write_s=30.0)

    app = web.Application()
    app.router.add_get("/", watch)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    seen = 0
    try:
        url = f"http://127.0.0.1:{runner.addresses[0][1]}/"
        async with asyncio.timeout(60), aiohttp.ClientSession() as session, session.get(url) as answer:
            assert (await answer.content.readline()) == b"event: hello\n"

            async def read() -> None:
                nonlocal seen
                async for line in answer.content:
                    seen += line.startswith(b"event: response")

            reading = asyncio.create_task(read())
            for _ in range(rounds):
                for number in range(crowd):
                    hub.publish("response", {"number": number}, keep=False)
                for _ in range(40):  # a busy loop: few turns for each watcher, and many events in each
                    await asyncio.sleep(0)
            hub.close()
            await reading
    finally:
        await runner.cleanup()
    assert seen == rounds * crowd
