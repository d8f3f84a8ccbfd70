"""Loading and saving of whole models in Hugging Face format."""

from __future__ import annotations

import shutil
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn
from torch.utils.checkpoint import checkpoint
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM
from transformers.modeling_layers import GradientCheckpointingLayer

from learner.config import ModelConfig, RecipeError
from learner.model.layers import whole_layers, write_snapshot
from learner.parallel.layout import Layout
from learner.parallel.sharding import check_layout, distributed_config

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


def load_policy_model(path: Path, config: ModelConfig, layout: Layout | None = None) -> Any:
    """A causal LM in `config.dtype`, dropout off. Raises `RecipeError` naming `model.path` if nothing is there.

    With a `layout` that cuts weights each rank reads its own part only, and a layout that does not suit the model is
    a `RecipeError` naming the key.
    """
    return _load(AutoModelForCausalLM, path, config, layout)


def load_body(path: Path, config: ModelConfig, layout: Layout | None = None) -> Any:
    """The same without the vocabulary's head: what a critic stands on."""
    return _load(AutoModel, path, config, layout)


def _load(kind: Any, path: Path, config: ModelConfig, layout: Layout | None) -> Any:
    if not (path / "config.json").exists():
        raise RecipeError(
            f"model.path: there is no model at {path} (config.json is missing). Give the folder of a model in Hugging "
            "Face format, or `model.tiny` to have one made"
        )
    options: dict[str, Any] = {"attn_implementation": config.attention_implementation}
    if config.experts_implementation and "moe" in (path / "config.json").read_text().lower():
        options["experts_implementation"] = config.experts_implementation
    if layout is not None and layout.cut:
        check_layout(layout, AutoConfig.from_pretrained(path, trust_remote_code=config.trust_remote_code))
        options["distributed_config"] = distributed_config(layout, computes_in=config.computes_in)
    model = kind.from_pretrained(
        path, dtype=getattr(torch, config.dtype), trust_remote_code=config.trust_remote_code, **options
    )
    if config.compile:
        compile_layers(model)
    if config.recompute_layers:
        recompute_layers(model)
    return model.eval()  # dropout off: every forward here is compared with the engine's


def compile_layers(model: nn.Module, backend: str = "inductor") -> int:
    """Let `torch.compile` make each decoder layer's kernels at its first call; returns how many layers there are.

    A layer at a time, because all of a kind share one compilation, and what stands around them (gathering of weights
    that are cut, recomputation, the choice of tokens) stays as it is. Numbers are the same up to the order of sums.
    Lengths are symbols from the start: each micro-batch has its own, and would be compiled anew.
    """
    layers = _layers(model)
    if not layers:
        raise RecipeError("model.compile: this architecture has no layers that are known here")
    for layer in layers:
        layer.forward = torch.compile(layer.forward, dynamic=True, backend=backend)
    return len(layers)


def _layers(model: nn.Module) -> list[nn.Module]:
    """The decoder layers."""
    return [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]


def recompute_layers(model: nn.Module) -> int:
    """Let every decoder layer keep only its input for the backward pass; returns how many layers there are.

    The library's own gradient checkpointing does nothing in eval mode, which is the mode of every forward here.
    Gradients stay the same bit for bit.
    """
    layers = _layers(model)
    if not layers:
        raise RecipeError("model.recompute_layers: this architecture has no layers that can be computed again")
    for layer in layers:
        layer.forward = partial(_recomputed, layer.forward)
    return len(layers)


def _recomputed(forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    if not torch.is_grad_enabled():
        return forward(*args, **kwargs)
    return checkpoint(forward, *args, use_reentrant=False, **kwargs)


def save_policy_model(
    model: Any, source: Path, target: Path, *, main: bool = True, dtype: torch.dtype | None = None
) -> None:
    """Weights (in `dtype`) and configuration of `model`, and the tokenizer files of `source`: a folder that works
    anywhere. Where ranks hold parts of the weights, all of them must call this; the `main` one writes."""
    weights = whole_layers(model, wanted=main, dtype=dtype)
    if main:
        write_policy(model, weights, source, target, dtype=dtype)
    else:
        deque(weights, maxlen=0)  # to take part


def write_policy(
    model: Any, weights: Iterable[tuple[str, torch.Tensor]], source: Path, target: Path, *, dtype: torch.dtype | None
) -> None:
    """The same from `weights` that are whole, by the main process alone."""
    write_snapshot(model, weights, target, dtype=dtype)
    copy_tokenizer(source, target)


def copy_tokenizer(source: Path, target: Path) -> None:
    """The files of `source` that a renderer of prompts reads, into `target`."""
    for name in _TOKENIZER_FILES:
        if (source / name).exists() and source.resolve() != target.resolve():
            shutil.copy(source / name, target / name)


def checkpoint_tensors(model: Any, dtype: torch.dtype | None = None) -> Iterator[tuple[str, torch.Tensor]]:
    """Name and tensor of every weight, as `save_policy_model` would write them, on the device where they are.

    One layer at a time is brought to the checkpoint's format, so that no second model is needed in memory. The tensors
    may be the model's own: they hold until its next update.
    """
    return whole_layers(model, dtype=dtype)
