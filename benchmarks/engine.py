"""Tokens a second of the `local` engine, by concurrency: in process, and over HTTP from another process.

    python benchmarks/engine.py [--seconds 3] [--concurrency 1 8 64 128] [--model PATH]

Two loads: `long` (a prompt of 40 tokens, 120 tokens sampled) and `episodes` (a prompt of 30, then five turns of 15
sampled tokens and 10 new ones, as in the tiny recipe). Without --model: Qwen3-MoE, hidden 64, 2 layers, 8 experts of
which 2 are active, vocabulary 384, random weights. One thread for the model.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import random
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from pathlib import Path

import torch

from agent.engines.client import HttpEngine
from agent.engines.local.launch import local_engine
from agent.engines.local.loop import ModelLoop
from agent.engines.local.model import SlotModel
from agent.engines.local.scheduler import Generation
from agent.episode import SamplingParams

Generate = Callable[[Sequence[int], int], Awaitable[Sequence[int]]]
MAX_CONTEXT = 512


def make_model(folder: Path) -> Path:
    from transformers import AutoModelForCausalLM, Qwen3MoeConfig

    config = Qwen3MoeConfig(
        vocab_size=384,
        hidden_size=64,
        intermediate_size=64,
        moe_intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        num_experts=8,
        num_experts_per_tok=2,
        tie_word_embeddings=True,
        max_position_embeddings=MAX_CONTEXT,
        initializer_range=0.05,
        eos_token_id=None,
    )
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return folder


async def long(generate: Generate, rng: random.Random) -> int:
    return len(await generate([rng.randrange(384) for _ in range(40)], 120))


async def episodes(generate: Generate, rng: random.Random) -> int:
    context, count = [rng.randrange(384) for _ in range(30)], 0
    for _ in range(5):
        sampled = await generate(context, 15)
        count += len(sampled)
        context = [*context, *sampled, *(rng.randrange(384) for _ in range(10))]
    return count


@contextlib.asynccontextmanager
async def in_process(model: Path, concurrency: int) -> AsyncIterator[Generate]:
    slot_model = SlotModel(model, slots=2 * concurrency, max_context=MAX_CONTEXT)
    loop = ModelLoop(slot_model, version=0, max_sequences=concurrency)
    loop.start()

    async def generate(prompt: Sequence[int], tokens: int) -> Sequence[int]:
        generation = Generation.new("", prompt, SamplingParams(max_tokens=tokens), frozenset(), MAX_CONTEXT)
        return (await loop.generate(generation)).sampled

    try:
        yield generate
    finally:
        await asyncio.to_thread(loop.stop)


@contextlib.asynccontextmanager
async def over_http(model: Path, concurrency: int) -> AsyncIterator[Generate]:
    with tempfile.TemporaryDirectory() as folder:
        options = {"max_sequences": concurrency, "max_context": MAX_CONTEXT}
        async with local_engine(model, log=Path(folder) / "engine.log", **options) as url:
            engine = HttpEngine(url)

            async def generate(prompt: Sequence[int], tokens: int) -> Sequence[int]:
                return (await engine.generate(prompt, SamplingParams(max_tokens=tokens))).token_ids

            try:
                yield generate
            finally:
                await engine.close()


async def measure(
    load: Callable[[Generate, random.Random], Awaitable[int]], generate: Generate, concurrency: int, seconds: float
) -> float:
    """Sampled tokens a second; the first half second is not counted."""

    async def worker(seed: int) -> float:
        rng, counted = random.Random(seed), 0.0
        while (now := time.monotonic()) < end:
            tokens = await load(generate, rng)
            # A piece of work counts by the share of it that lies inside the window.
            inside = min(time.monotonic(), end) - max(now, begin)
            counted += tokens * max(0.0, inside) / (time.monotonic() - now)
        return counted

    begin = time.monotonic() + 0.5
    end = begin + seconds
    return sum(await asyncio.gather(*(worker(i) for i in range(concurrency)))) / seconds


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=3.0)
    parser.add_argument("--concurrency", type=int, nargs="+", default=[1, 8, 64, 128])
    parser.add_argument("--model", type=Path, default=None)
    options = parser.parse_args()
    torch.set_num_threads(1)
    os.environ["HF_HUB_DISABLE_PROGRESS_BARS"] = "1"
    with tempfile.TemporaryDirectory() as folder:
        model = options.model or make_model(Path(folder))
        print(f"{'concurrency':>11} {'load':>9} {'in process':>11} {'over HTTP':>10}   tokens/s")
        for concurrency in options.concurrency:
            for load in (long, episodes):
                rates = []
                for place in (in_process, over_http):
                    async with place(model, concurrency) as generate:
                        rates.append(await measure(load, generate, concurrency, options.seconds))
                print(f"{concurrency:>11} {load.__name__:>9} {rates[0]:>11,.0f} {rates[1]:>10,.0f}", flush=True)


if __name__ == "__main__":
    asyncio.run(main())
