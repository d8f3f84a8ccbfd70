"""Supervised cold start: `python -m learner.sft RECIPE` makes the model that RL starts from.

python -m learner.sft recipes/tir_tiny.yaml sft.clean_steps=200
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import random
import shutil
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor

from agent.chat import ChatRenderer
from envs import make_core
from learner.batch import PAD
from learner.cli import command
from learner.config import Recipe, RecipeError, SFTConfig
from learner.display import Display
from learner.forward import PolicyForward
from learner.models import load_policy_model, save_policy_model
from learner.ranks import make_accelerator, share, share_result
from learner.style_traces import has_script, style_traces
from learner.swe_traces import has_recorded, swe_traces
from learner.tiny import write_tiny_model
from learner.traces import Message, write_traces
from learner.trainee import Trainee

Example = tuple[Tensor, Tensor]
"""Token ids int64[T] and the action mask bool[T] of one trace."""

Phase = tuple[list[list[Message]], int]
"""Traces, and how many updates to make on them."""


def encode_trace(messages: Sequence[Message], renderer: ChatRenderer) -> Example:
    """Tokens of one trace exactly as the runtime would have laid them out, with a mask over the actions."""
    first = next(i for i, m in enumerate(messages) if m["role"] == "assistant")
    ids = list(renderer.start(list(messages[:first]), None).token_ids)
    mask = [False] * len(ids)
    for i, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        action = renderer.encode_action(message["content"])
        ids += action
        mask += [True] * len(action)
        following = [m for m in messages[i + 1 : i + 2] if m["role"] != "assistant"]
        if following:
            observation = renderer.extend(list(messages[: i + 1]), action, following, None).token_ids
            ids += observation
            mask += [False] * len(observation)
    return torch.tensor(ids), torch.tensor(mask)


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
) -> None:
    """Minimise the negative log-likelihood of the action tokens, `steps` updates."""
    accelerator = policy.accelerator
    for input_ids, mask in batches(examples, batch_size, steps, seed):
        own = slice(accelerator.process_index, None, accelerator.num_processes)
        rows = -(-batch_size // accelerator.num_processes)
        parts = micro_batches(input_ids[own], mask[own], rows=rows, size=micro_batch_rows)
        total = 0.0
        for i, (ids, actions) in enumerate(parts):
            with contextlib.nullcontext() if i == len(parts) - 1 else accelerator.no_sync(policy.module):
                logprobs, _ = policy.module(ids.to(accelerator.device), actions.to(accelerator.device))
                # Of the global batch, divided by the world because gradients are averaged over it.
                loss = -logprobs.sum() * accelerator.num_processes / mask.sum().clamp(min=1)
                accelerator.backward(loss)
            total += float(loss.detach())
        policy.step()
        progress(1, loss=total)


def micro_batches(input_ids: Tensor, mask: Tensor, *, rows: int, size: int | None) -> list[tuple[Tensor, Tensor]]:
    """Cut a rank's part [b,T] into pieces of `size` rows (None: one piece), each as wide as its longest trace.

    `rows` is the largest b of all ranks: every rank gets as many pieces as it, with an empty mask where its own rows
    have ended, so that no rank skips a collective.
    """
    if size is None:
        return [(input_ids, mask)]
    pieces = []
    for start in range(0, rows, size):
        ids, actions = input_ids[start : start + size], mask[start : start + size]
        if len(ids):
            width = int(actions.any(0).nonzero().max()) + 1 if bool(actions.any()) else 2
            pieces.append((ids[:, :width], actions[:, :width]))
        else:
            pieces.append((input_ids[:1, :2], torch.zeros_like(mask[:1, :2])))
    return pieces


async def collect_traces(
    recipe: Recipe, config: SFTConfig, display: Display
) -> tuple[list[list[Message]], list[list[Message]]]:
    """The clean traces and the imperfect ones, over the first training tasks of the recipe's environment."""
    if has_script(recipe.env.id, recipe.env.kwargs):
        clean = list(style_traces(config.clean_traces, bad=0.0, seed=recipe.seed + 1))
        return clean, list(style_traces(config.imperfect_traces, bad=config.error_rate, seed=recipe.seed + 2))
    if has_recorded(recipe.env.id, recipe.env.kwargs):
        clean = list(swe_traces(config.clean_traces, bad=0.0, seed=recipe.seed + 1))
        return clean, list(swe_traces(config.imperfect_traces, bad=config.error_rate, seed=recipe.seed + 2))
    env = make_core(recipe.env.id, **recipe.env.kwargs)
    sandbox = str(recipe.env.kwargs.get("sandbox", "auto"))
    try:
        ids = env.task_ids
        total = config.clean_traces + config.imperfect_traces
        if len(ids) < total:
            raise RecipeError(f"sft: {total} traces need as many training tasks, and env has {len(ids)}")
        found: list[list[Message]] = []
        with display.stage("Traces", total) as advance:
            for seed, start, count, error_rate in (
                (1, 0, config.clean_traces, 0.0),
                (2, config.clean_traces, config.imperfect_traces, config.error_rate),
            ):
                chosen = [ids[i] for i in range(start, start + count)]
                async for messages in write_traces(
                    env, chosen, seed=recipe.seed + seed, error_rate=error_rate, sandbox=sandbox
                ):
                    found.append(messages)
                    advance()
        return found[: config.clean_traces], found[config.clean_traces :]
    finally:
        await env.aclose()


def read_traces(path: Path, key: str = "sft.traces") -> list[list[Message]]:
    """The message lists of a JSONL; `RecipeError`, naming `key`, where it holds anything else."""
    try:
        found = [json.loads(line)["messages"] for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
        spoken = [{m["role"] for m in messages if isinstance(m["content"], str)} for messages in found]
    except OSError as error:
        raise RecipeError(
            f"{key}: cannot read {path}: {error.strerror or error}. Put the traces there, or name another file "
            "(docs/recipes.md says what a trace is)"
        ) from error
    except (KeyError, TypeError, ValueError) as error:
        raise RecipeError(
            f"{key}: {path} must be JSON lines, each with `messages` (role and content): {error!r}"
        ) from error
    silent = next((i for i, roles in enumerate(spoken) if "assistant" not in roles), None)
    if not found or silent is not None:
        which = "no trace at all" if silent is None else f"a trace without an assistant message (number {silent + 1})"
        raise RecipeError(f"{key}: {path} holds {which}, so there is nothing to learn from")
    return found


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
    renderer = ChatRenderer.from_pretrained(source)
    torch.manual_seed(recipe.seed)
    model = load_policy_model(source, recipe.model)
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
            )
    if accelerator.is_main_process:
        save_policy_model(policy.unwrapped.model, source, scratch)
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


def _prepare(
    recipe: Recipe, config: SFTConfig, scratch: Path, display: Display
) -> list[tuple[list[list[Message]], int]]:
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


def main(argv: list[str] | None = None) -> int:
    """Command line; see `--help`."""

    def run(recipe: Recipe, display: Display) -> dict[str, Any]:
        return {"model": str(run_sft(recipe, display, make_accelerator(recipe)))}

    return command(__doc__, run, argv)


if __name__ == "__main__":
    raise SystemExit(main())
