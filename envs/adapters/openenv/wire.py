"""OpenEnv's session protocol: JSON messages over one WebSocket a session, at `/ws` of a server.

    -> {"type": "reset", "data": {"seed": 7, ...}}      <- {"type": "observation", "data": {"observation": {...},
    -> {"type": "step", "data": {...the action...}}                                "reward": 0.5, "done": false}}
    -> {"type": "close"}                                <- {"type": "error", "data": {"message": "...", "code": "..."}}

It is what the library's own `EnvClient` speaks. Few messages, so they are spoken here: the library brings a web
interface and a hundred packages, whose versions are not those of the learner.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from dataclasses import dataclass
from typing import Any

import aiohttp

from envs.core import EnvironmentFault

LARGEST_BYTES = 16 * 2**20
"""The largest message that is taken."""
CONNECT_S = 30.0
CLOSE_S = 5.0


@dataclass(frozen=True, slots=True)
class Observed:
    """What a server answered to a reset or a step. `reward` is None where it gave none."""

    observation: dict[str, Any]
    reward: float | None
    done: bool


class Session:
    """One session at a server: connected ──reset()──▶ playing ──step()*──▶ playing ──close()──▶ closed.

    Every method raises `EnvironmentFault` for a server that is gone, slow, or answers anything else than the protocol
    says; the session is of no use then.
    """

    def __init__(self, url: str) -> None:
        self._url = url.rstrip("/")
        self._http: aiohttp.ClientSession | None = None
        self._socket: aiohttp.ClientWebSocketResponse | None = None

    async def connect(self) -> None:
        """Open the session; once."""
        self._http = aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=None, connect=CONNECT_S))
        try:
            async with asyncio.timeout(CONNECT_S):
                self._socket = await self._http.ws_connect(f"{self._url}/ws", max_msg_size=LARGEST_BYTES)
        except (aiohttp.ClientError, OSError, TimeoutError, ValueError) as error:
            raise EnvironmentFault(
                f"no OpenEnv server answers at {self._url}: {error or type(error).__name__}"
            ) from error

    async def reset(self, limit_s: float, **data: Any) -> Observed:
        """Begin an episode; `data` are its parameters, `seed` for one."""
        return _observed(await self._ask({"type": "reset", "data": data}, limit_s))

    async def step(self, action: dict[str, Any], limit_s: float) -> Observed:
        """Carry out one action."""
        return _observed(await self._ask({"type": "step", "data": action}, limit_s))

    async def close(self) -> None:
        """End the session. Any state, any number of times; raises nothing."""
        socket, http, self._socket, self._http = self._socket, self._http, None, None
        with contextlib.suppress(aiohttp.ClientError, OSError, TimeoutError):
            async with asyncio.timeout(CLOSE_S):
                if socket is not None and not socket.closed:
                    await socket.send_json({"type": "close"})
                    await socket.close()
        if http is not None:
            await http.close()

    async def _ask(self, message: dict[str, Any], limit_s: float) -> dict[str, Any]:
        if self._socket is None:
            raise RuntimeError("connect the session first")
        try:
            async with asyncio.timeout(limit_s):
                await self._socket.send_str(json.dumps(message))
                answer = await self._socket.receive()
        except TimeoutError as error:
            raise EnvironmentFault(
                f"the OpenEnv server at {self._url} did not answer {message['type']} in {limit_s:g} s"
            ) from error
        except (aiohttp.ClientError, OSError, RuntimeError) as error:
            raise EnvironmentFault(f"the OpenEnv server at {self._url} is gone: {error}") from error
        if answer.type is not aiohttp.WSMsgType.TEXT:
            raise EnvironmentFault(f"the OpenEnv server at {self._url} ended the session ({answer.type.name})")
        return self._read(answer.data, message["type"])

    def _read(self, text: str, asked: str) -> dict[str, Any]:
        try:
            answer = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise EnvironmentFault(f"the OpenEnv server at {self._url} sent no JSON: {text[:100]!r}") from error
        data = answer.get("data") if isinstance(answer, dict) else None
        if not isinstance(data, dict):
            raise EnvironmentFault(f"the OpenEnv server at {self._url} sent {text[:100]!r}")
        if answer.get("type") == "error":
            said = f"{data.get('code')}, {str(data.get('message'))[:500]}"
            raise EnvironmentFault(f"the OpenEnv server at {self._url} refused {asked}: {said}")
        if answer.get("type") != "observation":
            raise EnvironmentFault(f"the OpenEnv server at {self._url} answered {asked} with {answer.get('type')!r}")
        return data


def _observed(data: dict[str, Any]) -> Observed:
    observation, reward, done = data.get("observation"), data.get("reward"), data.get("done", False)
    if not isinstance(observation, dict) or not isinstance(done, bool):
        raise EnvironmentFault(f"an OpenEnv server answered no observation, reward and done: {str(data)[:200]}")
    if reward is not None and not isinstance(reward, bool | int | float):
        raise EnvironmentFault(f"an OpenEnv server gave the reward {reward!r}")
    return Observed(observation, None if reward is None else float(reward), done)
