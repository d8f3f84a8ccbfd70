"""How long a publication takes, and what the requests in flight feel of it, for both engines.

    python benchmarks/publish_latency.py [--quick] [--engines local vllm] [--in-flight 16] [--json FILE]
    python benchmarks/publish_latency.py --engines vllm --transfers snapshot broadcast ipc --large --in-flight 2

A learner's step has just ended: its weights lie in memory. They are written as a snapshot, published, and requests in
flight (streams of up to 900 tokens) go on under them; or they are streamed to vLLM from where they lie. Measured for
every publication:

    written     until the snapshot is complete on the disk (a stream needs none)
    call        the publication itself, from there until the engine goes on
    first       from there until a token that was sampled under the new weights has arrived
    gap         the longest time between two tokens of a request that was in flight, and the usual one for comparison

The model is the tiny recipe's (Qwen3-MoE, hidden 64, 2 layers, two heads of 32, 8 experts); with --large one of 400 MB
(hidden 1024, 4 layers). The new weights differ from
the old ones by 0.0008 in every number, as after one step of that recipe. With the stale cache kept, the last column
says what it costs: the difference of the log-probs from those that the new weights give to the whole sequence.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import random
import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from report import save_json, show

from agent.child_processes import stop_child
from agent.engines.base import Completion
from agent.engines.client import HttpEngine
from agent.engines.local.launch import launch_local
from agent.engines.vllm.launch import launch_vllm
from agent.engines.weight_stream import WeightStreamer
from agent.episode import SamplingParams
from learner.config import ModelConfig, TinyModelConfig
from learner.model.forward import PolicyForward
from learner.model.loading import checkpoint_tensors, load_policy_model, save_policy_model
from learner.model.tiny import write_tiny_model
from learner.probes.parity_report import trainer_logprobs

SHAPE = TinyModelConfig(heads=2, kv_heads=1, head_dim=32)
LARGE = SHAPE.model_copy(update={"hidden_size": 1024, "layers": 4, "expert_width": 1024})
MAX_CONTEXT = 1024
PROMPT, ACTION = 60, 900
STEP = 8e-4


@dataclass
class Request:
    """A stream that has ended: when each token arrived (seconds of the monotonic clock), and what came."""

    prompt: list[int]
    arrivals: list[float]
    completion: Completion


@dataclass
class Publication:
    """Moments of one publication, seconds of the monotonic clock."""

    version: int
    begun: float
    written: float
    done: float


@dataclass
class Load:
    """`count` streams at any time, until `stop`; those that have ended are kept."""

    engine: HttpEngine
    count: int
    stop: bool = False
    ended: list[Request] = field(default_factory=list)

    async def run(self) -> None:
        await asyncio.gather(*(self._worker(random.Random(seed)) for seed in range(self.count)))

    async def _worker(self, rng: random.Random) -> None:
        length = ACTION // 2 + rng.randrange(ACTION // 2)  # the first ones end at different times
        while not self.stop:
            prompt, arrivals = [rng.randrange(SHAPE.vocab_size) for _ in range(PROMPT)], []
            sampling = SamplingParams(max_tokens=length)
            async with contextlib.aclosing(self.engine.stream(prompt, sampling)) as partials:
                async for partial in partials:
                    arrivals += [time.monotonic()] * len(partial.token_ids)
                    if partial.completion is not None:
                        self.ended.append(Request(prompt, arrivals, partial.completion))
            length = ACTION


def make_snapshots(folder: Path, shape: TinyModelConfig) -> list[Any]:
    """The model folder `folder/start`, and two sets of weights, one step apart, in memory."""
    source = write_tiny_model(folder / "start", shape, ["What is 1 + 1?"] * 4, 0) or folder / "start"
    models = [load_policy_model(source, ModelConfig(path=source)) for _ in range(2)]
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for old, new in zip(models[0].parameters(), models[1].parameters(), strict=True):
            new.copy_(old + STEP * torch.randn(old.shape, generator=generator).sign())
    return models


def gaps(request: Request) -> list[tuple[float, float, float]]:
    """(length, from, to) of every time between two tokens."""
    return [(b - a, a, b) for a, b in zip(request.arrivals, request.arrivals[1:], strict=False)]


def figures_of(publications: Sequence[Publication], ended: Sequence[Request]) -> dict[str, list[float]]:
    """What each publication took, in seconds; lists are by publication."""
    found: dict[str, list[float]] = {"written": [], "call": [], "first": [], "gap": []}
    for publication in publications:
        found["written"].append(publication.written - publication.begun)
        found["call"].append(publication.done - publication.written)
        first = [
            when
            for request in ended
            for when, version in zip(request.arrivals, request.completion.versions, strict=True)
            if version == publication.version
        ]
        if first:
            found["first"].append(min(first) - publication.written)
        # A gap that ends within a second of the publication and began before it was over is its doing.
        over = [
            length
            for request in ended
            for length, begun, end in gaps(request)
            if begun < publication.done and end > publication.written
        ]
        if over:
            found["gap"].append(max(over))
    found["usual"] = [statistics.median([g for r in ended for g, _, _ in gaps(r)] or [float("nan")])]
    return found


def difference(models: Sequence[Any], ended: Sequence[Request], most: int = 24) -> float:
    """Mean |difference| of log-probs, over tokens after a swap in their request, from a forward without a cache."""
    policies, found = [PolicyForward(model) for model in models], []
    for request in [r for r in ended if len(set(r.completion.versions)) > 1][:most]:
        versions = request.completion.versions
        scores = [trainer_logprobs(policy, request.prompt, request.completion) for policy in policies]
        for i, logprob in enumerate(request.completion.logprobs):
            if versions[i] > versions[0]:
                found.append(abs(float(scores[versions[i] % 2][i]) - logprob))
    return statistics.fmean(found) if found else float("nan")


async def measure(
    name: str, transfer: Any, *, keep: bool, in_flight: int, publications: int, folder: Path, models: Sequence[Any]
) -> dict[str, Any]:
    """Start an engine, load it, publish the two sets of weights to it in turn."""
    launch = launch_local if name == "local" else launch_vllm
    log = folder / f"{name}-{keep}.log"
    limits: dict[str, Any] = {"max_sequences": max(in_flight, 1), "max_context": MAX_CONTEXT}
    if name == "vllm":
        limits["dtype"] = "float32"  # "auto" makes bfloat16 of it
    process, url = await launch(folder / "start", version=0, log=log, **limits)
    engine = HttpEngine(url, keep_stale_cache=keep)
    version = 0
    stream = WeightStreamer(lambda: checkpoint_tensors(models[version % 2]), kind=transfer)
    try:
        load, made = Load(engine, in_flight), []
        running = asyncio.create_task(load.run())
        await asyncio.sleep(1.0)
        for version in range(1, publications + 1):
            begun = time.monotonic()
            if transfer == "snapshot":
                await asyncio.to_thread(save_policy_model, models[version % 2], folder / "start", folder / "weights")
            written = time.monotonic()
            await engine.publish(version, folder / "weights" if transfer == "snapshot" else stream)
            made.append(Publication(version, begun, written, time.monotonic()))
            if in_flight == 0:
                await one_request(engine, load)
            await asyncio.sleep(0.7)
        load.stop = True
        await running
    finally:
        await engine.close()
        await stop_child(process)
    found = figures_of(made[1:], load.ended)  # the first one pays for what is made once
    return {
        "engine": name,
        "transfer": transfer,
        "keep": keep,
        **found,
        "difference": await asyncio.to_thread(difference, models, load.ended),
    }


async def one_request(engine: HttpEngine, load: Load) -> None:
    """With nothing in flight, a new request shows when the new weights serve."""
    completion = await engine.generate([1, 2, 3], SamplingParams(max_tokens=1))
    load.ended.append(Request([1, 2, 3], [time.monotonic()], completion))


def milliseconds(values: Sequence[float]) -> str:
    """Median and largest."""
    return f"{1e3 * statistics.median(values):.0f} / {1e3 * max(values):.0f}" if values else "-"


async def main() -> None:
    description, _, _ = (__doc__ or "").partition("\n\nA learner's")
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engines", nargs="+", choices=("local", "vllm"), default=["local", "vllm"])
    parser.add_argument(
        "--transfers", nargs="+", choices=("snapshot", "broadcast", "ipc"), default=["snapshot"],
        help="how weights reach vLLM (default snapshot; the local engine takes no other)",
    )  # fmt: skip
    parser.add_argument("--large", action="store_true", help="a model of 400 MB instead of the tiny recipe's")
    parser.add_argument("--in-flight", type=int, default=16, help="requests in flight (default 16; 0: an idle engine)")
    parser.add_argument("--publications", type=int, default=12, help="the first one is not counted (default 12)")
    parser.add_argument("--quick", action="store_true", help="three publications to the local engine")
    parser.add_argument("--json", type=Path, help="write all figures to this file")
    options = parser.parse_args()
    if options.in_flight < 0 or options.publications < 2:
        parser.error("--in-flight must not be negative, --publications at least 2")
    engines, publications = (["local"], 3) if options.quick else (options.engines, options.publications)
    torch.set_num_threads(1)
    rows, results = [], []
    with tempfile.TemporaryDirectory() as name:
        models = make_snapshots(Path(name), LARGE if options.large else SHAPE)
        for engine in engines:
            # The stale cache has nothing to do with the way: once is enough.
            ways = [(way, False) for way in (options.transfers if engine == "vllm" else ["snapshot"])]
            for transfer, keep in [*ways, ("snapshot", True)]:
                title = f"{engine}, {transfer}, cache {'kept' if keep else 'cleared'}"
                print(f"{title} ...", flush=True)
                found = await measure(
                    engine,
                    transfer,
                    keep=keep,
                    in_flight=options.in_flight,
                    publications=publications,
                    folder=Path(name),
                    models=models,
                )
                results.append(found)
                rows.append(
                    [title]
                    + [milliseconds(found[column]) for column in ("written", "call", "first", "gap")]
                    + [f"{1e3 * found['usual'][0]:.1f}", f"{found['difference']:.1e}"]
                )
    show(
        f"Publications with {options.in_flight} requests in flight (ms, median / largest of {publications - 1})",
        ("", "written", "call", "first new token", "longest gap", "usual gap", "log-prob difference"),
        rows,
        ("first new token: from the complete snapshot; add `written` for the time since the end of the step",),
    )
    save_json(options.json, {"publications": results})


if __name__ == "__main__":
    asyncio.run(main())
