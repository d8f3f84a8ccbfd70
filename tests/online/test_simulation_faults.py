"""What goes wrong around a simulation is said in a line, not in a traceback."""

from __future__ import annotations

import asyncio
import json
import sys
from asyncio.subprocess import PIPE
from pathlib import Path

from aiohttp import web
from online_tools import ROOT, write_recipe


async def _models(_: web.Request) -> web.Response:
    return web.json_response({"data": [{"id": "policy"}]})


async def _events(request: web.Request) -> web.StreamResponse:
    response = web.StreamResponse()
    await response.prepare(request)
    await response.write(b"event: hello\ndata: " + json.dumps({"version": 0, "history": []}).encode() + b"\n\n")
    await asyncio.Event().wait()
    return response


async def _chat(_: web.Request) -> web.Response:
    message = {"content": "Aww, the fluffy rain!"}
    return web.json_response({"id": "r", "policy_version": 0, "choices": [{"message": message}]})


async def test_a_judge_that_is_down_ends_a_simulation_with_its_reason(tmp_path: Path) -> None:
    """Case G1: no verdict is no reward of 0, and no traceback either."""
    app = web.Application()
    app.add_routes([web.get("/v1/models", _models), web.get("/v1/events", _events)])
    app.add_routes([web.post("/v1/chat/completions", _chat)])
    runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.1)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        judge = "{kind: llm, url: 'http://127.0.0.1:9/v1', model: m, attempts: 1}"
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "agent.simulate", f"http://127.0.0.1:{runner.addresses[0][1]}"),
            *("--recipe", str(write_recipe(tmp_path)), "--out", str(tmp_path / "out"), f"env.kwargs.judge={judge}"),
            cwd=ROOT,
            stderr=PIPE,
        )
        _, said = await asyncio.wait_for(process.communicate(), 100)
    finally:
        await runner.cleanup()
    assert process.returncode == 1
    assert "error: " in said.decode()
    assert "the judge at http://127.0.0.1:9/v1 did not answer" in said.decode()
    assert "Traceback" not in said.decode()
    assert "Unclosed" not in said.decode()
