"""Memory of a run, by arithmetic: pure functions, bytes in and out, nothing allocated.

Parameters, optimiser and gradients are exact. Activations are counted tensor by tensor for one decoder layer of a
Qwen3-like model (attention with q/k norms, gated MLP or experts); `tests/learner/test_plan.py` holds the count against
what autograd really keeps.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

GIB = 2**30

ADAMW_MOMENTS = 2
"""AdamW keeps two values a trained parameter, in the parameter's own dtype."""

RESERVE_SHARE = 0.06
"""Of a device, for what is not counted: context and kernels of CUDA, buffers of NCCL, fragmentation."""

_FLOAT32_BYTES = 4
_FLOAT32_LOGITS = 4
"""Copies [positions, vocabulary] in float32 at the peak of one chunk: logits, tempered, their softmax, a product."""


@dataclass(frozen=True)
class Architecture:
    """The sizes of a decoder that memory depends on. `mlp_width` is of one expert where there are experts.

    `experts` and `experts_per_token` are 0 for a dense model. `max_positions`: the longest context it was made for.
    """

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    mlp_width: int
    experts: int
    experts_per_token: int
    vocabulary: int
    max_positions: int

    @classmethod
    def of(cls, config: Any) -> Architecture:
        """From a transformers configuration with Qwen3's or Qwen3-MoE's keys."""
        config = config.get_text_config()
        experts = getattr(config, "num_experts", 0) or 0
        return cls(
            layers=config.num_hidden_layers,
            hidden=config.hidden_size,
            heads=config.num_attention_heads,
            kv_heads=config.num_key_value_heads,
            head_dim=getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads,
            mlp_width=config.moe_intermediate_size if experts else config.intermediate_size,
            experts=experts,
            experts_per_token=config.num_experts_per_tok if experts else 0,
            vocabulary=config.vocab_size,
            max_positions=config.max_position_embeddings,
        )


@dataclass(frozen=True)
class Parameters:
    """Numbers of parameters of a module: trained, frozen, of the largest decoder layer, and outside the layers."""

    trained: int
    frozen: int
    largest_layer: int
    outside_layers: int

    @property
    def total(self) -> int:
        return self.trained + self.frozen


@dataclass(frozen=True)
class Usage:
    """Bytes on one device, by what they are for. `activations` includes logits, gathered weights and temporaries."""

    parameters: float = 0
    optimizer: float = 0
    gradients: float = 0
    activations: float = 0
    kv_cache: float = 0

    @property
    def total(self) -> float:
        return sum(getattr(self, item.name) for item in fields(self))

    def __add__(self, other: Usage) -> Usage:
        return Usage(**{f.name: getattr(self, f.name) + getattr(other, f.name) for f in fields(self)})


def parameter_bytes(parameters: Parameters, *, trained_value_bytes: int, frozen_value_bytes: int, shards: int) -> float:
    """Weights on one of `shards` devices."""
    return (parameters.trained * trained_value_bytes + parameters.frozen * frozen_value_bytes) / shards


def optimizer_bytes(trained: int, *, value_bytes: int, shards: int) -> float:
    """AdamW's moments on one of `shards` devices; frozen parameters have none."""
    return ADAMW_MOMENTS * trained * value_bytes / shards


def gradient_bytes(trained: int, *, value_bytes: int, shards: int) -> float:
    """Gradients on one of `shards` devices, from the first micro-batch to the optimiser's step."""
    return trained * value_bytes / shards


def optimizer_step_bytes(trained: int, *, value_bytes: int, shards: int) -> float:
    """What AdamW's fused loops over all tensors hold for a moment: one more value a trained parameter."""
    return trained * value_bytes / shards


def kv_bytes_per_token(model: Architecture, *, value_bytes: int, tensor_parallel: int = 1) -> int:
    """Keys and values of one token on one of `tensor_parallel` devices; a head is never split."""
    heads = max(1, -(-model.kv_heads // tensor_parallel))
    return 2 * model.layers * heads * model.head_dim * value_bytes


def layer_activation_bytes_per_token(model: Architecture, *, value_bytes: int) -> int:
    """What autograd keeps of one token in one decoder layer, `value_bytes` being those of the computing dtype.

    Norms compute in float32: each keeps its input so, and what it gives. Rotary embedding keeps nothing of its own.
    """
    queries, keys = model.heads * model.head_dim, model.kv_heads * model.head_dim
    norm = model.hidden * (_FLOAT32_BYTES + 2 * value_bytes)
    head_norms = (queries + keys) * (_FLOAT32_BYTES + 2 * value_bytes)
    attention = (queries + keys) * value_bytes + keys * value_bytes + queries * value_bytes
    if model.experts:
        router = model.experts * (_FLOAT32_BYTES + value_bytes)
        # Gathered input, gate and up, the activated gate, their product, the expert's output, weighted.
        expert = (3 * model.hidden + 4 * model.mlp_width) * value_bytes
        mlp = router + model.experts_per_token * expert
    else:
        mlp = 4 * model.mlp_width * value_bytes
    return 2 * norm + head_norms + attention + mlp


def activation_bytes(model: Architecture, tokens: int, *, value_bytes: int, recompute: bool) -> int:
    """Of a forward and backward over `tokens` tokens. The layer in hand also has gradients of its activations.

    With `recompute` only the layers' inputs are kept, and one layer at a time is made again.
    """
    layer = layer_activation_bytes_per_token(model, value_bytes=value_bytes)
    kept = model.hidden * value_bytes if recompute else layer
    return tokens * (model.layers * kept + (2 if recompute else 1) * layer)


def logit_bytes(model: Architecture, positions: int, *, value_bytes: int) -> int:
    """Of `positions` positions that reach the vocabulary at once (at most `learner.logprob_chunk`)."""
    return positions * model.vocabulary * (_FLOAT32_LOGITS * _FLOAT32_BYTES + value_bytes)


def gathered_bytes(parameters: Parameters, *, value_bytes: int, shards: int) -> int:
    """Weights that sharding puts together for a moment: two layers (one is fetched ahead) and what is outside the
    layers, in the computing dtype, and a layer's gradient in float32. 0 on a single device."""
    if shards == 1:
        return 0
    weights = 2 * parameters.largest_layer + parameters.outside_layers
    return weights * value_bytes + parameters.largest_layer * _FLOAT32_BYTES


def cast_bytes(parameters: Parameters, *, weight_bytes: int, value_bytes: int, shards: int) -> int:
    """Autocast keeps a narrow copy of every wide weight until the backward pass is over; sharding casts by layer."""
    return parameters.total * value_bytes if shards == 1 and value_bytes < weight_bytes else 0


def update_usage(
    parameters: Parameters,
    model: Architecture,
    *,
    tokens: int,
    positions: int,
    weight_bytes: int,
    value_bytes: int,
    shards: int,
    recompute: bool,
) -> Usage:
    """One device while a module makes its update: a micro-batch of `tokens`, `positions` of them before the vocabulary
    at once (0 for a critic). `weight_bytes` and `value_bytes`: of one stored and one computed value.

    On several devices trained weights are float32, whatever they were loaded in: Accelerate's FSDP2 makes them so for
    a computing dtype that is narrower.
    """
    trained_bytes = trained_value_bytes(weight_bytes=weight_bytes, value_bytes=value_bytes, shards=shards)
    passes = (
        activation_bytes(model, tokens, value_bytes=value_bytes, recompute=recompute)
        + logit_bytes(model, positions, value_bytes=value_bytes)
        + gathered_bytes(parameters, value_bytes=value_bytes, shards=shards)
        + cast_bytes(parameters, weight_bytes=weight_bytes, value_bytes=value_bytes, shards=shards)
    )
    stepping = optimizer_step_bytes(parameters.trained, value_bytes=trained_bytes, shards=shards)
    return resting_usage(parameters, weight_bytes=weight_bytes, value_bytes=value_bytes, shards=shards) + Usage(
        gradients=gradient_bytes(parameters.trained, value_bytes=trained_bytes, shards=shards),
        activations=max(passes, stepping),
    )


def resting_usage(parameters: Parameters, *, weight_bytes: int, value_bytes: int, shards: int) -> Usage:
    """One device while another module is at work: weights and moments stay, gradients are gone."""
    trained_bytes = trained_value_bytes(weight_bytes=weight_bytes, value_bytes=value_bytes, shards=shards)
    return Usage(
        parameters=parameter_bytes(
            parameters, trained_value_bytes=trained_bytes, frozen_value_bytes=weight_bytes, shards=shards
        ),
        optimizer=optimizer_bytes(parameters.trained, value_bytes=trained_bytes, shards=shards),
    )


def trained_value_bytes(*, weight_bytes: int, value_bytes: int, shards: int) -> int:
    """Bytes of one trained weight; see `update_usage` for why sharding changes it."""
    return _FLOAT32_BYTES if shards > 1 and value_bytes < _FLOAT32_BYTES else weight_bytes


def engine_usage(
    parameters_total: int, model: Architecture, *, tokens: int, value_bytes: int, tensor_parallel: int
) -> Usage:
    """One of an engine's `tensor_parallel` devices with room for `tokens` tokens of keys and values."""
    per_token = kv_bytes_per_token(model, value_bytes=value_bytes, tensor_parallel=tensor_parallel)
    return Usage(parameters=parameters_total * value_bytes / tensor_parallel, kv_cache=tokens * per_token)


def usable_bytes(memory_gib: float) -> float:
    """Of a device with `memory_gib` GiB, what a plan may use."""
    return memory_gib * GIB * (1.0 - RESERVE_SHARE)
