"""The learner's way to the engine: the engine protocol on a loopback port of its own, with publications in our hands.

To the learner this is an engine like any other: it samples, asks for health, and publishes. What it publishes goes
through `Versions`, which keeps it, holds it while versions are pinned, or gives it to the engine. It asks for the run's
shared key, as the engine behind it does: who comes in can change the weights.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path

import aiohttp
import msgspec
from aiohttp import web

from agent.doors.door import bearer
from agent.doors.guard import guard
from agent.engines.base import EngineFault, EngineRefused
from agent.serve.versions.following import SERVED_PATH
from agent.serve.versions.publishing import Versions
from agent.wire.errors import ApiError, json_response

_PASSED_POST = ("/inference/v1/generate", "/abort_requests")
_PASSED_GET = ("/health", "/weight_info", "/metrics", "/v1/models", "/is_paused")
# Steps of a publication that `Versions` takes by itself.
_TAKEN_HERE = ("/pause", "/resume", "/start_weight_update", "/reset_prefix_cache")


class _Info(msgspec.Struct):
    path: str


class _Update(msgspec.Struct):
    update_info: _Info


class _Finish(msgspec.Struct):
    weight_version: str


class _Adapter(msgspec.Struct):
    lora_path: str


class _Label(msgspec.Struct):
    new_version: str


class EngineProxy:
    """An aiohttp application that looks like `engine_url`'s engine, behind the same `key`."""

    def __init__(self, versions: Versions, engine_url: Callable[[], str], *, timeout_s: float, key: str) -> None:
        self._key = key
        self._versions, self._engine_url, self._timeout_s = versions, engine_url, timeout_s
        self._session: aiohttp.ClientSession | None = None
        self._staged: Path | None = None

    def application(self) -> web.Application:
        """The application, for a loopback site."""
        app = web.Application(client_max_size=64 * 2**20, middlewares=[guard(self._key, _unauthorized), _engine_errors])
        app.add_routes([web.post(path, self._pass) for path in _PASSED_POST])
        app.add_routes([web.get(path, self._pass) for path in _PASSED_GET])
        app.add_routes([web.post(path, self._taken_here) for path in _TAKEN_HERE])
        app.add_routes(
            [
                web.post("/update_weights", self._update),
                web.post("/finish_weight_update", self._finish),
                web.post("/v1/load_lora_adapter", self._update_adapter),
                web.post("/update_weight_version", self._finish_adapter),
            ]
        )
        app.add_routes([web.get(SERVED_PATH, self._served)])
        app.on_cleanup.append(self._close)
        return app

    async def _close(self, _: web.Application) -> None:
        if self._session is not None:
            await self._session.close()

    async def _pass(self, request: web.Request) -> web.Response:
        if self._session is None:
            self._session = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=2.0),
                timeout=aiohttp.ClientTimeout(total=self._timeout_s),
                headers=bearer(self._key),
            )
        data = await request.read()
        try:
            async with self._session.request(
                request.method,
                self._engine_url() + request.path_qs,
                data=data or None,
                headers=_passed_headers(request),
            ) as answer:
                return web.Response(
                    body=await answer.read(), status=answer.status, content_type=answer.content_type or "text/plain"
                )
        except (aiohttp.ClientError, TimeoutError) as error:
            raise EngineFault(f"the engine behind the server does not answer: {error!r}") from error

    async def _served(self, _: web.Request) -> web.Response:
        number, path = self._versions.served_now()
        return json_response({"version": number, "path": path})

    async def _taken_here(self, request: web.Request) -> web.Response:
        await request.read()
        return json_response({"status": "the server does this itself"})

    async def _update(self, request: web.Request) -> web.Response:
        info = msgspec.json.decode(await request.read(), type=_Update).update_info
        return await self._stage(Path(info.path))

    async def _finish(self, request: web.Request) -> web.Response:
        return await self._publish(msgspec.json.decode(await request.read(), type=_Finish).weight_version)

    async def _update_adapter(self, request: web.Request) -> web.Response:
        return await self._stage(Path(msgspec.json.decode(await request.read(), type=_Adapter).lora_path))

    async def _finish_adapter(self, request: web.Request) -> web.Response:
        return await self._publish(msgspec.json.decode(await request.read(), type=_Label).new_version)

    async def _stage(self, path: Path) -> web.Response:
        if not await asyncio.to_thread(path.is_dir):
            raise ApiError(400, f"no snapshot at {path}: it must be a folder that the server can read")
        self._staged = path
        return json_response({"message": "Weights noted"})

    async def _publish(self, label: str) -> web.Response:
        staged, self._staged = self._staged, None
        if staged is None or not label.isdecimal():
            raise ApiError(400, "call /update_weights (or /v1/load_lora_adapter) first, and give a whole number")
        return json_response({"message": await self._versions.publish(int(label), staged)})


def _passed_headers(request: web.Request) -> dict[str, str]:
    return {name: value for name in ("Content-Type", "X-Request-Id") if (value := request.headers.get(name))}


@web.middleware
async def _engine_errors(
    request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
) -> web.StreamResponse:
    """Errors as an engine gives them, so that its client tells apart what to repeat."""
    try:
        return await handler(request)
    except msgspec.DecodeError as error:
        status, text = 400, f"bad request body: {error}"
    except ApiError as error:
        status, text = error.status, error.message
    except EngineRefused as error:
        status, text = error.status, str(error)
    except EngineFault as error:
        status, text = 500, str(error)
    return _error(status, text)


def _unauthorized(text: str) -> web.Response:
    return _error(401, text)


def _error(status: int, text: str) -> web.Response:
    return json_response({"error": {"message": text, "type": "engine", "param": None, "code": status}}, status)
