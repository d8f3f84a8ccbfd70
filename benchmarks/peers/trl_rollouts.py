"""TRL's asynchronous rollout loop against the fake engine, in this process; runs in TRL's own Python.

`_AsyncRolloutLoop` is what AsyncGRPOTrainer's worker process runs, and talks to vLLM over HTTP, so that it can be
driven without a model. (GRPOTrainer's own loop generates in lockstep over the whole batch.) Its queues are plain ones
of this process, so nothing is pickled; the tool is a coroutine, so it needs no thread; rewards are zeros.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import queue
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import aiohttp
from accelerate import PartialState
from cost import answer, measured
from datasets import Dataset
from rollout_script import read
from transformers import AutoTokenizer
from trl.experimental.async_grpo.async_rollout_worker import _AsyncRolloutLoop

WARM_UP = 8
SAMPLES = 4


class Samples(queue.Queue):
    """Keeps the last sample only: a trainer would have taken the others."""

    last: Any = None

    def put_nowait(self, item: Any) -> None:
        self.last = item


class Loop(_AsyncRolloutLoop):
    """Counts turns, and stops dealing after `episodes`."""

    episodes = 0
    dealt = turns = 0
    last_dealt: asyncio.Event

    def _repeat_iterator(self) -> Iterator[tuple[int, dict[str, Any]]]:
        for item in super()._repeat_iterator():
            self.dealt += 1
            if self.dealt >= self.episodes:
                self.last_dealt.set()
            yield item

    async def _generate_one_turn(self, prompt_ids: list[int]) -> tuple[list[int], list[float]]:
        self.turns += 1
        return await super()._generate_one_turn(prompt_ids)


async def run(loop: Loop, concurrency: int) -> None:
    """As the loop's own `_run_loops`, but generation ends by itself, and scoring after it."""
    loop.last_dealt = asyncio.Event()
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=concurrency)) as session:
        loop.session = session
        await asyncio.gather(loop._generate_loop(loop.last_dealt), loop._score_loop(asyncio.Event()))


def made(asked: dict[str, Any], episodes: int, concurrency: int) -> Loop:
    """A loop for that many episodes."""
    script = read(Path(asked["folder"]), asked["length"])
    tokenizer = AutoTokenizer.from_pretrained(asked["folder"])
    observations = itertools.cycle(script["observations"])

    async def look(where: str) -> str:
        """
        Look around.

        Args:
            where: The place.
        """
        return str(next(observations))

    loop = Loop(
        model_name="m",
        dataset=Dataset.from_dict({"prompt": [[{"role": "user", "content": prompt}] for prompt in script["prompts"]]}),
        reward_funcs=[lambda completions, **_: [0.0] * len(completions)],
        processing_class=tokenizer,
        eos_token_ids=[tokenizer.eos_token_id],
        rollout_buffer=Samples(),
        model_version_value=SimpleNamespace(value=0),
        heartbeat_value=SimpleNamespace(value=0.0),
        failed_event=threading.Event(),
        exception_info_queue=queue.Queue(),
        metrics_queue=queue.Queue(),
        tools=[look],
        num_generations=min(SAMPLES, episodes),
        max_inflight_tasks=concurrency,
        score_queue_maxsize=0,
        vllm_server_url=asked["url"],
        max_tokens=1024,
        request_timeout=1800,
    )
    loop.episodes = episodes
    return loop


def main(asked: dict[str, Any]) -> None:
    """See `project_rollouts.worker`."""
    PartialState(cpu=True)
    if asked["episodes"] > WARM_UP:
        asyncio.run(run(made(asked, WARM_UP, 4), 4))
    loop = made(asked, asked["episodes"], asked["concurrency"])
    with measured() as cost:
        asyncio.run(run(loop, asked["concurrency"]))
    answer(cost | {"turns": loop.turns, "tokens": len(loop.rollout_buffer.last.input_ids)})


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
