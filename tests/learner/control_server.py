"""The control half of an engine, and what waits for it."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import torch
from aiohttp import web

from agent.doors.guard import guard
from agent.engines.weight_stream import opened_buffer, unpack

WAIT_S = 120.0


class ControlServer:
    """The control half of the token protocol, on a port that stays the same over `stop` and `start`."""

    def __init__(self) -> None:
        self.key = ""
        self.label = "base"
        self.published: list[tuple[str, str]] = []
        self.answers: list[tuple[int, str]] = []
        self.port = 0
        self.tensors: dict[str, torch.Tensor] = {}  # of the last stream
        self._path = ""
        self._manifest: Any = {}
        self._runner: web.AppRunner | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def start(self) -> None:
        app = web.Application(middlewares=[guard(self.key)])
        app.router.add_get("/health", self._empty)
        app.router.add_get("/metrics", self._empty)
        app.router.add_get("/weight_info", self._info)
        app.router.add_get("/v1/models", self._models)
        app.router.add_get("/get_world_size", self._workers)
        for path in ("/pause", "/start_weight_update", "/reset_prefix_cache", "/resume"):
            app.router.add_post(path, self._empty)
        app.router.add_post("/update_weights", self._update)
        app.router.add_post("/finish_weight_update", self._finish)
        self._runner = web.AppRunner(app, shutdown_timeout=0.1)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", self.port).start()
        self.port = self._runner.addresses[0][1]

    async def stop(self) -> None:
        if self._runner is not None:
            await self._runner.cleanup()
            self._runner = None

    async def _empty(self, request: web.Request) -> web.Response:
        return web.Response(text="")

    async def _info(self, request: web.Request) -> web.Response:
        return web.json_response({"weight_version": self.label})

    async def _models(self, request: web.Request) -> web.Response:
        return web.json_response({"data": [{"id": "m", "max_model_len": 512}]})

    async def _workers(self, request: web.Request) -> web.Response:
        return web.json_response({"world_size": 1})

    async def _update(self, request: web.Request) -> web.Response:
        if self.answers:
            status, text = self.answers.pop(0)
            return web.json_response({"error": {"message": text}}, status=status)
        info = (await request.json())["update_info"]
        if "manifest" in info:
            self._path, self._manifest, self.tensors = "stream", info["manifest"], {}
        elif "bucket" in info:
            packed = opened_buffer(info["shared"], torch.device("cpu"))
            self.tensors |= dict(unpack(packed, self._manifest, info["bucket"]))
        else:
            self._path = info["path"]
        return web.Response(text="")

    async def _finish(self, request: web.Request) -> web.Response:
        self.label = (await request.json())["weight_version"]
        self.published.append((self.label, Path(self._path).name))
        return web.Response(text="")


@contextlib.asynccontextmanager
async def servers(count: int) -> AsyncIterator[list[ControlServer]]:
    made = [ControlServer() for _ in range(count)]
    try:
        for server in made:
            await server.start()
        yield made
    finally:
        for server in made:
            await server.stop()


async def until(condition: Callable[[], Any]) -> None:
    async with asyncio.timeout(WAIT_S):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.01)
