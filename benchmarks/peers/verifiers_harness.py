"""A verifiers harness that runs in the process of the rollouts, from a coroutine.

It sends the same chat-completions requests to the same interception server as those that the package ships, each of
which is a program of its own.
"""

from __future__ import annotations

import itertools
import json
from typing import Any, ClassVar

import aiohttp
from verifiers.v1.configs.harness import HarnessConfig
from verifiers.v1.harness import Harness
from verifiers.v1.runtimes import ProgramResult

__all__ = ["InProcessHarness"]


class InProcessConfig(HarnessConfig):
    """What tool calls are answered, one after the other, and the tool's schema."""

    observations: list[str] = []  # noqa: RUF012  (pydantic copies it)
    tool: dict[str, Any] = {}  # noqa: RUF012  (pydantic copies it)


class InProcessHarness(Harness[InProcessConfig]):
    """Asks, answers every tool call with the next of `observations`, until a message has none."""

    APPENDS_SYSTEM_PROMPT = True
    EXECUTES_CODE = False
    NEEDS_CONTAINER = False
    http: ClassVar[aiohttp.ClientSession]

    async def launch(
        self,
        ctx: Any,
        trace: Any,
        runtime: Any,
        endpoint: str,
        secret: str,
        mcp_urls: Any,
        data: Any,
        tool_interception_url: str | None = None,
    ) -> ProgramResult:
        headers = {"Authorization": f"Bearer {secret}", "Content-Type": "application/json"}
        messages: list[dict[str, Any]] = [{"role": "user", "content": data.prompt}]
        observations = itertools.islice(itertools.cycle(self.config.observations), data.idx, None)
        while True:
            body = json.dumps({"model": ctx.model, "messages": messages, "tools": [self.config.tool]})
            async with self.http.post(f"{endpoint}/chat/completions", data=body, headers=headers) as response:
                answer = await response.json()
                if response.status != 200:
                    raise RuntimeError(answer)
            message = answer["choices"][0]["message"]
            messages.append(message)
            calls = message.get("tool_calls")
            if not calls:
                return ProgramResult(exit_code=0, stdout="", stderr="")
            for call in calls:
                messages.append({"role": "tool", "tool_call_id": call["id"], "content": next(observations)})
