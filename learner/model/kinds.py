"""What a parameter is, from its name: attention, experts, router, head."""

from __future__ import annotations

import re

from torch import nn

# Ordered: the first pattern that matches a parameter's dotted name says what it is.
_KINDS: tuple[tuple[str, re.Pattern[str]], ...] = (
    ("attention", re.compile(r"\.(self_attn|linear_attn|attn|attention|self_attention|mixer)\.")),
    ("router", re.compile(r"\.(gate|router|shared_expert_gate)\.(weight|bias|e_score_correction_bias)$|\.router\.")),
    ("norm", re.compile(r"(^|[._])(layer)?norm\w*\.(weight|bias)$|layernorm\.(weight|bias)$|\.ln_\w+\.")),
    ("experts", re.compile(r"\.(experts|shared_experts?)\.")),
    ("mlp", re.compile(r"\.(mlp|feed_forward|ffn|block_sparse_moe)\.")),
    ("embedding", re.compile(r"(embed_tokens|wte|wpe|embeddings?)\.")),
    ("head", re.compile(r"^(head|lm_head)\.")),
)


class FreezingError(ValueError):
    """A freezing policy that would train nothing, or a parameter that no rule knows."""


def parameter_kind(name: str) -> str:
    """What a parameter is, from its dotted name: attention (linear attention included), experts, mlp, router, norm,
    embedding or head. A norm inside an attention module (`q_norm`) is attention; `post_attention_layernorm` is a norm.
    Raises `FreezingError` for a name that no rule knows: a guess would decide silently what is trained."""
    for kind, pattern in _KINDS:
        if pattern.search("." + name if kind != "head" else name):
            return kind
    raise FreezingError(f"no rule says what the parameter {name!r} is; add one to learner/model/kinds.py")


def kinds_of(module: nn.Module) -> dict[str, list[nn.Parameter]]:
    """The parameters of a module that are trained, by kind; what no rule knows is "other"."""
    found: dict[str, list[nn.Parameter]] = {}
    for name, parameter in module.named_parameters():
        if parameter.requires_grad:
            try:
                kind = parameter_kind(name.removeprefix("body."))
            except FreezingError:
                kind = "other"
            found.setdefault(kind, []).append(parameter)
    return found
