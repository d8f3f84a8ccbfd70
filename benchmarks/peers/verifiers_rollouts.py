"""verifiers' rollouts against the fake engine: token ids and log-probs through its train client; in its own Python.

The harness is the cheapest that the package allows (`verifiers_harness.py`): interception server, train client with
the Qwen3 renderer and trace are all in this process. As it is shipped, a harness is a program of its own an episode.
"""

from __future__ import annotations

import asyncio
import json
import logging
import sys
from pathlib import Path
from typing import Any

import aiohttp
import verifiers.v1 as vf
from cost import answer, measured
from rollout_script import read
from verifiers.v1.interception.pool import ElasticInterceptionPool
from verifiers_harness import InProcessHarness

WARM_UP = 8


def agent_config(asked: dict[str, Any], script: dict[str, Any]) -> vf.AgentConfig:
    """An agent of the harness, at the engine."""
    harness = {"id": "verifiers_harness", "observations": script["observations"], "tool": script["tool"]}
    client = {
        "type": "train",
        "base_url": asked["url"] + "/v1",
        "api_key_var": "NO_KEY",
        "renderer": {"name": "qwen3"},
        "renderer_model_name": asked["folder"],
    }
    sampling = {"max_tokens": 1024, "temperature": 1.0}
    config = {"harness": harness, "runtime": {"type": "subprocess"}, "model": "m", "client": client}
    return vf.AgentConfig.model_validate(config | {"sampling": sampling})


async def run(config: vf.AgentConfig, prompts: list[str], episodes: int, concurrency: int) -> tuple[int, int]:
    """Turns of all, and tokens of the last one to end."""
    turns, last = 0, None
    slots = asyncio.Semaphore(concurrency)
    async with ElasticInterceptionPool() as interception:
        agent = vf.Agent(config, interception=interception)

        async def one(index: int) -> None:
            nonlocal turns, last
            async with slots:
                trace = await agent.run(vf.Task(vf.TaskData(idx=index, prompt=prompts[index % len(prompts)])))
            if not trace.ok:
                raise RuntimeError(trace.errors)
            turns += trace.num_turns
            last = trace

        await asyncio.gather(*(one(i) for i in range(episodes)))
    return turns, sum(len(node.token_ids) for node in last.nodes)


async def main(asked: dict[str, Any]) -> None:
    """See `project_rollouts.worker`."""
    logging.basicConfig(level=logging.ERROR)
    script = read(Path(asked["folder"]), asked["length"])
    config = agent_config(asked, script)
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
        InProcessHarness.http = session
        if asked["episodes"] > WARM_UP:
            await run(config, script["prompts"], WARM_UP, 4)
        with measured() as cost:
            turns, tokens = await run(config, script["prompts"], asked["episodes"], asked["concurrency"])
    answer(cost | {"turns": turns, "tokens": tokens})


if __name__ == "__main__":
    asyncio.run(main(json.loads(sys.argv[1])))
