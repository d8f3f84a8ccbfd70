"""The plainest agent over OpenAI's client: ask, call the environment's tools, ask again, until no tool is called.

runtime: {harness: {call: "agent.harness.loops.openai_loop:solve"}}
"""

from __future__ import annotations

import json
from typing import Any

from agent.harness.loops.environment_tools import call_tool
from agent.harness.task import HarnessTask

REQUEST_S = 24 * 3600.0
"""The runtime ends what takes too long; a client that gives up before would only ask again."""


async def solve(task: HarnessTask) -> str | None:
    """Work on `task` and return the answer, or None where a call has ended the environment's episode."""
    try:
        import openai
    except ModuleNotFoundError as error:
        raise RuntimeError("agent.harness.loops.openai_loop needs OpenAI's client: pip install openai") from error
    messages: list[Any] = list(task.messages)
    tools: list[Any] = task.tools
    async with openai.AsyncOpenAI(base_url=task.openai_base_url, api_key=task.api_key, timeout=REQUEST_S) as client:
        while True:
            completion = await client.chat.completions.create(
                model=task.model, messages=messages, tools=tools or openai.omit
            )
            message = completion.choices[0].message
            messages.append(message.model_dump(exclude_none=True))
            if not message.tool_calls:
                return message.content or ""
            for call in message.tool_calls:
                if call.type != "function":
                    continue  # none is offered
                arguments = json.loads(call.function.arguments)
                text, ended = await call_tool(task, call.function.name, arguments)
                if ended:
                    return None
                messages.append({"role": "tool", "tool_call_id": call.id, "content": text})
