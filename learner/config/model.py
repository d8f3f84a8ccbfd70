"""The model: where it comes from, and how it is computed."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import model_validator

from learner.config.adapter import AdapterConfig
from learner.config.section import Section


class TinyModelConfig(Section):
    """A model made on the spot: Qwen3-MoE (`experts` > 0) or dense Qwen3, with its own BPE tokenizer."""

    vocab_size: int = 384
    hidden_size: int = 64
    layers: int = 2
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 16
    experts: int = 8
    experts_per_token: int = 2
    expert_width: int = 64
    init_std: float = 0.05
    max_context: int = 1024


class ModelConfig(Section):
    """`path`: a folder in Hugging Face format (weights, config, tokenizer, chat template); or else `tiny`.

    Exactly one of the two. `dtype` is the dtype of the trained weights, `compute_dtype` that of the forwards (None:
    the same); updates of 1e-6 are lost in bfloat16, so large runs keep float32 weights and compute in bfloat16.
    `experts_implementation` and `attention_implementation` are transformers' own names. With `recompute_layers` a
    layer's activations are made again in the backward pass. `compile`: each layer is compiled by `torch.compile`, which
    takes minutes at the start and is meant for GPUs. `architecture`: a name in recipes/models, or a folder with a
    config.json, from which `learner.plan` knows the model before its weights are there. `policy_adapter`: the policy is
    this model, frozen, and a LoRA adapter in float32.
    """

    path: Path | None = None
    tiny: TinyModelConfig | None = None
    architecture: str | None = None
    dtype: Literal["float32", "bfloat16"] = "float32"
    compute_dtype: Literal["float32", "bfloat16"] | None = None
    recompute_layers: bool = False
    compile: bool = False
    attention_implementation: str = "sdpa"
    experts_implementation: str | None = "grouped_mm"
    trust_remote_code: bool = False
    policy_adapter: AdapterConfig | None = None

    @model_validator(mode="after")
    def _one_source(self) -> ModelConfig:
        if (self.path is None) == (self.tiny is None):
            raise ValueError("give either `path` (an existing model) or `tiny` (a model made here), not both or none")
        return self

    @property
    def computes_in(self) -> Literal["float32", "bfloat16"]:
        """The dtype of the forwards."""
        return self.compute_dtype or self.dtype
