"""Supervised cold start: `python -m learner.sft RECIPE` makes the model that RL starts from.

python -m learner.sft recipes/tir_tiny.yaml sft.clean_steps=200
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import random
import shutil
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor

from agent.runtime.settings import EnvConfig
from envs import make_core
from envs.core import Message
from learner.config import Recipe, RecipeError, SFTConfig
from learner.data.batch import PAD
from learner.data.traces import Example, encode_trace, player_of, read_traces, script_for
from learner.model.finite import require_finite
from learner.model.forward import PolicyForward
from learner.model.loading import load_policy_model, save_policy_model
from learner.model.tiny import write_tiny_model
from learner.model.trainee import Trainee
from learner.parallel.collectives import share, share_result
from learner.parallel.layout import layout_of
from learner.parallel.ranks import make_accelerator
from learner.run.cli import command
from learner.run.display import Display

Phase = tuple[list[list[Message]], int]
"""Traces, and how many updates to make on them."""


def batches(examples: Sequence[Example], size: int, steps: int, seed: int) -> Iterator[tuple[Tensor, Tensor]]:
    """`steps` batches (input_ids int64[size,T], action_mask bool[size,T]), every example once an epoch.

    In random order, not sorted by length: here length tells the task family, and batches of one family each were
    seen to end 25 points of success lower after as many steps.
    """
    rng, order = random.Random(seed), list[int]()
    for _ in range(steps):
        while len(order) < size:
            order = rng.sample(range(len(examples)), len(examples)) + order
        chosen = [examples[order.pop()] for _ in range(size)]
        yield (
            torch.nn.utils.rnn.pad_sequence([ids for ids, _ in chosen], batch_first=True, padding_value=PAD),
            torch.nn.utils.rnn.pad_sequence([mask for _, mask in chosen], batch_first=True, padding_value=False),
        )


def fit(
    policy: Trainee,
    examples: Sequence[Example],
    *,
    steps: int,
    batch_size: int,
    seed: int,
    progress: Callable[..., None],
    micro_batch_rows: int | None = None,
    discard_limit: int = 5,
) -> None:
    """Minimise the negative log-likelihood of the action tokens, `steps` updates.

    One whose gradient or loss is not finite is discarded; a `LearnerFault` after `discard_limit` in a row.
    """
    accelerator, layout = policy.accelerator, layout_of(policy.accelerator)
    for input_ids, mask in batches(examples, batch_size, steps, seed):
        dealt = slice(layout.data_rank(accelerator.process_index), None, layout.data_ranks)  # this rank's rows
        rows = -(-batch_size // layout.data_ranks)
        parts = micro_batches(input_ids[dealt], mask[dealt], rows=rows, size=micro_batch_rows)
        total = 0.0
        for i, (ids, actions) in enumerate(parts):
            with contextlib.nullcontext() if i == len(parts) - 1 else accelerator.no_sync(policy.module):
                logprobs, _ = policy.module(ids.to(accelerator.device), actions.to(accelerator.device), False)
                # Of the global batch, divided by the number of ranks that gradients are averaged over.
                loss = -logprobs.sum() * layout.averaged_over / mask.sum().clamp(min=1)
                policy.add_gradients(loss)
            total += float(loss.detach())
        policy.step()
        policy.require_progress(discard_limit, "cold start")
        progress(1, loss=total)


def micro_batches(input_ids: Tensor, mask: Tensor, *, rows: int, size: int | None) -> list[tuple[Tensor, Tensor]]:
    """Cut a rank's part [b,T] into pieces of `size` rows (None: one piece), each as wide as its longest trace.

    `rows` is the largest b of all ranks: every rank gets as many pieces as it, with an empty mask where its own rows
    have ended, so that no rank skips a collective. That holds too where it has none at all.
    """
    blank = torch.full((1, 2), PAD, dtype=input_ids.dtype), torch.zeros(1, 2, dtype=torch.bool)
    if size is None:
        return [(input_ids, mask) if len(input_ids) else blank]
    pieces = []
    for start in range(0, rows, size):
        ids, actions = input_ids[start : start + size], mask[start : start + size]
        if len(ids):
            width = int(actions.any(0).nonzero().max()) + 1 if bool(actions.any()) else 2
            pieces.append((ids[:, :width], actions[:, :width]))
        else:
            pieces.append(blank)
    return pieces


async def collect_traces(
    recipe: Recipe, config: SFTConfig, display: Display
) -> tuple[list[list[Message]], list[list[Message]]]:
    """The clean traces and the imperfect ones, over the first training tasks of the recipe's environment.

    Of several environments each gives its share of both, by weight.
    """
    weights = {one.name: one.weight for one in recipe.environments} or {"": 1.0}
    envs = [one.env for one in recipe.environments] or [recipe.env]
    clean, imperfect = list[list[Message]](), list[list[Message]]()
    for env, weight in zip(envs, weights.values(), strict=True):
        part = weight / sum(weights.values())
        own = config.model_copy(
            update={
                "clean_traces": round(config.clean_traces * part),
                "imperfect_traces": round(config.imperfect_traces * part),
            }
        )
        of_env = await _traces_of(env, recipe.seed, own, display)
        clean, imperfect = clean + of_env[0], imperfect + of_env[1]
    return clean, imperfect


async def _traces_of(
    env_config: EnvConfig, recipe_seed: int, config: SFTConfig, display: Display
) -> tuple[list[list[Message]], list[list[Message]]]:
    script = script_for(env_config)
    if script is not None:
        clean = list(script.traces(config.clean_traces, bad=0.0, seed=recipe_seed + 1))
        return clean, list(script.traces(config.imperfect_traces, bad=config.error_rate, seed=recipe_seed + 2))
    env = make_core(env_config.id, **env_config.kwargs)
    try:
        play = player_of(env, env_config.kwargs)
        if play is None:
            raise RecipeError(
                f"sft: nobody has written a player of {env_config.id} that could make traces: name a file of them with "
                "sft.traces, or start from a model (model.path) without `sft`"
            )
        ids = env.task_ids
        total = config.clean_traces + config.imperfect_traces
        if len(ids) < total:
            raise RecipeError(f"sft: {total} traces need as many training tasks, and env has {len(ids)}")
        traces: list[list[Message]] = []
        with display.stage("Traces", total) as advance:
            for seed, start, count, error_rate in (
                (1, 0, config.clean_traces, 0.0),
                (2, config.clean_traces, config.imperfect_traces, config.error_rate),
            ):
                chosen = [ids[i] for i in range(start, start + count)]
                async for messages in play(chosen, seed=recipe_seed + seed, error_rate=error_rate):
                    traces.append(messages)
                    advance()
        return traces[: config.clean_traces], traces[config.clean_traces :]
    finally:
        await env.aclose()


def run_sft(recipe: Recipe, display: Display, accelerator: Accelerator) -> Path:
    """Do the cold start of `recipe` and return the model's folder, `runs/<name>/sft`; done once, then found again."""
    target, scratch = recipe.run_dir / "sft", recipe.run_dir / ".sft"
    config = recipe.sft
    if share(accelerator, (target / "config.json").exists()):
        return target
    if config is None:
        raise RecipeError("sft: the recipe has no section `sft`")
    limit_s = recipe.learner.collective_timeout_s
    phases = share_result(accelerator, lambda: _prepare(recipe, config, scratch, display), limit_s=limit_s)
    source = scratch if recipe.model.path is None else recipe.model.path
    renderer = recipe.runtime.chat.load(source)
    torch.manual_seed(recipe.seed)
    model = load_policy_model(source, recipe.model, layout_of(accelerator))
    total = sum(steps for _, steps in phases)
    forward = PolicyForward(model, chunk=recipe.learner.logprob_chunk)
    policy = Trainee.prepare(forward, config.optimizer, accelerator, total_steps=total)
    with display.stage("Cold start", total) as advance:
        for traces, steps in phases:
            examples = short_enough([encode_trace(messages, renderer) for messages in traces], config.max_trace_tokens)
            fit(
                policy,
                examples,
                steps=steps,
                batch_size=config.batch_size,
                seed=recipe.seed,
                progress=advance,
                micro_batch_rows=config.micro_batch_rows,
                discard_limit=recipe.learner.discard_limit,
            )
    if policy.discarded:
        display.log(f"cold start: discarded {policy.discarded} of {total} updates, whose gradient was not finite")
    require_finite({"policy": policy.unwrapped}, "cold start")
    save_policy_model(policy.unwrapped.model, source, scratch, main=accelerator.is_main_process)
    if accelerator.is_main_process:
        scratch.rename(target)
    accelerator.wait_for_everyone()
    accelerator.free_memory()  # it holds what it has prepared: weights and moments would stay through the whole run
    return target


def short_enough(examples: list[Example], limit: int | None) -> list[Example]:
    """The traces of at most `limit` tokens; `RecipeError` if there is none."""
    kept = [example for example in examples if limit is None or len(example[0]) <= limit]
    if not kept:
        raise RecipeError(f"sft.max_trace_tokens: all {len(examples)} traces have more than {limit} tokens")
    return kept


def _prepare(recipe: Recipe, config: SFTConfig, scratch: Path, display: Display) -> list[Phase]:
    """Traces with the steps to train on them, and in `scratch` the untrained model of a recipe that makes its own."""
    shutil.rmtree(scratch, ignore_errors=True)
    scratch.mkdir(parents=True)
    if config.traces:
        clean, imperfect = read_traces(config.traces), list[list[Message]]()
    else:
        clean, imperfect = asyncio.run(collect_traces(recipe, config, display))
    if recipe.model.tiny:
        corpus = [f"{m['role']}\n{m['content']}" for trace in (clean or imperfect)[:4000] for m in trace]
        write_tiny_model(scratch, recipe.model.tiny, corpus, recipe.seed)
    clean_steps = config.clean_steps
    if config.epochs is not None:
        clean_steps = math.ceil(config.epochs * len(clean) / config.batch_size)
    phases = [(clean, clean_steps), (imperfect, config.imperfect_steps)]
    return [(traces, steps) for traces, steps in phases if traces and steps]


def starting_model(recipe: Recipe, display: Display, accelerator: Accelerator) -> Path:
    """The policy that RL starts from: the cold start's if the recipe has one, else `model.path`."""
    if recipe.sft is not None:
        return run_sft(recipe, display, accelerator)
    if recipe.model.path is None:
        raise RecipeError("sft: a tiny model needs a cold start (its weights are random)")
    return recipe.model.path


def main(argv: list[str] | None = None) -> int:
    """Command line; see `--help`."""

    def run(recipe: Recipe, display: Display) -> dict[str, Any]:
        return {"model": str(run_sft(recipe, display, make_accelerator(recipe)))}

    return command(__doc__, run, argv)


if __name__ == "__main__":
    raise SystemExit(main())
