"""The critic: the policy's architecture with a value head, and which of its parameters may move.

Source: SAO section "Frozen-attention critic": attention stays as the cold start left it, the experts are trained.
A dense model's MLP stands where experts would.
"""

from __future__ import annotations

from collections import deque
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import nn

from learner.config import ModelConfig, RecipeError
from learner.model.adapter import inject
from learner.model.forward import CriticForward
from learner.model.kinds import FreezingError, parameter_kind
from learner.model.layers import whole, whole_layers, write_snapshot
from learner.model.loading import load_body
from learner.parallel.layout import Layout

HEAD_FILE = "value_head.safetensors"
_CRITIC_RANK, _CRITIC_ALPHA = 16, 32.0

TRAINED_KINDS = {
    "experts": frozenset({"experts", "head"}),
    "mlp": frozenset({"experts", "mlp", "head"}),
    "all": frozenset({"router", "norm", "attention", "experts", "mlp", "embedding", "head"}),
}
"""What each policy trains. The head is the critic's own value head; the router, the norms and the embeddings are
frozen unless everything is trained."""


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


def freeze_router(policy: nn.Module) -> list[str]:
    """Let no router of a policy's model move; returns their names. Raises `RecipeError` for a model without one."""
    routers = {name: p for name, p in policy.named_parameters() if parameter_kind(name) == "router"}
    if not routers:
        raise RecipeError("learner.freeze_router: this model has no router; write false")
    for parameter in routers.values():
        parameter.requires_grad_(False)
    return list(routers)


def _add_lora(critic: Any) -> list[str]:
    linears = [n for n, m in critic.body.named_modules() if isinstance(m, nn.Linear) and ".mlp." in f".{n}"]
    linears = [name for name in linears if parameter_kind(name + ".weight") == "mlp"]
    if not linears:
        raise FreezingError("critic_trainable='lora' found no linear MLP layer; on a mixture of experts use 'experts'")
    inject(critic.body, _CRITIC_RANK, _CRITIC_ALPHA, modules=linears)
    for parameter in critic.head.parameters():
        parameter.requires_grad_(True)
    return [name for name, parameter in critic.named_parameters() if parameter.requires_grad]


def new_critic(body: Any) -> CriticForward:
    """A critic on `body` (taken over, not copied), its head at zero: it starts by predicting 0."""
    return CriticForward(body, body.config.get_text_config().hidden_size)


def save_critic(critic: CriticForward, folder: Path, *, main: bool = True) -> None:
    """Body in Hugging Face format, the head beside it. Where ranks hold parts of the weights, all of them must call
    this; the `main` one writes."""
    body: Any = critic.body
    weights = whole_layers(body, wanted=main)
    head = {name: whole(tensor.detach()) for name, tensor in critic.head.state_dict().items()}
    if main:
        write_snapshot(body, weights, folder)
        save_file({name: tensor.contiguous().cpu() for name, tensor in head.items()}, folder / HEAD_FILE)
    else:
        deque(weights, maxlen=0)  # to take part


def load_head(critic: CriticForward, folder: Path) -> None:
    """Read the head that `save_critic` wrote."""
    critic.head.load_state_dict(load_file(folder / HEAD_FILE))


def load_critic(
    policy_folder: Path, critic_folder: Path, config: ModelConfig, layout: Layout | None = None
) -> CriticForward:
    """The pretrained critic, or a fresh one on the policy's body if there was no value pretraining."""
    if not (critic_folder / "config.json").exists():
        return new_critic(load_body(policy_folder, config, layout))
    critic = new_critic(load_body(critic_folder, config, layout))
    load_head(critic, critic_folder)
    return critic


def gradient_norm(parameters: list[nn.Parameter]) -> torch.Tensor:
    """The 2-norm of the gradients, 0 if there are none."""
    norms = [p.grad.detach().float().norm() for p in parameters if p.grad is not None]
    return torch.stack(norms).norm() if norms else torch.zeros(())
