"""Loading and saving of whole models in Hugging Face format."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable, Iterator
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn
from torch.utils.checkpoint import checkpoint
from transformers import AutoModel, AutoModelForCausalLM
from transformers.core_model_loading import revert_weight_conversion
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_utils import remove_tied_weights_from_state_dict

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


_LAYER = re.compile(r".*?\.\d+\.")  # up to the first number in a name: "model.layers.3."


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


def checkpoint_tensors(model: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """Name and tensor of every weight, as `save_policy_model` would write them, on the device where they are.

    One layer at a time is brought to the checkpoint's format (fused experts are taken apart), so that no second model
    is needed in memory. The tensors may be the model's own: they hold until its next update.
    """
    weights = remove_tied_weights_from_state_dict(model.state_dict(), model)
    for _, layer in groupby(weights.items(), key=lambda item: _layer_of(item[0])):
        yield from revert_weight_conversion(model, dict(layer)).items()


def _layer_of(name: str) -> str:
    found = _LAYER.match(name)
    return found.group() if found else ""
