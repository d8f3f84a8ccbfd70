"""The plainest agent over Anthropic's client; see `openai_loop`.

runtime: {harness: {call: "agent.harness.loops.anthropic_loop:solve"}}
"""

from __future__ import annotations

from typing import Any

from agent.harness.loops.environment_tools import call_tool
from agent.harness.loops.openai_loop import REQUEST_S
from agent.harness.task import HarnessTask

_MOST_TOKENS = 1 << 20
"""The wire wants a number; the recipe's is the smaller one."""


async def solve(task: HarnessTask) -> str | None:
    """Work on `task` and return the answer, or None where a call has ended the environment's episode."""
    try:
        import anthropic
    except ModuleNotFoundError as error:
        raise RuntimeError("agent.harness.loops.anthropic_loop needs the client: pip install anthropic") from error
    system = "\n\n".join(m["content"] for m in task.messages if m["role"] == "system")
    messages: list[Any] = [m for m in task.messages if m["role"] != "system"]
    tools: list[Any] = [
        {"name": f["name"], "description": f.get("description", ""), "input_schema": f["parameters"]}
        for f in (tool["function"] for tool in task.tools)
    ]
    async with anthropic.AsyncAnthropic(
        base_url=task.anthropic_base_url, api_key=task.api_key, timeout=REQUEST_S
    ) as client:
        while True:
            message = await client.messages.create(
                model=task.model,
                messages=messages,
                max_tokens=_MOST_TOKENS,
                system=system or anthropic.omit,
                tools=tools or anthropic.omit,
            )
            messages.append({"role": "assistant", "content": [block.model_dump() for block in message.content]})
            results: list[dict[str, Any]] = []
            for block in message.content:
                if block.type == "tool_use":
                    text, ended = await call_tool(task, block.name, dict(block.input))
                    if ended:
                        return None
                    results.append({"type": "tool_result", "tool_use_id": block.id, "content": text})
            if not results:
                return "".join(block.text for block in message.content if block.type == "text")
            messages.append({"role": "user", "content": results})
