"""Whoever watches /v1/events gets every event while it reads, however much happens on the server."""

from __future__ import annotations

import asyncio

import aiohttp
import pytest
from aiohttp import web

from agent.serve.api.events import EventHub, Figures
from agent.serve.api.whose import Owner, Viewer, trusts
from agent.serve.owner_config import EventsConfig, FiguresConfig


async def test_a_watcher_that_reads_is_not_dropped_when_events_come_in_crowds() -> None:
    hub, rounds, crowd = EventHub(), 20, 300

    async def watch(request: web.Request) -> web.StreamResponse:
        return await hub.serve(request, {}, viewer=Viewer("k", None, EventsConfig()), write_s=30.0)

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


@pytest.mark.parametrize(
    ("viewer", "sees"),
    [
        (Viewer("k", "ann", EventsConfig()), True),
        (Viewer("k", "bob", EventsConfig()), False),
        (Viewer("k", None, EventsConfig()), False),
        (Viewer("k", "", EventsConfig()), False),
        (Viewer("other", "ann", EventsConfig()), False),
        (Viewer("k", None, EventsConfig(details="key")), True),
        (Viewer("k", "bob", EventsConfig(details="key")), False),
        (Viewer("other", None, EventsConfig(details="key")), False),
        (Viewer("k", "ann", EventsConfig(details="none")), False),
        (Viewer("admin-eve", None, EventsConfig()), False),
        (Viewer("admin-eve", None, EventsConfig(admins_see_all=True)), True),
        (Viewer("k2", None, EventsConfig(admins_see_all=True)), False),
    ],
)
def test_details_are_for_their_owner(viewer: Viewer, sees: bool) -> None:
    hub = EventHub()
    hub.publish("feedback", {"mean": 1}, owner=Owner("k", "ann"), details={"response_id": "r"})
    [event] = hub.history(viewer)
    assert viewer.sees(Owner("k", "ann")) is sees
    assert ("response_id" in event) is sees
    assert event["mean"] == 1


def test_whose_metadata_counts_for_everybody_is_a_setting() -> None:
    ours = FiguresConfig(from_metadata=("app",))
    assert [trusts(ours, key) for key in ("app", "admin-eve", "ann", "anonymous")] == [True, True, False, False]
    assert not trusts(FiguresConfig(), "anonymous")
    assert trusts(FiguresConfig(from_metadata=("*",)), "anonymous")


def test_names_of_styles_are_few() -> None:
    """Every chart, every sample and every page holds them for good."""
    figures, named = Figures(), Figures(["cute"])
    for number in range(100):
        figures.judged(1.0, {"style": f"s{number}"})
        named.judged(1.0, {"style": "cute" if number % 2 else f"s{number}"})
    assert figures.snapshot()["style_share"] == pytest.approx({"other": 0.84} | {f"s{i}": 0.01 for i in range(7)})
    assert named.snapshot()["style_share"] == {"other": 0.5, "cute": 0.5}
