"""What every device holds in every phase of a run, whether it fits, and what to change where it does not."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import psutil

from learner.config import Recipe, RecipeError
from learner.faults import LearnerFault
from learner.model.adapter import add_adapter
from learner.parallel.layout import Layout
from learner.parallel.sharding import check_layout
from learner.plan.memory import (
    GIB,
    PROCESS_BYTES,
    Architecture,
    Usage,
    engine_usage,
    kv_bytes_per_token,
    usable_bytes,
)
from learner.plan.rank import VALUE_BYTES, Rank
from learner.plan.shapes import active_parameters, build_modules, count_parameters, critic_parameters

_CPU = "processes on the CPU"
# A bfloat16 weight of 0.02 has neighbours 1e-4 away: a step of AdamW is about the rate, and is rounded off below half.
_LEAST_BFLOAT16_RATE = 1e-4
# What an engine's own forwards need beside weights and cache, on a GPU.
_ENGINE_FORWARD_BYTES = 2 * GIB


@dataclass(frozen=True)
class Row:
    """What one device holds in one phase of the run. There are `devices` of its `kind` ("learner GPUs").

    Processes on the CPU are counted as devices, and take their memory from the same machine. `beside`: what of `usage`
    is not the learner's process, but its share of an engine's on the same devices.
    """

    phase: str
    kind: str
    devices: int
    usage: Usage
    beside: Usage = field(default_factory=Usage)

    @property
    def needed(self) -> float:
        """Bytes of the memory that the device has, or that all of them share."""
        return self.usage.total * (self.devices if self.kind == _CPU else 1)


@dataclass(frozen=True)
class Plan:
    """All phases of a run; `usable` bytes of each device may be taken. `room`: episodes of full length that the cache
    of one engine can hold at once. `problems`: what cannot work whatever the memory. `host`: bytes of the machine's own
    memory that each process beside a GPU takes."""

    parameters: int
    active_parameters: int
    rows: tuple[Row, ...]
    usable: float
    memory_gib: float
    room: int
    engines: int
    problems: tuple[str, ...]
    host: float = 0.0

    def check(self) -> None:
        """Raise `LearnerFault` with one paragraph if the run cannot work."""
        problems = list(self.problems)
        too_large = [row for row in self.rows if row.needed > self.usable]
        for kind in dict.fromkeys(row.kind for row in too_large):
            row, *others = sorted((r for r in too_large if r.kind == kind), key=lambda r: r.needed, reverse=True)
            parts = {k: v for k, v in vars(row.usage).items() if v}
            most = max(parts, key=lambda name: parts[name])
            share = f"{most.replace('_', ' ')} ({parts[most] / GIB:.1f} GiB)"
            together = "" if row.needed == row.usage.total else f", {row.needed / GIB:.1f} together,"
            also = ", ".join(f"{other.phase} ({other.needed / GIB:.1f})" for other in others)
            problems.append(
                f"{row.phase}: each of {row.devices} {row.kind} needs {row.usage.total / GIB:.1f} GiB{together} "
                f"and may use {self.usable / GIB:.1f} of {self.memory_gib:g}; most of it is {share}, for "
                f"which {_REMEDIES[most]}{f'. Too large are also {also}' if also else ''}"
            )
        if problems:
            raise LearnerFault("this recipe does not fit. " + ". ".join(problems))


_LESS = (
    "raise hardware.fsdp (with hardware.learner_gpus), or train less of the critic, where it is the critic's "
    "(learner.critic_trainable, value_pretraining.trainable)"
)
_REMEDIES = {
    "parameters": "raise hardware.fsdp (with hardware.learner_gpus), or hardware.gpus_per_engine for an engine",
    "optimizer": f"{_LESS}, or set the optimizer's offload",
    "gradients": _LESS,
    "activations": (
        "set model.recompute_layers, or lower learner.micro_batch_tokens, learner.logprob_chunk and "
        "runtime.max_context_tokens (in the cold start: sft.max_trace_tokens, sft.micro_batch_rows)"
    ),
    "copies": (
        "raise hardware.fsdp (with hardware.learner_gpus); a checkpoint is written from a copy, and so is a step that "
        "may be taken back (learner.held_out_probe, learner.judged_gate)"
    ),
    "process": "start fewer processes",
    "kv_cache": "raise hardware.gpus_per_engine, or lower engine.max_context",
}


def make_plan(recipe: Recipe, processes: int | None = None) -> Plan:
    """Memory of every phase of `recipe` on every kind of device. Raises `RecipeError` if the model is unknown.

    `processes` of the learner, where the recipe does not say how many (on the CPU, each with a whole copy).
    """
    hardware, engine = recipe.hardware, recipe.engine
    layout = planned_layout(recipe, processes)
    policy_module, body = build_modules(recipe)
    architecture, whole = Architecture.of(policy_module.config), count_parameters(policy_module)
    policy = whole
    if recipe.model.policy_adapter is not None:
        add_adapter(policy_module, recipe.model.policy_adapter)
        policy = count_parameters(policy_module)
    rank = Rank(recipe, layout, architecture, policy, body)
    kind = _CPU if rank.on_cpu else "learner GPUs"
    memory_gib = hardware.memory_gib
    if memory_gib is None:
        memory_gib = psutil.virtual_memory().total / GIB
    tensor_parallel = hardware.gpus_per_engine if hardware.engine_gpus else 1
    value_bytes = VALUE_BYTES[recipe.published_dtype]
    serving = engine_usage(
        policy.total, architecture, tokens=engine.max_context, value_bytes=value_bytes, tensor_parallel=tensor_parallel
    )
    serving += Usage(process=PROCESS_BYTES) if rank.on_cpu else Usage(activations=_ENGINE_FORWARD_BYTES)
    beside = Usage() if hardware.engine_gpus else serving
    if rank.on_cpu:  # one engine beside all processes
        beside *= 1 / layout.world

    rows = []
    if recipe.sft is not None:
        tokens, positions = _cold_start_tokens(recipe, layout.data_ranks)
        rows.append(Row("cold start", kind, layout.world, rank.update(whole, recipe.sft.optimizer, tokens, positions)))
    if (pretraining := recipe.value_pretraining) is not None and recipe.pretrains_critic:
        critic = critic_parameters(body, pretraining.trainable)
        usage = rank.update(critic, pretraining.optimizer, rank.tokens, 0)
        rows.append(Row("value pretraining", kind, layout.world, usage))
    rows += [
        Row(f"RL, {phase}", kind, layout.world, usage + beside, beside) for phase, usage in rank.rl_phases().items()
    ]
    if hardware.engine_gpus:
        rows.append(Row("RL, rollouts", "engine GPUs", hardware.engine_gpus, serving))

    per_token = kv_bytes_per_token(architecture, value_bytes=value_bytes, tensor_parallel=tensor_parallel)
    others = max(row.needed for row in rows if row.kind == ("engine GPUs" if hardware.engine_gpus else kind))
    left = usable_bytes(memory_gib) - others
    room = max(0, 1 + int(left // (per_token * engine.max_context)))
    return Plan(
        parameters=whole.total,
        active_parameters=active_parameters(whole.total, architecture),
        rows=tuple(rows),
        usable=usable_bytes(memory_gib),
        memory_gib=round(memory_gib, 1),
        room=room,
        engines=max(1, hardware.engine_gpus // tensor_parallel),
        problems=tuple(_problems(recipe, policy_module.config, layout)),
        host=rank.host_bytes,
    )


def planned_layout(recipe: Recipe, processes: int | None = None) -> Layout:
    """How the learner's processes lie: `processes` of them, or as many as the recipe's `hardware` says."""
    hardware = recipe.hardware
    said = hardware.fsdp * hardware.tp * hardware.replicate * hardware.context
    return Layout.of(hardware, processes or hardware.learner_gpus or said)


def _cold_start_tokens(recipe: Recipe, shards: int) -> tuple[int, int]:
    """Tokens of a device's micro-batch in the cold start, and how many positions reach the vocabulary at once."""
    assert recipe.sft is not None
    rows = -(-recipe.sft.batch_size // shards)
    if recipe.sft.micro_batch_rows is not None:
        rows = min(rows, recipe.sft.micro_batch_rows)
    tokens = rows * (recipe.sft.max_trace_tokens or recipe.runtime.max_context_tokens)
    return tokens, min(tokens, recipe.learner.logprob_chunk)


def _problems(recipe: Recipe, config: Any, layout: Layout) -> Iterator[str]:
    model, shards = Architecture.of(config), layout.data_ranks
    algorithm = recipe.learner.resolve()
    try:
        check_layout(layout, config)
    except RecipeError as error:
        yield str(error)
    rates = {} if recipe.model.policy_adapter is not None else {"learner.policy.lr": recipe.learner.policy.lr}
    if algorithm.critic is not None and algorithm.critic.trainable != "lora":  # adapters are in float32
        rates["learner.critic.lr"] = recipe.learner.critic.lr
    lost = {key: rate for key, rate in rates.items() if 0 < rate < _LEAST_BFLOAT16_RATE}
    if recipe.model.dtype == "bfloat16" and lost:
        key, rate = min(lost.items(), key=lambda item: item[1])
        yield (
            f"model.dtype: at {key} {rate:g} nearly all updates of bfloat16 weights are rounded away; keep them "
            "in float32 and compute in bfloat16 (model.dtype: float32, model.compute_dtype: bfloat16)"
        )
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
