"""The critic: the policy's architecture with a value head, and which of its parameters may move.

Source: SAO section "Frozen-attention critic": attention stays as the cold start left it, the experts are trained.
A dense model's MLP stands where experts would.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import nn

from learner.forward import CriticForward

HEAD_FILE = "value_head.safetensors"

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

TRAINED_KINDS = {
    "experts": frozenset({"experts", "head"}),
    "mlp": frozenset({"experts", "mlp", "head"}),
    "all": frozenset({"router", "norm", "attention", "experts", "mlp", "embedding", "head"}),
}
"""What each policy trains. The head is the critic's own value head; the router, the norms and the embeddings are
frozen unless everything is trained."""


class FreezingError(ValueError):
    """A freezing policy that would train nothing, or a parameter that no rule knows."""


def parameter_kind(name: str) -> str:
    """What a parameter is, from its dotted name: attention (linear attention included), experts, mlp, router, norm,
    embedding or head. A norm inside an attention module (`q_norm`) is attention; `post_attention_layernorm` is a norm.
    Raises `FreezingError` for a name that no rule knows: a guess would decide silently what is trained."""
    for kind, pattern in _KINDS:
        if pattern.search("." + name if kind != "head" else name):
            return kind
    raise FreezingError(f"no rule says what the parameter {name!r} is; add one to learner/critic.py")


def freeze(critic: nn.Module, trainable: str) -> list[str]:
    """Let only the parameters of the policy `trainable` ("experts" | "mlp" | "lora" | "all") move.

    Returns the names that are trained. On a dense model "experts" means its MLP. Raises `FreezingError` where the
    policy matches nothing but the head.
    """
    if trainable == "lora":
        return _add_lora(critic)
    kinds = {name: parameter_kind(name.removeprefix("body.")) for name, _ in critic.named_parameters()}
    trained = TRAINED_KINDS[trainable]
    if trainable == "experts" and "experts" not in kinds.values():
        trained = TRAINED_KINDS["mlp"]
    names = [name for name, kind in kinds.items() if kind in trained]
    if all(kinds[name] == "head" for name in names):
        raise FreezingError(f"critic_trainable={trainable!r} matches no parameter of this model beside the value head")
    for name, parameter in critic.named_parameters():
        parameter.requires_grad_(name in set(names))
    return names


def _add_lora(critic: Any) -> list[str]:
    try:
        from peft import LoraConfig, inject_adapter_in_model
    except ImportError as error:
        raise FreezingError("critic_trainable='lora' needs the package peft: pip install peft") from error
    linears = [n for n, m in critic.body.named_modules() if isinstance(m, nn.Linear) and ".mlp." in f".{n}"]
    linears = [name for name in linears if parameter_kind(name + ".weight") == "mlp"]
    if not linears:
        raise FreezingError("critic_trainable='lora' found no linear MLP layer; on a mixture of experts use 'experts'")
    inject_adapter_in_model(LoraConfig(r=16, lora_alpha=32, target_modules=linears), critic.body)
    names = []
    for name, parameter in critic.named_parameters():
        parameter.requires_grad_("lora_" in name or name.startswith("head."))
        if parameter.requires_grad:
            names.append(name)
    return names


def new_critic(body: Any) -> CriticForward:
    """A critic on `body` (taken over, not copied), its head at zero: it starts by predicting 0."""
    return CriticForward(body, body.config.get_text_config().hidden_size)


def save_critic(critic: CriticForward, folder: Path) -> None:
    """Body in Hugging Face format, the head beside it."""
    folder.mkdir(parents=True, exist_ok=True)
    body: Any = critic.body
    body.save_pretrained(folder)
    save_file({k: v.detach().contiguous().cpu() for k, v in critic.head.state_dict().items()}, folder / HEAD_FILE)


def load_head(critic: CriticForward, folder: Path) -> None:
    """Read the head that `save_critic` wrote."""
    critic.head.load_state_dict(load_file(folder / HEAD_FILE))


def gradient_norm(parameters: list[nn.Parameter]) -> torch.Tensor:
    """The 2-norm of the gradients, 0 if there are none."""
    norms = [p.grad.detach().float().norm() for p in parameters if p.grad is not None]
    return torch.stack(norms).norm() if norms else torch.zeros(())
