"""The tools of a session's environment, called over HTTP."""

from __future__ import annotations

from typing import Any

import aiohttp

from agent.harness.task import HarnessTask

CALL_S = 3600.0
"""The runtime has a limit of its own for a step, `limits.step_s`; this one is for a runtime that is gone."""


async def call_tool(task: HarnessTask, name: str, arguments: dict[str, Any]) -> tuple[str, bool]:
    """What the environment's tool answers, and whether its episode has ended. Raises `aiohttp.ClientError`.

    A call that cannot be is answered in words.
    """
    async with (
        aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=CALL_S)) as client,
        client.post(f"{task.session_url}/call", json={"name": name, "arguments": arguments}) as response,
    ):
        answer = await response.json()
        if response.status in (400, 404):
            return str(answer["error"]["message"]), False
        response.raise_for_status()
        return str(answer["content"]), bool(answer["ended"])
