"""`OpenEnv`: an environment behind an OpenEnv server, as one of this project.

A session of the server is an episode. Three kinds of servers are met:

- *Text.* The policy's text is one field of the action (`action_key`), what it reads one of the observation
  (`observation_key`).
- *Tools* (`tools=True`). The server's tools, asked for with `list_tools`, are the policy's; each call is a step.
- *Ours.* What `python -m envs.adapters.openenv serve` serves says its chat messages and tools in the observation.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from envs.adapters.openenv.wire import Observed, Session
from envs.adapters.turns import MAX_TURNS, Opening, Reply, TurnEnv, reward_number, sendable, task_range
from envs.arguments import ArgumentError, Count, Seconds, checked_arguments
from envs.core import EnvironmentFault, Message
from envs.tool_calls import ToolCall

MARK = "sao"
"""The key of an observation by which a server of ours is known; it holds what `envs.core.AsyncEnv` says in `info`."""


class OpenEnv(TurnEnv):
    """Tasks of an OpenEnv server; `docs/suites.md` is the manual page.

    `url`: the server, http://host:port. `tasks`: which seeds are the tasks, `{start: 0, count: 1000}`; each is handed
    to `reset`, with the keys of `reset` beside it. `action_key`: the field of an action that holds the policy's text;
    `observation_key`: the field of an observation that is shown (None: all of it, as JSON). `tools`: the policy calls
    the server's tools, and a text without a call ends the episode. `system_prompt`: shown first, if there is one.
    `max_turns`, `wall_clock_s`: of an episode; `step_timeout_s`: how long the server may take.
    """

    @checked_arguments(apart=("tasks", "reset"))
    def __init__(
        self,
        url: str,
        *,
        tasks: Mapping[str, Any] | None = None,
        reset: Mapping[str, Any] | None = None,
        action_key: str = "message",
        observation_key: str | None = None,
        tools: bool = False,
        system_prompt: str = "",
        max_turns: Count = MAX_TURNS,
        wall_clock_s: Seconds | None = None,
        step_timeout_s: Seconds = 60.0,
    ) -> None:
        super().__init__(max_turns=max_turns, wall_clock_s=wall_clock_s)
        if not url.startswith(("http://", "https://")):
            raise ArgumentError(f"url must be the address of an OpenEnv server, http://host:port, not {url!r}")
        self._url = url
        self._ids = tuple(f"seed-{seed}" for seed in task_range(tasks or {}, 1000))
        self._reset = dict(reset or {})
        self._action_key, self._observation_key = action_key, observation_key
        self._with_tools, self._system_prompt = tools, system_prompt
        self._step_s = step_timeout_s
        self._session: Session | None = None
        self._is_ours = False
        self._is_over = False
        self._figures: dict[str, Any] = {}

    @property
    def task_ids(self) -> Sequence[str]:
        """`seed-0` and so on: a server says no more of its tasks than that a seed leads to one."""
        return self._ids

    async def _open(self, task_id: str, seed: int | None) -> Opening:
        self._session, self._figures, self._is_over = Session(self._url), {}, False
        await self._session.connect()
        data = {**self._reset, "seed": int(task_id.removeprefix("seed-"))}
        first = await self._session.reset(self._step_s, **data, tool_format=self.tool_format)
        if first.done:
            raise EnvironmentFault(f"{self._url}: the episode of {task_id} is over before it begins")
        self._is_ours = isinstance(first.observation.get(MARK), dict)
        if self._is_ours:
            info = first.observation[MARK]
            tools = info.get("tools")
            family = str(info.get("family") or "openenv")
            return Opening(_messages(info), tools if isinstance(tools, list) else [], family, reads_calls=False)
        tools = await self._server_tools() if self._with_tools else []
        system: list[Message] = [{"role": "system", "content": self._system_prompt}] if self._system_prompt else []
        return Opening([*system, {"role": "user", "content": self._shown(first.observation)}], tools, "openenv")

    async def _act(self, action: str, calls: Sequence[ToolCall], content: str) -> Reply:
        if not self._with_tools:
            return self._reply(await self._sent({self._action_key: action}))
        if not calls:
            return Reply(ended=True)
        messages: list[Message] = []
        reward = 0.0
        for number, call in enumerate(calls):
            seen = await self._sent({"type": "call_tool", "tool_name": call.name, "arguments": call.arguments})
            reward += seen.reward or 0.0
            text = _tool_text(seen.observation)
            messages.append({"role": "tool", "content": text, "tool_call_id": self.call_id(number)})
            if seen.done:
                return Reply(reward=reward, ended=True)
        return Reply(messages, reward)

    async def _grade(self, truncation: str | None) -> tuple[float, dict[str, Any]]:
        if truncation is None or not self._is_ours or self._is_over:
            return 0.0, self._figures  # its rewards came with its steps; it knows no truncation
        last = self.transcript[-1]
        action = str(last["content"]) if last["role"] == "assistant" else ""
        seen = await self._sent({self._action_key: action, "truncate": truncation})
        return self._reply(seen).reward, self._figures

    async def _release(self) -> None:
        session, self._session = self._session, None
        if session is not None:
            await session.close()

    async def _sent(self, action: dict[str, Any]) -> Observed:
        assert self._session is not None
        return await self._session.step(action if self._is_ours else sendable(action), self.left_s(self._step_s))

    def _reply(self, seen: Observed) -> Reply:
        reward = reward_number(0.0 if seen.reward is None else seen.reward, f"{self._url}: a reward")
        if not self._is_ours:
            shown: list[Message] = [] if seen.done else [{"role": "user", "content": self._shown(seen.observation)}]
            return Reply(shown, reward, seen.done)
        info = seen.observation.get(MARK)
        if not isinstance(info, dict):
            raise EnvironmentFault(f"{self._url}: an observation without {MARK!r}: {str(seen.observation)[:200]}")
        if not seen.done:
            return Reply(_messages(info), reward)
        metrics = info.get("metrics")
        self._figures = {key: value for key, value in (metrics or {}).items() if key not in ("family", "turns")}
        self._is_over = True
        return Reply([], reward, ended=True, truncation=info.get("truncation"))

    async def _server_tools(self) -> list[dict[str, Any]]:
        seen = await self._sent({"type": "list_tools"})
        listed = seen.observation.get("tools")
        if not isinstance(listed, list) or not all(isinstance(tool, dict) and "name" in tool for tool in listed):
            raise EnvironmentFault(f"{self._url} lists no tools: {str(seen.observation)[:200]}; leave `tools` out")
        return [
            {
                "type": "function",
                "function": {
                    "name": str(tool["name"]),
                    "description": str(tool.get("description") or ""),
                    "parameters": tool.get("input_schema") or {"type": "object", "properties": {}},
                },
            }
            for tool in listed
        ]

    def _shown(self, observation: dict[str, Any]) -> str:
        if self._observation_key is None:
            return json.dumps({key: value for key, value in observation.items() if key != "metadata"})
        value = observation.get(self._observation_key)
        if value is None:
            raise EnvironmentFault(
                f"{self._url}: an observation has no {self._observation_key!r}; it has {', '.join(observation)}: set "
                "observation_key to one of them"
            )
        return value if isinstance(value, str) else json.dumps(value)


def _messages(info: dict[str, Any]) -> list[Message]:
    messages = info.get("messages")
    if not isinstance(messages, list) or not all(
        isinstance(message, dict) and "role" in message for message in messages
    ):
        raise EnvironmentFault(f"an OpenEnv server of ours sent no chat messages: {str(info)[:200]}")
    return messages


def _tool_text(observation: dict[str, Any]) -> str:
    """What a tool said: its texts, or its result as JSON, or its error."""
    if isinstance(error := observation.get("error"), dict):
        return f"Error: {error.get('message')}"
    result = observation.get("result")
    parts = result.get("content") if isinstance(result, dict) else None
    if isinstance(parts, list) and parts:
        return "\n".join(str(part.get("text", part)) if isinstance(part, dict) else str(part) for part in parts)
    if isinstance(result, dict) and "data" in result:
        result = result["data"]
    return result if isinstance(result, str) else json.dumps(result)
