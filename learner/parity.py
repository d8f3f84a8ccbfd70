"""Compare a running engine with the trainer: do both give the same tokens the same log-probs?

python -m learner.parity --engine http://127.0.0.1:8000 --model runs/tir_tiny/final --temperature 0.7
python -m learner.parity --engine http://127.0.0.1:8000 --model /models/qwen3-4b --dtype bfloat16 --threshold 0.02
"""

from __future__ import annotations

import argparse
import asyncio
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

from agent.chat.renderer import ChatRenderer
from agent.doors.keys import given_key
from agent.engines.base import Completion
from agent.engines.client import HttpEngine
from agent.episode import SamplingParams
from learner.config import ModelConfig
from learner.faults import LearnerFault
from learner.losses import log_bounds
from learner.model.forward import PolicyForward
from learner.model.loading import load_policy_model
from learner.probes.parity_report import Measure, ParityReport, compare, sample
from learner.run.cli import guarded

# Short and long, plain and odd: what the engine is asked to continue.
QUESTIONS = (
    "What is 17 * 23?",
    "How many primes are there below 100? Use Python if you like.",
    "Find the last three digits of 7^2025 and explain each step in one sentence.",
    "Translate into French: the train leaves at half past nine.",
    "x^2 - 5x + 6 = 0",
    "Write a haiku about a sorted list.",
    "1 2 3 5 8 13 21 34 55 89: what comes next, and why? " * 4,
    "def f(n):\n    return n if n < 2 else f(n - 1) + f(n - 2)\n\nWhat is f(12)?",
)

_LIMIT_S = 600.0  # a large model on a busy CPU takes minutes for its first tokens


def build_prompts(renderer: ChatRenderer, count: int) -> list[list[int]]:
    """`count` prompts as token ids, laid out by the model's own chat template."""
    chosen = [QUESTIONS[i % len(QUESTIONS)] for i in range(count)]
    return [list(renderer.start([{"role": "user", "content": text}], None).token_ids) for text in chosen]


def check_versions(completions: list[Completion]) -> int:
    """The one policy version that sampled all tokens.

    Raises `LearnerFault` where weights were swapped meanwhile: there is nothing to compare then.
    """
    versions = sorted({version for completion in completions for version in completion.versions})
    if len(versions) != 1:
        raise LearnerFault(
            f"the engine sampled under versions {', '.join(map(str, versions)) or 'none'}: no one set of weights can "
            "be compared with the model. Stop whoever publishes, and run this again"
        )
    return versions[0]


async def measure_parity(
    url: str,
    model: Path,
    *,
    config: ModelConfig,
    temperature: float,
    tokens: int,
    prompts: int,
    bounds: tuple[float, float],
    threshold: float,
    measure: Measure,
    key: str | None = None,
) -> ParityReport:
    """Let the engine at `url` sample, and score its tokens with the model in the folder `model`.

    `key`: see `HttpEngine`.

    Raises `EngineFault` if the engine does not answer, `RecipeError` if there is no model, `LearnerFault` where the
    two cannot be compared.
    """
    engine = HttpEngine(url, key=key)
    try:
        await engine.health()  # before minutes are spent on loading the model
        loaded = await asyncio.to_thread(load_policy_model, model, config)
        renderer = await asyncio.to_thread(ChatRenderer.from_pretrained, model)
        asked = build_prompts(renderer, prompts)
        sampling = SamplingParams(temperature=temperature, max_tokens=tokens, stop_token_ids=renderer.stop_token_ids)
        completions = await sample(engine, asked, sampling, timeout_s=_LIMIT_S)
    finally:
        await engine.close()
    check_versions(completions)
    vocabulary = loaded.get_input_embeddings().num_embeddings
    largest = max(token for completion in completions for token in completion.token_ids)
    if largest >= vocabulary:
        raise LearnerFault(
            f"the engine sampled token {largest}, and the model in {model} has {vocabulary} tokens: the engine serves "
            "another model"
        )
    policy = PolicyForward(loaded.to("cuda" if torch.cuda.is_available() else "cpu"), temperature=temperature)
    return await asyncio.to_thread(
        compare, policy, asked, completions, bounds=bounds, threshold=threshold, measure=measure
    )


def report_table(report: ParityReport) -> Table:
    """The figures of a report: a row for log-probs, a row for ratios."""
    table = Table(title=f"{report.tokens} tokens at version {report.version}", title_justify="left")
    for column in ("", "max", "mean", "p99"):
        table.add_column(column, justify="right" if column else "left")
    rows = (
        ("|difference| of log-probs", report.max_difference, report.mean_difference, report.p99_difference),
        ("|ratio - 1|", report.max_ratio_error, report.mean_ratio_error, report.p99_ratio_error),
    )
    for name, *figures in rows:
        table.add_row(name, *(f"{figure:.3e}" for figure in figures))
    return table


def main(argv: list[str] | None = None) -> int:
    """Command line; see `--help`. Exit code 0: they agree; 1: they don't, or could not be compared."""
    description, _, example = (__doc__ or "").partition("\n\n")
    parser = argparse.ArgumentParser(
        prog="python -m learner.parity",
        description=description,
        epilog="example:\n" + example,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--engine", required=True, metavar="URL", help="a running engine")
    parser.add_argument("--model", required=True, type=Path, metavar="PATH", help="the folder that it should serve")
    parser.add_argument("--temperature", type=float, default=1.0, help="of sampling and scoring (default 1)")
    parser.add_argument("--tokens", type=int, default=64, help="most tokens a prompt (default 64)")
    parser.add_argument("--prompts", type=int, default=len(QUESTIONS), help="how many prompts (default 8)")
    parser.add_argument("--threshold", type=float, help="default 1e-4 for float32, 0.05 for bfloat16")
    parser.add_argument("--measure", choices=("mean", "max"), default="mean", help="held against it (default mean)")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32", help="of the trainer")
    parser.add_argument("--eps-low", type=float, default=0.3, help="the gate's lower bound (default 0.3)")
    parser.add_argument("--eps-high", type=float, default=5.0, help="the gate's upper bound (default 5)")
    parser.add_argument("--key-file", type=Path, help="file with the engine's key; default: what is in SAO_KEY")
    given = parser.parse_args(argv)
    if given.temperature <= 0 or given.tokens < 1 or given.prompts < 1:
        parser.error("--temperature must be above 0, --tokens and --prompts at least 1")
    try:
        bounds = log_bounds(given.eps_low, given.eps_high)
    except ValueError as error:
        parser.error(str(error))
    threshold = given.threshold if given.threshold is not None else 1e-4 if given.dtype == "float32" else 0.05

    def body() -> int:
        report = asyncio.run(
            measure_parity(
                given.engine,
                given.model,
                config=ModelConfig(path=given.model, dtype=given.dtype),
                temperature=given.temperature,
                tokens=given.tokens,
                prompts=given.prompts,
                bounds=bounds,
                threshold=threshold,
                measure=given.measure,
                key=given_key(given.key_file),
            )
        )
        console = Console()
        console.print(report_table(report))
        console.print(f"the gate would drop {report.gated_share:.3%} of the tokens", highlight=False)
        if report.worst(given.measure) <= threshold:
            return 0
        raise LearnerFault(
            f"engine and trainer disagree: {given.measure} difference {report.worst(given.measure):.2e} is above "
            f"{threshold:g}. Likely cause: {report.cause}"
        )

    return guarded(body)


if __name__ == "__main__":
    raise SystemExit(main())
