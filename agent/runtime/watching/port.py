"""The runtime's own HTTP port: `GET /metrics`, `GET /episodes`, `GET /health`. It only shows, and changes nothing."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

import msgspec
from aiohttp import web

from agent.child_processes import announce_port
from agent.doors.guard import guard
from agent.engines.pool import EnginePool
from agent.live import LiveReport
from agent.metrics_page import metrics_page
from agent.runtime.progress import Progress
from agent.runtime.watching.board import Board
from agent.runtime.watching.figures import runtime_figures

MOST_EPISODES = 1000


class _Wanted(msgspec.Struct):
    """Query of `/episodes`: so many episodes at most, and the events after this number."""

    limit: int = 50
    after: int = 0


@dataclass(frozen=True, slots=True)
class RuntimePort:
    """What a runtime shows, at `key` alone if there is one.

    async with port.listening("127.0.0.1", 0, folder / "runtime.port") as url:
        ...
    """

    worker: str
    progress: Progress
    board: Board
    engines: EnginePool
    key: str = ""

    def application(self) -> web.Application:
        """The aiohttp application."""
        app = web.Application(middlewares=[guard(self.key)])
        app.add_routes(
            [
                web.get("/health", self._health),
                web.get("/metrics", self._metrics),
                web.get("/episodes", self._episodes),
            ]
        )
        return app

    @contextlib.asynccontextmanager
    async def listening(self, host: str, port: int, port_file: Path | None) -> AsyncIterator[str]:
        """Answer inside the block, which is given the address. Raises OSError.

        `port` 0: any free one, which `port_file` says as long as it is there.
        """
        runner = web.AppRunner(self.application(), access_log=None, shutdown_timeout=1.0)
        await runner.setup()
        try:
            await web.TCPSite(runner, host, port).start()
            number = runner.addresses[0][1]
            await asyncio.to_thread(announce_port, port_file, number)
            yield f"http://{f'[{host}]' if ':' in host else host}:{number}"
        finally:
            if port_file is not None:
                await asyncio.to_thread(port_file.unlink, missing_ok=True)
            await runner.cleanup()

    def report(self, limit: int, after: int) -> LiveReport:
        """The state now: at most `limit` episodes, and the events after the number `after`."""
        progress, board = self.progress, self.board
        events, missed = board.since(after)
        return LiveReport(
            worker=self.worker,
            uptime_s=progress.uptime_s,
            slots=progress.states(),
            sampled_tokens=board.sampled_tokens,
            delivered=progress.counters["episodes"],
            reward=progress.reward,
            running=len(board.entries),
            episodes=board.rows(limit),
            events=events,
            missed=missed,
        )

    async def _health(self, _: web.Request) -> web.Response:
        return web.json_response({"status": "ok"})

    async def _metrics(self, _: web.Request) -> web.Response:
        return metrics_page(runtime_figures(self.progress, self.board, self.engines.states()))

    async def _episodes(self, request: web.Request) -> web.Response:
        try:
            wanted = msgspec.convert(dict(request.query), _Wanted, strict=False)
        except msgspec.ValidationError as error:
            raise web.HTTPBadRequest(text=f"/episodes?limit=50&after=0: {error}") from error
        report = self.report(min(max(0, wanted.limit), MOST_EPISODES), max(0, wanted.after))
        return web.Response(body=msgspec.json.encode(report), content_type="application/json")
