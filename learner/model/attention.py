"""Attention of a model whose tokens are cut into parts: every other layer looks at one token at a time.

Around transformers' own implementation (`model.attention_implementation`) the parts of a row are exchanged for heads:
inside it each rank has the whole row and its share of the heads.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from learner.config import RecipeError
from learner.parallel.context import Parts

ATTENDS_TO_TOKENS = frozenset({"full_attention", "sliding_attention", "chunked_attention"})
DEPENDS_ON_THE_LONGEST = frozenset({"dynamic", "longrope"})

# What stands under each name that was registered here. A name says nothing of it, because transformers reads "sdpa" or
# "flash" in a name as a request to look for that library.
_REGISTERED: dict[str, tuple[str, Parts]] = {}


def attend_in_parts(model: Any, parts: Parts) -> None:
    """Let `model` (a transformers model) attend over whole rows when it is called with its part of them.

    Raises `RecipeError`, naming the key, for a model or an implementation that cannot be cut so.
    """
    _refuse(model, parts)
    base = implementation_of(model)
    name = next((name for name, found in _REGISTERED.items() if found == (base, parts)), "")
    if not name:
        name = f"learner_parts_{len(_REGISTERED)}"
        AttentionInterface.register(name, _attention(base, parts))
        AttentionMaskInterface.register(name, _mask(base, parts))
        _REGISTERED[name] = base, parts
    model.set_attn_implementation(name)


def implementation_of(model: Any) -> str:
    """The implementation that attends in the end, in parts or not."""
    name: str = model.config._attn_implementation
    return _REGISTERED[name][0] if name in _REGISTERED else name


def _refuse(model: Any, parts: Parts) -> None:
    config = model.config.get_text_config()
    heads, key = config.num_attention_heads, f"hardware.context: {parts.size} parts"
    if heads % parts.size:
        raise RecipeError(
            f"{key} do not divide the model's {heads} attention heads: around attention each part takes its share of "
            f"them. Take one of {', '.join(str(n) for n in range(1, heads + 1) if heads % n == 0)}"
        )
    kinds = set(getattr(config, "layer_types", None) or ()) - ATTENDS_TO_TOKENS
    if kinds:
        raise RecipeError(
            f"{key}: the model has layers of {', '.join(sorted(kinds))}, whose state runs through the whole row; "
            "only attention can be cut. Write hardware.context=1"
        )
    rope = (getattr(config, "rope_parameters", None) or {}).get("rope_type")
    if rope in DEPENDS_ON_THE_LONGEST:
        raise RecipeError(
            f"{key}: the model's positions ({rope}) depend on how long its input is, and a part is shorter than its "
            "row. Write hardware.context=1"
        )
    if any(hasattr(module, "sinks") for module in model.modules()) or not model._can_set_attn_implementation():
        raise RecipeError(
            f"{key}: the attention of {type(model).__name__} does more than transformers' interface does (sinks, or "
            "code of its own). Write hardware.context=1"
        )
    base = implementation_of(model)
    if base != "eager" and (base not in ALL_ATTENTION_FUNCTIONS or base not in ALL_MASK_ATTENTION_FUNCTIONS):
        raise RecipeError(
            f"model.attention_implementation: {base!r} cannot be cut into parts (hardware.context={parts.size}); take "
            "sdpa, eager or flash_attention_2"
        )


class _ShareOfHeads:
    """An attention module as it looks to an implementation that is given some of its heads."""

    def __init__(self, module: Any, base: str, groups: int) -> None:
        self._module = module
        self.num_key_value_groups = groups
        self.config: Any = copy.copy(module.config)
        self.config._attn_implementation_internal = base

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)


def _attention(base: str, parts: Parts) -> Callable[..., tuple[Tensor, None]]:
    def attend(
        module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **options: Any
    ) -> tuple[Tensor, None]:
        """[B,H,t,D] of this rank's tokens to [B,t,H,D]."""
        implementation: Any = ALL_ATTENTION_FUNCTIONS.get(base)
        if base == "eager":  # each architecture's own
            implementation = sys.modules[type(module).__module__].eager_attention_forward
        if not parts.apart:
            share = _ShareOfHeads(module, base, query.shape[1] // key.shape[1])
            return implementation(share, query, key, value, attention_mask, **options)[0], None
        if options.get("position_bias") is not None or (attention_mask is not None and attention_mask.shape[1] != 1):
            raise RecipeError("hardware.context: this model's attention has a bias for each head; write 1")
        options.pop("position_ids", None)  # this rank's; the implementation sees the whole row
        device = query.device.type
        if torch.is_autocast_enabled(device):  # what attention would cast to is what need be sent
            query, key, value = (t.to(torch.get_autocast_dtype(device)) for t in (query, key, value))
        repeats = parts.heads_repeated(query.shape[1], key.shape[1])
        if repeats > 1:
            key, value = (t.repeat_interleave(repeats, dim=1) for t in (key, value))
        query, key, value = parts.heads_for_tokens(query, key, value)
        share = _ShareOfHeads(module, base, query.shape[1] // key.shape[1])
        seen, _ = implementation(share, query, key, value, attention_mask, **options)
        return parts.tokens_for_heads(seen), None

    return attend


def _mask(base: str, parts: Parts) -> Callable[..., Any]:
    def mask_of(*, q_length: int, kv_length: int, **options: Any) -> Any:
        """The mask of whole rows, whose part the model has seen."""
        times = parts.size if parts.apart else 1
        return ALL_MASK_ATTENTION_FUNCTIONS[base](q_length=q_length * times, kv_length=kv_length * times, **options)

    return mask_of
