"""`NemoGym`: the tasks of a NeMo Gym resource server, with our runtime in the place of its agent and model servers.

POST /seed_session   the row             its cookies are the session
POST /TOOL           the arguments       what comes back is what the policy reads
POST /verify         the row, and the policy's turns as `response`      -> reward
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote

import aiohttp

from envs.adapters.nemo_gym.rows import Row, load_rows, response_of
from envs.adapters.turns import MAX_TURNS, Opening, Reply, TurnEnv, reward_number, sendable
from envs.arguments import ArgumentError, Count, Seconds, checked_arguments
from envs.core import EnvironmentFault, Message
from envs.tool_calls import ToolCall, visible_text

LARGEST_BYTES = 16 * 2**20
_GONE = frozenset({502, 503, 504})
_RESERVED = frozenset({"verify", "seed_session", "close_session", "aggregate_metrics", "mcp", "reverify_mode"})


class NemoGym(TurnEnv):
    """Rows of a data set, played at a resource server; `docs/suites.md` is the manual page.

    `url`: the server, http://host:port. `data`: its data set, JSON lines. `max_turns`, `wall_clock_s`: of an episode;
    `tool_timeout_s`, `verify_timeout_s`: how long the server may take. `observation_chars`: what is shown of an answer.
    """

    @checked_arguments(apart=("data",))
    def __init__(
        self,
        url: str,
        data: str | Path,
        *,
        max_turns: Count = MAX_TURNS,
        wall_clock_s: Seconds | None = None,
        tool_timeout_s: Seconds = 60.0,
        verify_timeout_s: Seconds = 300.0,
        observation_chars: Count = 30_000,
    ) -> None:
        super().__init__(max_turns=max_turns, wall_clock_s=wall_clock_s)
        if not url.startswith(("http://", "https://")):
            raise ArgumentError(f"url must be the address of a resource server, http://host:port, not {url!r}")
        self._url = url.rstrip("/")
        self._rows = {row.task_id: row for row in load_rows(Path(data).expanduser().resolve())}
        for row in self._rows.values():
            for tool in row.tools:
                if tool["function"]["name"] in _RESERVED:
                    raise ArgumentError(
                        f"data: {row.task_id}: {tool['function']['name']} is no tool but the server's own"
                    )
        self._tool_s, self._verify_s, self._shown = tool_timeout_s, verify_timeout_s, observation_chars
        self._http: aiohttp.ClientSession | None = None
        self._row: Row | None = None
        self._tool_errors = 0

    @property
    def task_ids(self) -> Sequence[str]:
        """The rows, by the file's name and their number."""
        return tuple(self._rows)

    async def _open(self, task_id: str, seed: int | None) -> Opening:
        self._row, self._tool_errors = self._rows[task_id], 0
        # `unsafe`: cookies of addresses without a name, as servers on this machine have.
        self._http = aiohttp.ClientSession(cookie_jar=aiohttp.CookieJar(unsafe=True))
        status, text = await self._post("seed_session", dict(self._row.data), self._tool_s)
        if status != 200:
            raise EnvironmentFault(f"{self._url} did not seed a session for {task_id}: HTTP {status}: {text[:300]}")
        return Opening(list(self._row.messages), list(self._row.tools), "nemo_gym")

    async def _act(self, action: str, calls: Sequence[ToolCall], content: str) -> Reply:
        if not calls:
            return Reply(ended=True)
        messages: list[Message] = []
        for number, call in enumerate(calls):
            status, text = await self._post(quote(call.name, safe=""), call.arguments, self.left_s(self._tool_s))
            self._tool_errors += status >= 400
            shown = text if len(text) <= self._shown else f"{text[: self._shown]}\n[cut at {self._shown} characters]"
            messages.append({"role": "tool", "content": shown, "tool_call_id": self.call_id(number)})
        return Reply(messages)

    async def _grade(self, truncation: str | None) -> tuple[float, dict[str, Any]]:
        row = self._row
        assert row is not None
        played = self.transcript[len(row.messages) :]
        # Graders read the whole of an output text; what was only thought is no answer.
        spoken = [
            {**message, "content": visible_text(message["content"])} if message["role"] == "assistant" else message
            for message in played
        ]
        response = response_of(spoken, row.data, truncated=truncation is not None)
        status, text = await self._post("verify", {**row.data, "response": response}, self._verify_s)
        if status != 200:
            raise EnvironmentFault(f"{self._url} did not verify {row.task_id}: HTTP {status}: {text[:300]}")
        try:
            verdict = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise EnvironmentFault(f"{self._url} answered verify with no JSON: {text[:100]!r}") from error
        if not isinstance(verdict, dict) or "reward" not in verdict:
            raise EnvironmentFault(f"{self._url} answered verify without a reward: {text[:200]}")
        if verdict.get("mask_sample"):
            why = verdict.get("failure_reason") or verdict.get("failure_kind") or "no reason given"
            raise EnvironmentFault(f"{self._url} says that {row.task_id} was not measured: {why}")
        reward = reward_number(verdict["reward"], f"{self._url}: the reward of {row.task_id}")
        figures = {
            key: value
            for key, value in verdict.items()
            if key not in row.data and key != "reward" and isinstance(value, bool | int | float)
        }
        return reward, {**figures, "tool_errors": self._tool_errors}

    async def _release(self) -> None:
        http, self._http = self._http, None
        if http is not None:
            await http.close()

    async def _post(self, path: str, body: dict[str, Any], limit_s: float) -> tuple[int, str]:
        """The status and text of an answer; a server that is gone, or says that it is, is an `EnvironmentFault`."""
        assert self._http is not None
        try:
            async with (
                asyncio.timeout(limit_s),
                self._http.post(
                    f"{self._url}/{path}",
                    data=json.dumps(sendable(body)),
                    headers={"Content-Type": "application/json"},
                    allow_redirects=False,
                ) as response,
            ):
                raw = bytearray()
                async for piece in response.content.iter_chunked(65536):
                    raw += piece
                    if len(raw) > LARGEST_BYTES:
                        raise EnvironmentFault(f"{self._url}/{path} answered with more than {LARGEST_BYTES} bytes")
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            raise EnvironmentFault(f"{self._url}/{path}: {error or f'no answer in {limit_s:g} s'}") from error
        if response.status in _GONE:
            raise EnvironmentFault(f"{self._url}/{path}: HTTP {response.status}")
        return response.status, raw.decode("utf-8", "replace")
