"""The recipe's model without its weights: built on the meta device, so that only shapes are there, and counted."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterator
from importlib import resources
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM
from transformers.modeling_layers import GradientCheckpointingLayer

from learner.config import Recipe, RecipeError
from learner.model.adapter import adapted
from learner.model.critic import freeze, new_critic
from learner.model.tiny import build_config
from learner.plan.memory import Architecture, Parameters


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
    """Trained, frozen, of the largest decoder layer, outside all layers, of the largest tensor; tied weights count
    once."""
    numbers = {id(p): p.numel() for p in module.parameters()}
    trained = sum(p.numel() for p in module.parameters() if p.requires_grad)
    layers = [sum(p.numel() for p in layer.parameters()) for layer in _layers(module)]
    total = sum(numbers.values())
    embeddings: Any = [getattr(module, f"get_{end}_embeddings", lambda: None)() for end in ("input", "output")]
    tied = embeddings[0] is not None and embeddings[1] is not None and embeddings[0].weight is embeddings[1].weight
    again = embeddings[0].weight.numel() if tied else 0
    largest = max(numbers.values(), default=0)
    inputs = max((sum(part.in_features for part in adapted(layer)) for layer in _layers(module)), default=0)
    return Parameters(trained, total - trained, max(layers, default=0), total - sum(layers) + again, largest, inputs)


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


def active_parameters(total: int, model: Architecture) -> int:
    """Parameters that one token passes: without the experts that it is not sent to."""
    unused = max(model.experts - model.experts_per_token, 0)
    return total - model.layers * unused * 3 * model.hidden * model.mlp_width
