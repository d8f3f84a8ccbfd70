"""Loading and saving of whole models in Hugging Face format."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn
from torch.utils.checkpoint import checkpoint
from transformers import AutoModel, AutoModelForCausalLM
from transformers.modeling_layers import GradientCheckpointingLayer

from learner.config import ModelConfig, RecipeError

# Snapshots are written every step: a bar for each would drown the run's own display.
transformers.utils.logging.disable_progress_bar()

_TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    "generation_config.json",
    "vocab.json",
    "merges.txt",
    "added_tokens.json",
)


def load_policy_model(path: Path, config: ModelConfig) -> Any:
    """A causal LM in `config.dtype`, dropout off. Raises `RecipeError` naming `model.path` if nothing is there."""
    return _load(AutoModelForCausalLM, path, config)


def load_body(path: Path, config: ModelConfig) -> Any:
    """The same without the vocabulary's head: what a critic stands on."""
    return _load(AutoModel, path, config)


def _load(kind: Any, path: Path, config: ModelConfig) -> Any:
    if not (path / "config.json").exists():
        raise RecipeError(
            f"model.path: there is no model at {path} (config.json is missing). Give the folder of a model in Hugging "
            "Face format, or `model.tiny` to have one made"
        )
    options: dict[str, Any] = {"attn_implementation": config.attention_implementation}
    if config.experts_implementation and "moe" in (path / "config.json").read_text().lower():
        options["experts_implementation"] = config.experts_implementation
    model = kind.from_pretrained(
        path, dtype=getattr(torch, config.dtype), trust_remote_code=config.trust_remote_code, **options
    )
    if config.recompute_layers:
        recompute_layers(model)
    return model.eval()  # dropout off: every forward here is compared with the engine's


def recompute_layers(model: nn.Module) -> int:
    """Let every decoder layer keep only its input for the backward pass; returns how many layers there are.

    The library's own gradient checkpointing does nothing in eval mode, which is the mode of every forward here.
    Gradients stay the same bit for bit.
    """
    layers = [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]
    if not layers:
        raise RecipeError("model.recompute_layers: this architecture has no layers that can be computed again")
    for layer in layers:
        layer.forward = partial(_recomputed, layer.forward)
    return len(layers)


def _recomputed(forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    if not torch.is_grad_enabled():
        return forward(*args, **kwargs)
    return checkpoint(forward, *args, use_reentrant=False, **kwargs)


def save_policy_model(model: Any, source: Path, target: Path) -> None:
    """Weights and configuration of `model`, and the tokenizer files of `source`: a folder that works anywhere."""
    target.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(target)
    for name in _TOKENIZER_FILES:
        if (source / name).exists() and source.resolve() != target.resolve():
            shutil.copy(source / name, target / name)
