"""The library's own `GenericEnvClient` plays a server of ours; run in the environment of `make suites`."""

from __future__ import annotations

import asyncio
import json
import sys

from openenv.core.generic_client import GenericEnvClient

CALL = '<tool_call>\n{"name": "python", "arguments": {"code": "1+1"}}\n</tool_call>'


async def main(url: str) -> None:
    told = []
    async with GenericEnvClient(base_url=url) as env:
        for _ in range(2):
            opened = await env.reset(seed=3)
            told.append([opened.observation["text"], opened.done])
            for action in (CALL, "\\boxed{2}"):
                step = await env.step({"message": action})
                told.append([step.observation["text"].strip(), step.reward, step.done])
        told.append((await env.state())["step_count"])
    print(json.dumps(told))


asyncio.run(main(sys.argv[1]))
