"""Does a recipe fit the machines it is meant for? Nothing is loaded: the model is built without memory.

python -m learner.plan recipes/math_30b.yaml
python -m learner.plan recipes/math_4b.yaml --gpus 1 --memory-gib 80 learner.micro_batch_tokens=8192
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

import psutil
import torch
from rich.console import Console
from rich.table import Table
from torch import nn
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM
from transformers.modeling_layers import GradientCheckpointingLayer

from learner.cli import LearnerFault, guarded, read_words, recipe_parser
from learner.config import Recipe, RecipeError
from learner.critic import freeze, new_critic
from learner.memory import (
    GIB,
    Architecture,
    Parameters,
    Usage,
    engine_usage,
    kv_bytes_per_token,
    resting_usage,
    update_usage,
    usable_bytes,
)
from learner.tiny import build_config

_VALUE_BYTES = {"float32": 4, "bfloat16": 2}
# What an engine's own forwards need beside weights and cache, on a GPU.
_ENGINE_FORWARD_BYTES = 2 * GIB


@dataclass(frozen=True)
class Row:
    """What one device holds in one phase of the run. `where` names the devices, of which there are `devices`."""

    phase: str
    where: str
    devices: int
    usage: Usage


@dataclass(frozen=True)
class Plan:
    """All phases of a run; `usable` bytes of each device may be taken. `room`: episodes of full length that the cache
    of one engine can hold at once. `problems`: what cannot work whatever the memory."""

    parameters: int
    active_parameters: int
    rows: tuple[Row, ...]
    usable: float
    memory_gib: float
    room: int
    engines: int
    problems: tuple[str, ...]

    @property
    def largest(self) -> Row:
        return max(self.rows, key=lambda row: row.usage.total)

    def check(self) -> None:
        """Raise `LearnerFault` with one paragraph if the run cannot work."""
        problems = list(self.problems)
        for row in self.rows:
            if row.usage.total > self.usable:
                parts = {k: v for k, v in vars(row.usage).items() if v}
                most = max(parts, key=lambda name: parts[name])
                problems.append(
                    f"{row.phase}: each of {row.devices} {row.where} needs {row.usage.total / GIB:.1f} GiB and may use "
                    f"{self.usable / GIB:.1f} of {self.memory_gib:g}; most of it is {most.replace('_', ' ')} "
                    f"({parts[most] / GIB:.1f} GiB), for which {_REMEDIES[most]}"
                )
        if problems:
            raise LearnerFault("this recipe does not fit. " + ". ".join(problems))


_LESS = (
    "raise hardware.learner_gpus, or train less of the critic, where it is the critic's (learner.critic_trainable, "
    "value_pretraining.trainable)"
)
_REMEDIES = {
    "parameters": "raise hardware.learner_gpus, or hardware.gpus_per_engine for an engine",
    "optimizer": _LESS,
    "gradients": _LESS,
    "activations": (
        "set model.recompute_layers, or lower learner.micro_batch_tokens, learner.logprob_chunk and "
        "runtime.max_context_tokens (in the cold start: sft.max_trace_tokens, sft.micro_batch_rows)"
    ),
    "kv_cache": "raise hardware.gpus_per_engine, or lower engine.max_context",
}


def model_config(recipe: Recipe) -> Any:
    """The transformers configuration of the recipe's model: from its weights' folder, else from its `architecture`.

    Raises `RecipeError` naming `model.architecture` where neither is there.
    """
    model = recipe.model
    if model.tiny is not None:
        return build_config(model.tiny, model.tiny.vocab_size, 0)
    if model.path is not None and (model.path / "config.json").exists():
        return AutoConfig.from_pretrained(model.path, trust_remote_code=model.trust_remote_code)
    if model.architecture is None:
        raise RecipeError(
            f"model.architecture: there is no config.json in model.path ({model.path}), so say what model it will be: "
            f"{', '.join(known_architectures())}, or a folder with a config.json"
        )
    with resources.as_file(resources.files("recipes") / "models" / model.architecture) as shipped:
        for folder in (shipped, Path(model.architecture)):
            if (folder / "config.json").exists():
                return AutoConfig.from_pretrained(folder)
    raise RecipeError(
        f"model.architecture: there is no {model.architecture!r}; known: {', '.join(known_architectures())}, or a "
        "folder with a config.json"
    )


def known_architectures() -> list[str]:
    """The names in recipes/models."""
    return sorted(entry.name for entry in (resources.files("recipes") / "models").iterdir() if entry.is_dir())


def count_parameters(module: nn.Module) -> Parameters:
    """Trained, frozen, of the largest decoder layer, and outside all layers; tied weights count once."""
    numbers = {id(p): p.numel() for p in module.parameters()}
    trained = sum(p.numel() for p in module.parameters() if p.requires_grad)
    layers = [sum(p.numel() for p in layer.parameters()) for layer in _layers(module)]
    total = sum(numbers.values())
    return Parameters(trained, total - trained, max(layers, default=0), total - sum(layers))


def _layers(module: nn.Module) -> Iterator[nn.Module]:
    return (child for child in module.modules() if isinstance(child, GradientCheckpointingLayer))


def build_modules(recipe: Recipe) -> tuple[nn.Module, Any]:
    """Policy (a causal LM) and a body for critics, both on the meta device: shapes without memory."""
    config = model_config(recipe)
    with torch.device("meta"), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return AutoModelForCausalLM.from_config(config), AutoModel.from_config(config)


def critic_parameters(body: Any, trainable: str) -> Parameters:
    """Of a critic on (a copy of) `body` of which the part `trainable` moves."""
    with torch.device("meta"):
        critic = new_critic(copy.deepcopy(body))
        freeze(critic, trainable)
    return count_parameters(critic)


def make_plan(recipe: Recipe) -> Plan:
    """Memory of every phase of `recipe` on every kind of device. Raises `RecipeError` if the model is unknown."""
    hardware, engine = recipe.hardware, recipe.engine
    policy_module, body = build_modules(recipe)
    architecture, policy = Architecture.of(policy_module.config), count_parameters(policy_module)
    shards = max(hardware.learner_gpus, 1)
    weight_bytes, value_bytes = _VALUE_BYTES[recipe.model.dtype], _VALUE_BYTES[recipe.model.computes_in]
    where = "learner GPUs" if hardware.learner_gpus else "CPU"
    memory_gib = hardware.memory_gib
    if memory_gib is None:
        memory_gib = psutil.virtual_memory().total / GIB

    def update(parameters: Parameters, tokens: int, positions: int) -> Usage:
        return update_usage(
            parameters,
            architecture,
            tokens=tokens,
            positions=positions,
            weight_bytes=weight_bytes,
            value_bytes=value_bytes,
            shards=shards,
            recompute=recipe.model.recompute_layers,
        )

    def rest(parameters: Parameters) -> Usage:
        return resting_usage(parameters, weight_bytes=weight_bytes, value_bytes=value_bytes, shards=shards)

    # A row longer than a micro-batch goes alone.
    tokens = max(recipe.learner.micro_batch_tokens, recipe.runtime.max_context_tokens)
    positions = min(tokens, recipe.learner.logprob_chunk)
    tensor_parallel = hardware.gpus_per_engine if hardware.engine_gpus else 1
    serving = engine_usage(
        policy.total, architecture, tokens=engine.max_context, value_bytes=value_bytes, tensor_parallel=tensor_parallel
    )
    if hardware.learner_gpus:
        serving += Usage(activations=_ENGINE_FORWARD_BYTES)
    beside = Usage() if hardware.engine_gpus else serving

    rows = []
    if recipe.sft is not None:
        rows.append(Row("cold start", where, shards, update(policy, *_cold_start_tokens(recipe, shards))))
    if recipe.value_pretraining is not None and recipe.pretrains_critic:
        critic = critic_parameters(body, recipe.value_pretraining.trainable)
        rows.append(Row("value pretraining", where, shards, update(critic, tokens, 0)))
    algorithm = recipe.learner.resolve()
    waiting = Usage()
    if algorithm.critic is not None:
        critic = critic_parameters(body, algorithm.critic.trainable)
        waiting = rest(critic)
        rows.append(Row("RL, critic update", where, shards, update(critic, tokens, 0) + rest(policy) + beside))
    rows.append(Row("RL, policy update", where, shards, update(policy, tokens, positions) + waiting + beside))
    if hardware.engine_gpus:
        rows.append(Row("RL, rollouts", "engine GPUs", hardware.engine_gpus, serving))

    per_token = kv_bytes_per_token(architecture, value_bytes=value_bytes, tensor_parallel=tensor_parallel)
    others = max(row.usage.total for row in rows if row.where == ("engine GPUs" if hardware.engine_gpus else where))
    left = usable_bytes(memory_gib) - others
    room = max(0, 1 + int(left // (per_token * engine.max_context)))
    return Plan(
        parameters=policy.total,
        active_parameters=active_parameters(policy.total, architecture),
        rows=tuple(rows),
        usable=usable_bytes(memory_gib),
        memory_gib=round(memory_gib, 1),
        room=room,
        engines=max(1, hardware.engine_gpus // tensor_parallel),
        problems=tuple(_problems(recipe, architecture, shards)),
    )


def active_parameters(total: int, model: Architecture) -> int:
    """Parameters that one token passes: without the experts that it is not sent to."""
    unused = max(model.experts - model.experts_per_token, 0)
    return total - model.layers * unused * 3 * model.hidden * model.mlp_width


def _cold_start_tokens(recipe: Recipe, shards: int) -> tuple[int, int]:
    """Tokens of a device's micro-batch in the cold start, and how many positions reach the vocabulary at once."""
    assert recipe.sft is not None
    rows = -(-recipe.sft.batch_size // shards)
    if recipe.sft.micro_batch_rows is not None:
        rows = min(rows, recipe.sft.micro_batch_rows)
    tokens = rows * (recipe.sft.max_trace_tokens or recipe.runtime.max_context_tokens)
    return tokens, min(tokens, recipe.learner.logprob_chunk)


def _problems(recipe: Recipe, model: Architecture, shards: int) -> Iterator[str]:
    algorithm = recipe.learner.resolve()
    prompts = recipe.learner.batch_size // algorithm.samples_per_prompt
    if prompts < shards:
        yield f"learner.batch_size: {prompts} prompts cannot be dealt to {shards} processes"
    if recipe.sft is not None and recipe.sft.batch_size < shards:
        yield f"sft.batch_size: {recipe.sft.batch_size} traces cannot be dealt to {shards} processes"
    if recipe.engine.max_context > model.max_positions:
        yield (
            f"engine.max_context: {recipe.engine.max_context} tokens, and the model was made for {model.max_positions}"
        )
    if model.heads % recipe.hardware.gpus_per_engine:
        yield (
            f"hardware.gpus_per_engine: {model.heads} attention heads cannot be dealt to "
            f"{recipe.hardware.gpus_per_engine} GPUs"
        )


def plan_table(plan: Plan) -> Table:
    """One line a phase; GiB on one device."""
    table = Table(title="GiB on each device", title_justify="left")
    for column in ("phase", "devices", "parameters", "optimiser", "gradients", "activations", "KV cache", "total"):
        table.add_column(column, justify="left" if column in ("phase", "devices") else "right")
    table.add_column(f"of {plan.memory_gib:g}", justify="right")
    for row in plan.rows:
        usage = row.usage
        figures = (usage.parameters, usage.optimizer, usage.gradients, usage.activations, usage.kv_cache, usage.total)
        cells = [f"{figure / GIB:.1f}" for figure in figures]
        fits = "fits" if usage.total <= plan.usable else "[red]too much[/]"
        table.add_row(row.phase, f"{row.devices} {row.where}", *cells, fits)
    return table


def main(argv: list[str] | None = None) -> int:
    """Command line; see `--help`. Exit code 0: the recipe fits; 1: it does not, and one paragraph says why."""
    parser = recipe_parser(__doc__)
    parser.add_argument("--gpus", type=int, metavar="N", help="GPUs of the learner (default: the recipe's)")
    parser.add_argument("--memory-gib", type=float, metavar="M", help="memory of one GPU (default: the recipe's)")
    given = parser.parse_intermixed_args(argv)

    def body() -> int:
        words = list(given.words)
        if given.gpus is not None:
            words.append(f"hardware.learner_gpus={given.gpus}")
        if given.memory_gib is not None:
            words.append(f"hardware.memory_gib={given.memory_gib}")
        recipe = read_words(words)
        plan = make_plan(recipe)
        console = Console() if Console().is_terminal else Console(width=128)
        console.print(
            f"{recipe.name}: {plan.parameters / 1e6:,.1f} million parameters, {plan.active_parameters / 1e6:,.1f} used "
            "by a token",
            highlight=False,
        )
        console.print(plan_table(plan))
        console.print(
            f"{plan.engines} engine{'s' * (plan.engines > 1)}, each with room for {plan.room} episodes of "
            f"{recipe.engine.max_context} tokens at once (runtime.concurrency is {recipe.runtime.concurrency})",
            highlight=False,
        )
        if recipe.hardware.learner_gpus > 1:
            console.print("counted as sharded over the learner's GPUs (FSDP2); see docs/recipes.md for what runs today")
        plan.check()
        return 0

    return guarded(body)


if __name__ == "__main__":
    raise SystemExit(main())
