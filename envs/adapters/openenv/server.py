"""Environments of ours behind OpenEnv's protocol: one WebSocket session is one environment.

An action is `{"message": text}`, and `{"message": text, "truncate": reason}` ends the episode from outside. The
observation holds `text`, and under `sao` what `envs.core.AsyncEnv` says in `info`: messages, tools, task, metrics.
`reset` takes `seed`, `task_id` and `tool_format`.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Callable
from typing import Any

from aiohttp import WSMsgType, web

from envs.adapters.openenv.env import MARK
from envs.core import AsyncEnv, EnvironmentFault, Step
from envs.tool_calls import TOOL_FORMATS
from sandboxes.cancellation import to_the_end

log = logging.getLogger(__name__)

LARGEST_BYTES = 16 * 2**20
QUIET_S = 60.0
"""How often a silent session is asked whether it is still there."""
CALL_S = 900.0
"""How long a reset or a step may take: a step may grade."""


class Sessions:
    """`make` gives an environment for each session; no more than `limit` at once."""

    def __init__(self, make: Callable[[], AsyncEnv], name: str, limit: int) -> None:
        self._make, self._name, self._limit = make, name, limit
        self._open: set[web.WebSocketResponse] = set()

    def app(self) -> web.Application:
        """The server: `/ws`, and what OpenEnv's tools ask beside it (`/health`, `/metadata`, `/schema`)."""
        app = web.Application()
        app.router.add_get("/ws", self._session)
        app.router.add_get("/health", self._health)
        app.router.add_get("/metadata", self._metadata)
        app.router.add_get("/schema", self._schema)
        app.on_shutdown.append(self._end)
        return app

    async def _health(self, request: web.Request) -> web.Response:
        return web.json_response({"status": "healthy"})

    async def _metadata(self, request: web.Request) -> web.Response:
        return web.json_response({"name": self._name, "description": f"{self._name} of sao-agents, over OpenEnv"})

    async def _schema(self, request: web.Request) -> web.Response:
        text = {"type": "string"}
        action = {"type": "object", "properties": {"message": text, "truncate": text}, "required": ["message"]}
        observation = {"type": "object", "properties": {"text": text, MARK: {"type": "object"}}}
        state = {"type": "object", "properties": {"episode_id": text, "step_count": {"type": "integer"}}}
        return web.json_response({"action": action, "observation": observation, "state": state})

    async def _end(self, app: web.Application) -> None:
        for socket in list(self._open):
            await socket.close(code=1001, message=b"the server ends")

    async def _session(self, request: web.Request) -> web.WebSocketResponse:
        socket = web.WebSocketResponse(heartbeat=QUIET_S, max_msg_size=LARGEST_BYTES)
        await socket.prepare(request)
        if len(self._open) >= self._limit:
            await _refuse(socket, "CAPACITY_REACHED", f"{self._limit} sessions are open: see --max-sessions")
            await socket.close()
            return socket
        self._open.add(socket)
        env: AsyncEnv | None = None
        try:
            env = self._make()
            await _Session(socket, env).serve()
        finally:
            self._open.discard(socket)
            if env is not None:
                await to_the_end(env.aclose())
        return socket


class _Session:
    def __init__(self, socket: web.WebSocketResponse, env: AsyncEnv) -> None:
        self._socket, self._env = socket, env
        self._steps = 0
        self._task_id = ""

    async def serve(self) -> None:
        async for message in self._socket:
            if message.type is not WSMsgType.TEXT:
                continue
            try:
                asked = json.loads(message.data)
                kind, data = asked["type"], asked.get("data", {})
                if not isinstance(data, dict):
                    raise TypeError("data must be an object")
            except (ValueError, TypeError, KeyError, RecursionError) as error:
                await _refuse(self._socket, "INVALID_JSON", f"a message is {{type, data}}: {error!r}")
                continue
            if kind == "close":
                return
            await self._answer(kind, data)

    async def _answer(self, kind: Any, data: dict[str, Any]) -> None:
        answers = {"reset": self._reset, "step": self._step, "state": self._state}
        if not isinstance(kind, str) or kind not in answers:
            await _refuse(self._socket, "UNKNOWN_TYPE", f"there is no message {kind!r}")
            return
        try:
            async with asyncio.timeout(CALL_S):
                answer = await answers[kind](data)
        except (ValueError, TypeError) as error:
            await _refuse(self._socket, "VALIDATION_ERROR", str(error))
        except (EnvironmentFault, RuntimeError, TimeoutError, OSError) as error:
            log.warning("%s failed: %s", kind, error or type(error).__name__)
            await _refuse(self._socket, "EXECUTION_ERROR", str(error) or type(error).__name__)
        else:
            await self._socket.send_str(json.dumps(answer))

    async def _state(self, data: dict[str, Any]) -> dict[str, Any]:
        return {"type": "state", "data": {"episode_id": self._task_id, "step_count": self._steps}}

    async def _reset(self, data: dict[str, Any]) -> dict[str, Any]:
        seed, task_id, tool_format = data.get("seed"), data.get("task_id"), data.get("tool_format", "hermes")
        if seed is not None and (type(seed) is not int or seed < 0):
            raise ValueError(f"seed must be a whole number from 0 up, not {seed!r}")
        if tool_format not in TOOL_FORMATS:
            raise ValueError(f"tool_format must be one of {', '.join(TOOL_FORMATS)}, not {tool_format!r}")
        self._env.tool_format = tool_format
        self._steps = 0
        options = None if task_id is None else {"task_id": task_id}
        text, info = await self._env.areset(seed=seed, options=options)
        self._task_id = str(info["task_id"])
        keys = ("messages", "tools", "task_id", "family")
        return _observation(text, {key: info[key] for key in keys if key in info}, None, False)

    async def _step(self, data: dict[str, Any]) -> dict[str, Any]:
        action, reason = data.get("message"), data.get("truncate")
        if not isinstance(action, str) or not (reason is None or isinstance(reason, str)):
            raise ValueError(f'an action is {{"message": text}}, not {str(data)[:100]}')
        self._steps += 1
        step: Step = await (self._env.astep(action) if reason is None else self._env.atruncate(reason, action))
        text, reward, terminated, truncated, info = step
        keys = ("messages", "truncation", "metrics")
        kept = {key: info[key] for key in keys if key in info}
        return _observation(text, kept, reward, terminated or truncated)


def _observation(text: str, info: dict[str, Any], reward: float | None, done: bool) -> dict[str, Any]:
    return {"type": "observation", "data": {"observation": {"text": text, MARK: info}, "reward": reward, "done": done}}


async def _refuse(socket: web.WebSocketResponse, code: str, message: str) -> None:
    await socket.send_str(json.dumps({"type": "error", "data": {"code": code, "message": message}}))
