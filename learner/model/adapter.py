"""A LoRA adapter in a model: put there by peft, switched off for a while, added to the weights, and as peft's files.

    W x  ──▶  W x + alpha / rank x B (A x)        W frozen, A and B in float32, B zero at the start

So a policy with a fresh adapter is its base model, and the same model without it is at hand at any time.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from safetensors.torch import save_file
from torch import Tensor, nn

from learner.config import AdapterConfig, RecipeError
from learner.faults import LearnerFault
from learner.model.finite import first_not_finite
from learner.model.kinds import parameter_kind

_NAME = "default"  # peft's for the only one
_KINDS = {"attention": {"attention"}, "linear": {"attention", "mlp", "experts"}}
_WRAPPED, _ADDED = ".base_layer", ".lora_"
_PREFIX = "base_model.model."  # of every name in peft's files


def inject(
    model: nn.Module, rank: int, alpha: float, *, modules: Sequence[str] = (), parameters: Sequence[str] = ()
) -> None:
    """Put an adapter on linear layers and fused `parameters`, by name; nothing else of `model` is trained then.

    Raises `RecipeError` where peft is missing.
    """
    try:
        from peft import LoraConfig, inject_adapter_in_model
    except ImportError as error:
        raise RecipeError(
            "adapters (model.policy_adapter, critic_trainable: lora) need peft: pip install peft"
        ) from error
    model.requires_grad_(False)
    chosen: dict[str, Any] = {
        "r": rank,
        "lora_alpha": alpha,
        "target_modules": list(modules),
        "target_parameters": list(parameters) or None,
    }
    config = LoraConfig(**chosen)
    inject_adapter_in_model(config, model, _NAME)
    for name, parameter in model.named_parameters():
        if _ADDED in name:  # peft makes it in the base's dtype, where updates of 1e-6 are lost
            parameter.data = parameter.data.float()


def add_adapter(model: nn.Module, config: AdapterConfig) -> list[str]:
    """Put the adapter of a recipe into a causal LM; the names of its parameters, which alone are trained.

    Raises `RecipeError`, naming the key, for targets that the model has not.
    """
    linears = [name for name, module in model.named_modules() if isinstance(module, nn.Linear)]
    modules, parameters = _linears(linears, config.targets), _experts(model) if config.experts else []
    inject(model, config.rank, config.alpha, modules=_endings(modules, linears), parameters=parameters)
    return [name for name, parameter in model.named_parameters() if parameter.requires_grad]


def _linears(linears: Sequence[str], targets: str | tuple[str, ...]) -> list[str]:
    kinds = {name: parameter_kind(f"{name}.weight") for name in linears}
    if isinstance(targets, str):
        if not (found := [name for name, kind in kinds.items() if kind in _KINDS[targets]]):
            raise RecipeError(
                f"model.policy_adapter.targets {targets!r}: this model has no such linear layers; name them"
            )
        return found
    found = []
    for target in targets:
        own = [name for name in kinds if f".{name}".endswith(f".{target}")]
        wrong = [name for name in own if kinds[name] not in _KINDS["linear"]]
        if wrong or not own:
            why = (
                f"{wrong[0]} is its {kinds[wrong[0]]}, which gets no adapter" if wrong else "no layer's name ends on it"
            )
            raise RecipeError(f"model.policy_adapter.targets: {target!r} does not suit this model: {why}")
        found += own
    return found


def _endings(names: Sequence[str], others: Sequence[str]) -> list[str]:
    """The last parts of `names`, where they say as much as the names do: what people look for in peft's file."""
    endings = {name.rpartition(".")[2] for name in names}
    return sorted(endings if all(n in names or n.rpartition(".")[2] not in endings for n in others) else names)


def _experts(model: nn.Module) -> list[str]:
    fused = [n for n, p in model.named_parameters() if p.ndim == 3 and parameter_kind(n) == "experts"]
    found = sorted({".".join(name.split(".")[-2:]) for name in fused})
    if not found:
        raise RecipeError("model.policy_adapter.experts: this model has no fused experts; write false")
    return found


def adapted(module: nn.Module) -> list[Any]:
    """peft's layers in `module`, which each hold a part of the adapter; [] without one."""
    return [part for part in module.modules() if hasattr(part, "lora_A")]


@contextlib.contextmanager
def switched_off(model: nn.Module) -> Iterator[None]:
    """Within it `model` is its base. Not for forwards with gradients."""
    parts = adapted(model)
    for part in parts:
        part.enable_adapters(False)
    try:
        yield
    finally:
        for part in parts:
            part.enable_adapters(True)


class WithoutAdapter(nn.Module):
    """A policy's forward with its adapter switched off: the policy that RL began from, at no memory of its own."""

    def __init__(self, forward: Any) -> None:
        super().__init__()
        self._with = (forward,)  # not as a module: it is the policy's

    def forward(self, *arguments: Any, **named: Any) -> Any:
        """As the policy's own."""
        [own] = self._with
        with switched_off(own.model):
            return own(*arguments, **named)


def kept(module: nn.Module, state: dict[str, Tensor]) -> dict[str, Tensor]:
    """Of a module's `state`, what a checkpoint of it holds: all, or what is trained where there is an adapter.

    The rest never moves, and is read from the model's folder again.
    """
    return {name: tensor for name, tensor in state.items() if tensor.requires_grad} if adapted(module) else state


def plain_name(name: str) -> str | None:
    """What a parameter is called without the adapter; None for one of the adapter's own."""
    return None if _ADDED in name else name.replace(_WRAPPED, "")


def additions(model: nn.Module) -> dict[str, list[Any]]:
    """By the plain name of a weight, peft's layers whose `get_delta_weight` is added to it."""
    found: dict[str, list[Any]] = {}
    for name, part in model.named_modules():
        if hasattr(part, "lora_A"):
            found.setdefault(f"{plain_name(name)}.{getattr(part, 'parameter_name', 'weight')}", []).append(part)
    return found


def merged(weight: Tensor, parts: Sequence[Any]) -> Tensor:
    """`weight` and what the adapter adds to it, in float32 where there is something to add."""
    for part in parts:
        weight = weight.float() + part.get_delta_weight(_NAME).detach().float()
    return weight


def write_adapter(model: Any, base: Path, target: Path) -> None:
    """Write the adapter of `model` in peft's form into the folder `target`; `base`: the folder of the base model.

    Raises `LearnerFault` where it is not finite.
    """
    from peft import get_peft_model_state_dict

    state: dict[str, Tensor] = get_peft_model_state_dict(model, adapter_name=_NAME, save_embedding_layers=False)
    if bad := first_not_finite(state.items()):
        raise LearnerFault(
            f"the adapter's weights {bad} are not finite, so they are neither published nor exported. The last "
            "checkpoint holds finite ones: run the same command again to go on from there, with a lower learning rate "
            "if it happens again"
        )
    config = copy.deepcopy(model.peft_config[_NAME])
    config.base_model_name_or_path, config.inference_mode, config.task_type = str(base.resolve()), True, "CAUSAL_LM"
    target.mkdir(parents=True, exist_ok=True)
    config.save_pretrained(target)
    tensors = {_PREFIX + name: tensor.detach().cpu().contiguous() for name, tensor in state.items()}
    save_file(tensors, target / "adapter_model.safetensors", metadata={"format": "pt"})
