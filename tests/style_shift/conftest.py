"""A judge's server, and judges that ask it."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import pytest
from aiohttp import web
from judge_server import Make, Server

from envs.style_shift.judging.llm import LLMJudge, LLMJudgeSettings


@pytest.fixture
async def server() -> AsyncIterator[Server]:
    server = Server()
    app = web.Application()
    app.router.add_post("/v1/chat/completions", server.handle)
    runner = web.AppRunner(app, shutdown_timeout=0.1, handler_cancellation=True)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    server.url = f"http://127.0.0.1:{runner.addresses[0][1]}/v1"
    yield server
    await runner.cleanup()


@pytest.fixture
async def make(server: Server) -> AsyncIterator[Make]:
    judges: list[LLMJudge] = []

    def make_one(**kwargs: Any) -> LLMJudge:
        settings = {"url": server.url, "model": "judge", "attempts": 3, "backoff_s": 0.001, **kwargs}
        judges.append(LLMJudge(LLMJudgeSettings(**settings)))
        return judges[-1]

    yield make_one
    for judge in judges:
        await judge.aclose()
