"""Tokens a second of one full SAO step, by model size and episode length, and where the time goes.

    python benchmarks/learner_step.py                                     # about 3 minutes
    python benchmarks/learner_step.py --quick                             # about 20 seconds
    python benchmarks/learner_step.py --models tiny --lengths 512 --threads 2 --json step.json

The step is the learner's own (`learner/run/learner.py`, `learner/sao.py`): a batch built from synthetic episodes, two
critic updates with frozen attention, values read again, advantages, one policy update; both optimisers move. The
models are Qwen3-MoE with random weights, float32, on the CPU. Phases are timed from outside, by wrapping the public
functions that a step calls. Each row runs in a fresh process, so that its peak of memory is its own.
"""

from __future__ import annotations

import argparse
import contextlib
import math
import multiprocessing
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import psutil

from agent.episode import Episode, Segment, StopReason
from benchmarks.report import save_json, show

MIB = 2**20


@dataclass(frozen=True)
class Size:
    """A model (8 experts, 2 active; the keys of `learner.config.TinyModelConfig`) and the tokens of its step."""

    name: str
    tokens: int
    vocab_size: int
    hidden_size: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    expert_width: int


SIZES = {
    size.name: size
    for size in (
        Size("tiny", 32_768, 384, 64, 2, 4, 2, 16, 64),
        Size("5M", 8_192, 2_048, 192, 4, 6, 2, 32, 224),
        Size("25M", 4_096, 4_096, 384, 6, 8, 4, 48, 384),
    )
}

# What a step calls, by the module that looks the name up, and the phase it belongs to.
PHASES = (
    ("learner.run.learner", "build_batch", "batch"),
    ("learner.sao", "update_critic", "critic"),
    ("learner.sao", "read_values", "values"),
    ("learner.sao", "compute_advantages", "advantages"),
    ("learner.sao", "update_policy", "policy"),
)


@dataclass(frozen=True)
class Case:
    """One row: a model, the longest episode in tokens, tokens of a step (about), measured steps, threads."""

    size: Size
    length: int
    tokens: int
    steps: int
    threads: int
    seed: int


def synthetic_episodes(case: Case, rng: random.Random) -> list[Episode]:
    """Episodes of `length`/2 to `length` tokens, together about `tokens`: a prompt, then turns of 3 parts action to 2
    parts observation. The recorded log-probs are those of a nearly uniform policy, so that few tokens are gated."""
    episodes: list[Episode] = []
    total = 0
    while total < case.tokens:
        length = case.length if not episodes else rng.randint(case.length // 2, case.length)
        episodes.append(_episode(str(len(episodes)), length, case.size.vocab_size, rng))
        total += length
    return episodes


def _episode(name: str, length: int, vocabulary: int, rng: random.Random) -> Episode:
    def some(count: int) -> tuple[int, ...]:
        return tuple(rng.randrange(vocabulary) for _ in range(count))

    prompt = max(1, length // 8)
    segments, left = [Segment("prompt", some(prompt))], length - prompt
    while left > 0:
        acted = min(left, rng.randint(12, 60))
        logprobs = tuple(-math.log(vocabulary) + rng.gauss(0.0, 0.05) for _ in range(acted))
        segments.append(Segment("action", some(acted), "", logprobs, (0,) * acted, "stop"))
        left -= acted
        if left > 1:  # an episode ends with an action
            seen = min(left - 1, acted * 2 // 3)
            segments.append(Segment("observation", some(seen)))
            left -= seen
    turns = sum(segment.kind == "action" for segment in segments)
    return Episode(
        id=name,
        env_id="benchmark",
        task_id=name,
        segments=tuple(segments),
        turn_rewards=(0.0,) * (turns - 1) + (float(rng.random() < 0.5),),
        stop_reason=StopReason.TERMINATED,
    )


@contextlib.contextmanager
def phase_times(seconds: dict[str, float]) -> Iterator[None]:
    """While open, every call of a function in PHASES adds its CPU time to `seconds[phase]`.

    CPU time, since work of others on the machine would fall on one phase or the other.
    """
    import importlib

    def timed(function: Callable[..., Any], phase: str) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            begun = time.process_time()
            try:
                return function(*args, **kwargs)
            finally:
                seconds[phase] = seconds.get(phase, 0.0) + time.process_time() - begun

        return call

    with contextlib.ExitStack() as undo:
        for module_name, name, phase in PHASES:
            module = importlib.import_module(module_name)
            function = getattr(module, name)
            setattr(module, name, timed(function, phase))
            undo.callback(setattr, module, name, function)
        yield


def measure(case: Case) -> dict[str, Any]:
    """One row's figures; to be called in a process of its own."""
    import torch
    from accelerate import Accelerator
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging as transformers_logging

    from learner.config import ModelConfig, Recipe, TinyModelConfig
    from learner.data.buckets import bucket_by_length, micro_batch_tokens, padding_share
    from learner.model.tiny import build_config
    from learner.run.learner import Learner

    transformers_logging.disable_progress_bar()
    torch.set_num_threads(case.threads)
    torch.manual_seed(case.seed)
    rng = random.Random(case.seed)
    keys = {key: value for key, value in asdict(case.size).items() if key not in ("name", "tokens")}
    # Small enough that the policy is nearly uniform, whatever the width: as the episodes' log-probs say it was.
    config = TinyModelConfig(**keys, max_context=case.length, init_std=0.1 / math.sqrt(case.size.hidden_size))
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        AutoModelForCausalLM.from_config(build_config(config, config.vocab_size, 1)).save_pretrained(folder)
        recipe = Recipe(name="benchmark", model=ModelConfig(path=folder))
        learner = Learner.build(recipe, Accelerator(cpu=True), policy_folder=folder, critic_folder=folder / "none")
    learner.step(synthetic_episodes(case, rng)[:2])  # the optimisers' moments exist from here on
    standing = psutil.Process().memory_info().rss
    with contextlib.suppress(OSError):  # forget the peak of building the model; where that is forbidden it stays in
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
    walls, cpu, phases = [], 0.0, dict[str, float]()
    tokens = actions = 0
    padding, gated = [], []
    for _ in range(case.steps):
        episodes = synthetic_episodes(case, rng)
        with phase_times(phases):
            begun, worked = time.perf_counter(), time.process_time()
            batch, result = learner.step(episodes)
            walls.append(time.perf_counter() - begun)
            cpu += time.process_time() - worked
        if not (result.policy_moved and result.critic_moved):
            raise RuntimeError(f"an optimiser stood still ({result.figures}): this would be no full step")
        lengths = batch.lengths.tolist()
        limits = recipe.learner
        limit = micro_batch_tokens(limits.micro_batch_tokens, "cpu")
        cut = bucket_by_length(lengths, max_tokens=limit, max_padding=limits.max_padding)
        padding.append(padding_share(lengths, cut))
        gated.append(result.figures["gate/share"])
        tokens += sum(lengths)
        actions += batch.action_tokens
    wall = sum(walls)
    phases["rest"] = cpu - sum(phases.values())
    return {
        "model": case.size.name,
        "parameters": sum(p.numel() for p in learner.policy.module.parameters()),
        "critic_trained_parameters": sum(p.numel() for p in learner.critic.parameters) if learner.critic else 0,
        "critic_updates": learner.algorithm.critic.updates if learner.algorithm.critic else 0,
        "length": case.length,
        "episodes": len(episodes),
        "tokens": tokens // case.steps,
        "action_share": actions / tokens,
        "padding_share": statistics.fmean(padding),
        "gated_share": statistics.fmean(gated),
        "step_s": wall / case.steps,
        "tokens_per_s": tokens / wall,
        "tokens_per_cpu_s": tokens / cpu,
        "phase_share": {phase: seconds / cpu for phase, seconds in phases.items()},
        "standing_mib": standing / MIB,
        "peak_mib": peak_memory() / MIB,
    }


def peak_memory() -> int:
    """The largest resident size of this process since the last reset, in bytes."""
    # Not getrusage: its figure begins with the parent's.
    for line in Path("/proc/self/status").read_text(encoding="ascii", errors="replace").splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError("/proc/self/status has no line VmHWM: this benchmark needs Linux")


COLUMNS = (
    *(
        "model",
        "episodes x\nlongest",
        "tokens\na step",
        "pad-\nding",
        "seconds\na step",
        "tokens\n/s",
        "tokens a\nCPU second",
    ),
    *("critic\nupdates", "values", "advan-\ntages", "policy", "batch,\nrest", "peak MiB\n(step)"),
)


def cells(figures: dict[str, Any]) -> list[str]:
    """One row of the table."""
    shares = figures["phase_share"]
    phases = [shares[name] for name in ("critic", "values", "advantages", "policy")]
    return [
        figures["model"],
        f"{figures['episodes']} x {figures['length']}",
        f"{figures['tokens']:,}",
        f"{figures['padding_share']:.1%}",
        f"{figures['step_s']:.2f}",
        f"{figures['tokens_per_s']:,.0f}",
        f"{figures['tokens_per_cpu_s']:,.0f}",
        *(f"{value:.1%}" for value in [*phases, 1.0 - sum(phases)]),
        f"{figures['peak_mib']:,.0f} ({figures['peak_mib'] - figures['standing_mib']:,.0f})",
    ]


def notes(rows: Sequence[dict[str, Any]], threads: int) -> list[str]:
    """What the columns mean."""
    updates = rows[0]["critic_updates"]
    sizes = {f"{row['model']} {row['parameters'] / 1e6:.2f}M": None for row in rows}
    return [
        f"float32, CPU, {threads} thread(s); {statistics.fmean(r['action_share'] for r in rows):.0%} of the tokens are "
        f"actions, {statistics.fmean(r['gated_share'] for r in rows):.2%} of those gated.",
        f"Parameters of the policy, embeddings included: {', '.join(sizes)}; the critic has as many again. tokens: "
        "whole episodes, prompts and observations included, padding not.",
        "tokens/s is by the clock, tokens a CPU second by CPU time: with one thread they are the same on a quiet "
        "machine.",
        f"Shares are of a step's CPU time. critic updates: {updates} forwards and backwards with targets and optimiser "
        "(only experts and head are trained, the gradient still passes the attention). values: one more forward. "
        "advantages: the maths of the whole batch. policy: forward, backward, optimiser. batch, rest: episodes to "
        "tensors, bucketing, gathering.",
        "padding: share of the micro-batches' rectangles. Micro-batches hold at most 5 % of it, so few long episodes "
        "run one by one. peak: resident MiB with libraries, weights and moments; in brackets what the step adds.",
    ]


def main() -> None:
    """Parse the command line and run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=list(SIZES), default=list(SIZES))
    parser.add_argument("--lengths", type=int, nargs="+", default=[128, 512, 2048], help="longest episode, in tokens")
    parser.add_argument("--tokens", type=int, help="tokens of a step, about (default by model: 32768, 8192, 4096)")
    parser.add_argument("--steps", type=int, default=1, help="measured steps a row, after a small one (default 1)")
    parser.add_argument("--threads", type=int, default=1, help="threads of the model (default 1)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--quick", action="store_true", help="the tiny model, lengths 128 and 512, 2048 tokens a step")
    parser.add_argument("--json", type=Path, metavar="FILE")
    given = parser.parse_args()
    if min(given.lengths) < 16 or given.steps < 1:
        parser.error("--lengths must be at least 16, --steps at least 1")
    if given.quick:
        given.models, given.lengths, given.tokens = ["tiny"], [128, 512], given.tokens or 2048
    cases = [
        Case(SIZES[name], length, given.tokens or SIZES[name].tokens, given.steps, given.threads, given.seed)
        for name in given.models
        for length in given.lengths
    ]
    context = multiprocessing.get_context("spawn")
    rows = []
    with ProcessPoolExecutor(max_workers=1, mp_context=context, max_tasks_per_child=1) as pool:
        for number, case in enumerate(cases, 1):
            print(
                f"{number} of {len(cases)}: {case.size.name}, length {case.length}", end="", file=sys.stderr, flush=True
            )
            rows.append(pool.submit(measure, case).result())
            print(f": {rows[-1]['tokens_per_s']:,.0f} tokens/s", file=sys.stderr, flush=True)
    show("One SAO step", COLUMNS, [cells(figures) for figures in rows], notes(rows, given.threads))
    save_json(given.json, {"steps": given.steps, "threads": given.threads, "rows": rows})


if __name__ == "__main__":
    main()
