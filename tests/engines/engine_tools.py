"""Models, time limits and the engine's description that the tests of engines share."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedConfig, Qwen3Config, Qwen3MoeConfig

from agent.engines.client import HttpEngine

VOCABULARY = 96
MAX_CONTEXT = 2048  # seconds of decoding: what must happen in flight has the time to
MAX_SEQUENCES = 32
# A quiet machine needs half a minute, one that is busy with ten other things several. The start of a server counts
# towards the first test on it.
VLLM_READY_S = 900.0
VLLM_TEST_S = VLLM_READY_S + 600

_SHAPE = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "tie_word_embeddings": True,
    "max_position_embeddings": 4096,
    "initializer_range": 0.15,  # wide enough for logits that differ: a wrong cache must show
    "eos_token_id": None,
    "bos_token_id": None,
    "pad_token_id": None,
}


def config(kind: str, **shape: int) -> PreTrainedConfig:
    if kind == "moe":
        return Qwen3MoeConfig(**_SHAPE | shape, num_experts=8, num_experts_per_tok=2, moe_intermediate_size=32)
    if kind == "dense":
        return Qwen3Config(**_SHAPE | shape)
    return LlamaConfig(**_SHAPE | shape)


def make_model(
    folder: Path, kind: str, seed: int, *, nan: bool = False, eos: list[int] | None = None, **shape: int
) -> Path:
    """Save a model with random weights; `shape` overrides sizes."""
    torch.manual_seed(seed)
    settings = config(kind, **shape)
    settings.eos_token_id = eos
    model = AutoModelForCausalLM.from_config(settings)
    if nan:
        with torch.no_grad():
            model.get_input_embeddings().weight.fill_(float("nan"))
    model.save_pretrained(folder)
    return folder


@dataclass
class EngineUnderTest:
    """A running engine: its client, two snapshots (`first` is served as `version`), and what it promises."""

    client: HttpEngine
    first: Path
    second: Path
    broken: Path
    version: int
    max_context: int = MAX_CONTEXT
    max_sequences: int = MAX_SEQUENCES
    counts_reused_tokens: bool = True
    says_whose_fault: bool = True
    knows_vocabulary: bool = True
