"""Memory of a run, by arithmetic: pure functions, bytes in and out, nothing allocated.

Parameters, optimiser and gradients are exact. Activations are counted tensor by tensor for one decoder layer of a
Qwen3-like model (attention with q/k norms, gated MLP or experts); `tests/learner/plan/test_plan.py` holds the count
against what autograd really keeps.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any, Literal

GIB = 2**30

ADAMW_MOMENTS = 2
"""AdamW keeps two values a trained parameter, in the parameter's own dtype."""

EIGHT_BIT_MOMENT_BYTES = 1 + 4 / 256
"""Of an 8-bit AdamW: a byte, and a float32 scale for every 256 of them."""

PROCESS_BYTES = 3 * GIB // 8
"""A process with torch and transformers on a CPU, before it holds any weight."""

RESERVE_SHARE = 0.06
"""Of a device, for what is not counted: context and kernels of CUDA, buffers of NCCL, fragmentation."""

Stepping = Literal["fused", "together", "one_by_one", "unpacked"]
"""How an optimiser goes through its tensors: in one kernel; in loops over all of them; each by itself; the same, out of
8 bits."""

_STEP_COPIES = {"fused": 0, "one_by_one": 2, "unpacked": 4}  # of the largest tensor
_FLOAT32_BYTES = 4
_BATCH_BYTES_PER_TOKEN = 64  # eleven or so columns of the batch, and what is found out of each token
_LOGITS_IN_HAND = 2 * 2**26
"""Logits beside those of a chunk at its peak: rows that are worked on, see `learner.model.forward`."""


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
    """Numbers of parameters of a module: trained, frozen, of the largest decoder layer, outside the layers, and of the
    largest tensor.

    A tied head counts once in what is trained, and twice outside the layers: sharding puts it together once more.
    `adapted_inputs`: of one decoder layer, the inputs of all matrices with an adapter, each of which is kept once more.
    Where there is an adapter, it is what is trained, and it is in float32.
    """

    trained: int
    frozen: int
    largest_layer: int
    outside_layers: int
    largest_tensor: int = 0
    adapted_inputs: int = 0

    @property
    def total(self) -> int:
        return self.trained + self.frozen

    @property
    def lasting(self) -> Parameters:
        """What training changes: an adapter without its base."""
        return replace(self, frozen=0) if self.adapted_inputs else self

    def trained_bytes(self, value_bytes: int) -> int:
        """Of one trained value, beside others of `value_bytes`."""
        return _FLOAT32_BYTES if self.adapted_inputs else value_bytes


@dataclass(frozen=True)
class Usage:
    """Bytes on one device, by what they are for. `activations` includes logits, gathered weights and temporaries.

    `copies`: of weights and moments, for a checkpoint or a step that may be taken back, and what a publication puts
    together. `process`: a process on a CPU without a model.
    """

    parameters: float = 0
    optimizer: float = 0
    gradients: float = 0
    activations: float = 0
    kv_cache: float = 0
    copies: float = 0
    process: float = 0

    @property
    def total(self) -> float:
        return sum(getattr(self, item.name) for item in fields(self))

    def __add__(self, other: Usage) -> Usage:
        return Usage(**{f.name: getattr(self, f.name) + getattr(other, f.name) for f in fields(self)})

    def __mul__(self, factor: float) -> Usage:
        return Usage(**{f.name: getattr(self, f.name) * factor for f in fields(self)})


def parameter_bytes(parameters: Parameters, *, value_bytes: int, shards: int) -> float:
    """Weights on one of `shards` devices."""
    own = parameters.trained_bytes(value_bytes)
    return (parameters.frozen * value_bytes + parameters.trained * own) / shards


def optimizer_bytes(trained: int, *, moment_bytes: float, shards: int) -> float:
    """AdamW's moments on one of `shards` devices; frozen parameters have none."""
    return ADAMW_MOMENTS * trained * moment_bytes / shards


def gradient_bytes(trained: int, *, value_bytes: int, shards: int) -> float:
    """Gradients on one of `shards` devices, from the first micro-batch to the optimiser's step."""
    return trained * value_bytes / shards


def optimizer_step_bytes(parameters: Parameters, *, value_bytes: int, shards: int, stepping: Stepping) -> float:
    """What AdamW holds for a moment beside the moments."""
    if stepping == "together":
        return parameters.trained * value_bytes / shards
    return _STEP_COPIES[stepping] * min(parameters.largest_tensor, parameters.trained) * value_bytes / shards


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


def activation_bytes(
    model: Architecture, tokens: int, *, value_bytes: int, recompute: bool, adapted_inputs: int = 0
) -> int:
    """Of a forward and backward over `tokens` tokens. The layer in hand also has gradients of its activations.

    With `recompute` only the layers' inputs are kept, and one layer at a time is made again. `adapted_inputs`: see
    `Parameters`.
    """
    layer = layer_activation_bytes_per_token(model, value_bytes=value_bytes) + adapted_inputs * value_bytes
    kept = model.hidden * value_bytes if recompute else layer
    return tokens * (model.layers * kept + (2 if recompute else 1) * layer)


def logit_bytes(model: Architecture, positions: int, *, value_bytes: int) -> int:
    """Of `positions` positions that reach the vocabulary at once (at most `learner.logprob_chunk`)."""
    logits = positions * model.vocabulary
    return logits * (_FLOAT32_BYTES + value_bytes) + min(logits, _LOGITS_IN_HAND) * _FLOAT32_BYTES


def gathered_bytes(parameters: Parameters, *, value_bytes: int, gathered: float) -> float:
    """Weights that sharding puts together for a moment: two layers (one is fetched ahead) and what is outside the
    layers, in the computing dtype, and a layer's gradient in float32.

    `gathered`: the share of them that one device puts together; 0 where nothing is gathered, less than 1 where matrices
    or experts stay apart.
    """
    weights = 2 * parameters.largest_layer + parameters.outside_layers
    return gathered * (weights * value_bytes + parameters.largest_layer * _FLOAT32_BYTES)


def cast_bytes(parameters: Parameters, *, weight_bytes: int, value_bytes: int, shards: int, gathered: float) -> float:
    """Autocast keeps a narrow copy of every wide weight until the backward pass is over; sharding casts by layer."""
    if gathered:
        return 0
    sizes = ((parameters.frozen, weight_bytes), (parameters.trained, parameters.trained_bytes(weight_bytes)))
    return sum(count * value_bytes / shards for count, wide in sizes if value_bytes < wide)


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
    gathered: float | None = None,
    moment_bytes: float | None = None,
    stepping: Stepping = "together",
    offload: bool = False,
) -> Usage:
    """One device while a module makes its update: a micro-batch of `tokens`, `positions` of them before the vocabulary
    at once (0 for a critic). `weight_bytes`, `value_bytes` and `moment_bytes`: of one stored and one computed value,
    and of one of the optimiser's (None: as the weight). `gathered`: see `gathered_bytes`; by default all where there
    are several shards. With `offload` moments are here for the step alone, when activations are gone.
    """
    gathered = float(shards > 1) if gathered is None else gathered
    passes = (
        activation_bytes(
            model, tokens, value_bytes=value_bytes, recompute=recompute, adapted_inputs=parameters.adapted_inputs
        )
        + logit_bytes(model, positions, value_bytes=value_bytes)
        + gathered_bytes(parameters, value_bytes=value_bytes, gathered=gathered)
        + cast_bytes(parameters, weight_bytes=weight_bytes, value_bytes=value_bytes, shards=shards, gathered=gathered)
    )
    own = parameters.trained_bytes(weight_bytes)
    taken = optimizer_step_bytes(parameters, value_bytes=own, shards=shards, stepping=stepping)
    if offload:
        kept = own if moment_bytes is None else moment_bytes
        taken += optimizer_bytes(parameters.trained, moment_bytes=kept, shards=shards)
    resting = resting_usage(
        parameters, weight_bytes=weight_bytes, shards=shards, moment_bytes=moment_bytes, offload=offload
    )
    return resting + Usage(
        gradients=gradient_bytes(parameters.trained, value_bytes=own, shards=shards),
        activations=max(passes, taken),
    )


def resting_usage(
    parameters: Parameters, *, weight_bytes: int, shards: int, moment_bytes: float | None = None, offload: bool = False
) -> Usage:
    """One device while another module is at work: weights and moments stay (with `offload` on the host), gradients are
    gone.

    As much again is what `Learner.remember` keeps, for a step that may be taken back, and a checkpoint's copy.
    """
    kept = parameters.trained_bytes(weight_bytes) if moment_bytes is None else moment_bytes
    return Usage(
        parameters=parameter_bytes(parameters, value_bytes=weight_bytes, shards=shards),
        optimizer=0 if offload else optimizer_bytes(parameters.trained, moment_bytes=kept, shards=shards),
    )


def batch_bytes(model: Architecture, rows: int, tokens: int, *, carries_experts: bool) -> int:
    """A batch of `rows` rows, each as long as the longest: numbers a token, and the experts that an engine chose."""
    experts = 2 * model.layers * model.experts_per_token if carries_experts else 0
    return rows * tokens * (_BATCH_BYTES_PER_TOKEN + experts)


def publication_bytes(
    parameters: Parameters, *, weight_bytes: int, published_bytes: int, gathered: bool, holds: int
) -> float:
    """What the main rank holds while it publishes: one layer, whole and in the checkpoint's own terms, and `holds`
    bytes of what is written or sent at once."""
    layer = max(parameters.largest_layer, parameters.largest_tensor)
    return layer * ((weight_bytes if gathered else 0) + published_bytes) + min(
        holds, parameters.total * published_bytes
    )


def engine_usage(
    parameters_total: int, model: Architecture, *, tokens: int, value_bytes: int, tensor_parallel: int
) -> Usage:
    """One of an engine's `tensor_parallel` devices with room for `tokens` tokens of keys and values."""
    per_token = kv_bytes_per_token(model, value_bytes=value_bytes, tensor_parallel=tensor_parallel)
    return Usage(parameters=parameters_total * value_bytes / tensor_parallel, kv_cache=tokens * per_token)


def usable_bytes(memory_gib: float) -> float:
    """Of a device with `memory_gib` GiB, what a plan may use."""
    return memory_gib * GIB * (1.0 - RESERVE_SHARE)
