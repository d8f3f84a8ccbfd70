"""A harness for verifiers that runs in this process: it asks the model and calls tools until there is no call left.

The library's own chat harness does the same in a program of its own for each rollout. Imported only where the library
is; `LIBRARY_ID` is its name there.
"""

from __future__ import annotations

import contextlib
import json
from typing import Any

import aiohttp
from verifiers.v1.configs.harness import HarnessConfig
from verifiers.v1.dialects.chat import message_to_wire
from verifiers.v1.harness import Harness
from verifiers.v1.harnesses.utils.mcp import call_mcp, connect_mcp
from verifiers.v1.runtimes import ProgramResult

from envs.adapters.verifiers.endpoint import ENDED

LIBRARY_ID = "sao_policy"
"""The harness's id: `envs.adapters.verifiers.library` makes the library find this module under it."""

__all__ = ["PolicyHarness"]


class PolicyHarnessConfig(HarnessConfig):
    """The library's own keys."""


class PolicyHarness(Harness[PolicyHarnessConfig]):
    """See the module."""

    APPENDS_SYSTEM_PROMPT = True
    SUPPORTS_MCP = True
    EXECUTES_CODE = False
    NEEDS_CONTAINER = False

    async def launch(
        self,
        ctx: Any,
        trace: Any,
        runtime: Any,
        endpoint: str,
        secret: str,
        mcp_urls: dict[str, str],
        data: Any,
        tool_interception_url: str | None = None,
    ) -> ProgramResult:
        """One segment: until a message without a call, a truncated one, or a stop of the library's."""
        system, prompt = self.resolve_prompt(data)
        messages: list[dict[str, Any]] = [{"role": "system", "content": system}] if system else []
        if isinstance(prompt, str):
            messages.append({"role": "user", "content": prompt})
        else:
            messages += [message_to_wire(message) for message in prompt or []]
        timeout = self.config.tool_timeout
        servers = {name: {"url": url, "timeout": timeout} for name, url in mcp_urls.items()}
        async with contextlib.AsyncExitStack() as stack:
            tools, dispatch, connected = await connect_mcp({"mcpServers": servers}, stack)
            http = await stack.enter_async_context(aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=None)))
            while True:
                message = await _ask(http, f"{endpoint}/chat/completions", secret, ctx.model, messages, tools)
                if message is None:
                    break
                messages.append(message["message"])
                calls = message["message"].get("tool_calls")
                if not calls or message["finish_reason"] == "length":
                    break
                for call in calls:
                    function = call["function"]
                    content = await _call(connected, dispatch, function)
                    messages.append({"role": "tool", "tool_call_id": call["id"], "content": content})
        return ProgramResult(exit_code=0, stdout="", stderr="")


async def _ask(
    http: aiohttp.ClientSession,
    url: str,
    secret: str,
    model: str,
    messages: list[dict[str, Any]],
    tools: list[dict[str, Any]],
) -> dict[str, Any] | None:
    """The first choice of a completion; None where the rollout ends here. Raises RuntimeError for a failed call."""
    body = {"model": model, "messages": messages, **({"tools": tools} if tools else {})}
    headers = {"Authorization": f"Bearer {secret}"}
    async with http.post(url, json=body, headers=headers) as response:
        text = await response.text()
    if response.status != 200:
        if ENDED in text or "rollout stopped" in text:
            return None
        raise RuntimeError(f"HTTP {response.status}: {text[:500]}")
    choice: dict[str, Any] = json.loads(text)["choices"][0]
    return choice


async def _call(servers: Any, dispatch: Any, function: dict[str, Any]) -> Any:
    """What a tool says; its failure is the policy's to read, as the library's own harness has it."""
    try:
        return await call_mcp(servers, dispatch, function["name"], json.loads(function["arguments"] or "{}"))
    except Exception as error:
        return f"Error: {error}"
