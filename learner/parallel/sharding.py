"""A model whose weights are cut over processes: transformers cuts it while it loads, and what else that changes.

Accelerate keeps launch, devices, ranks and trackers; it does not wrap such a model. Gradients are reduced by the model
itself, in every micro-batch: kept whole until the last one, they would take as much memory on each rank as in one
process.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from accelerate import Accelerator
from torch import distributed, nn
from torch.distributed.fsdp import FSDPModule, register_fsdp_forward_method
from torch.distributed.tensor import DTensor
from transformers.distributed import DistributedConfig

from learner.config import RecipeError
from learner.parallel.layout import Layout


def distributed_config(layout: Layout, *, computes_in: str) -> DistributedConfig:
    """The layout in transformers' terms. Ranks that share a row's tokens hold different parts of the weights too."""
    return DistributedConfig(
        fsdp_size=layout.fsdp * layout.context,
        tp_size=layout.tensor,
        ep_size=layout.experts,
        dp_replicate_size=layout.replicate,
        fsdp_mixed_precision=computes_in == "bfloat16",
    )


def check_layout(layout: Layout, config: Any) -> None:
    """Raise `RecipeError`, naming the key, where a model of this transformers configuration cannot be cut so."""
    text = config.get_text_config()
    experts = getattr(text, "num_experts", None) or getattr(text, "num_local_experts", None) or 0
    if layout.experts > 1 and not experts:
        raise RecipeError(f"hardware.ep {layout.experts}: this model ({text.model_type}) has no experts; set it to 1")
    if experts and experts % layout.experts:
        raise RecipeError(f"hardware.ep {layout.experts} does not divide the model's {experts} experts")
    sizes = {
        "attention heads": text.num_attention_heads,
        "key and value heads": getattr(text, "num_key_value_heads", None) or text.num_attention_heads,
        "MLP columns": getattr(text, "moe_intermediate_size" if experts else "intermediate_size", 0),
    }
    for what, size in sizes.items():
        if size % layout.tensor:
            raise RecipeError(f"hardware.tp {layout.tensor} does not divide the model's {size} {what}")
    if layout.tensor > 1 and not getattr(text, "base_model_tp_plan", None):
        raise RecipeError(f"hardware.tp {layout.tensor}: transformers has no tensor plan for {text.model_type}")
    if layout.experts > 1 and not getattr(text, "base_model_ep_plan", None):
        raise RecipeError(f"hardware.ep {layout.experts}: transformers has no expert plan for {text.model_type}")


def enter_through_root(module: nn.Module, root: nn.Module) -> None:
    """Let `module.forward`, which uses parts of `root` one by one, count as a forward of `root`.

    FSDP2 fetches and frees weights in hooks around forwards, and the outermost of them sets up all others. Without
    this the parts would each take themselves for the outermost. A `root` that FSDP does not hold is left alone.
    """
    if not isinstance(root, FSDPModule):
        return
    name = "forward_of_parts"
    setattr(root, name, module.forward)
    register_fsdp_forward_method(root, name)
    module.forward = getattr(root, name)


def compute_narrow(module: nn.Module, accelerator: Accelerator) -> None:
    """Let `module` compute in the accelerator's precision where only its matrices are cut; FSDP2 casts by itself."""
    if any(isinstance(part, FSDPModule) for part in module.modules()):
        return
    forward = module.forward

    def narrow(*arguments: Any, **named: Any) -> Any:
        with accelerator.autocast():
            return forward(*arguments, **named)

    module.forward = narrow


def release_gathered(module: nn.Module) -> None:
    """Let go of whole weights that a forward without a backward pass has left gathered: they would go stale."""
    for part in module.modules():
        if isinstance(part, FSDPModule):
            part.reshard()


def by_mesh(parameters: Iterable[nn.Parameter]) -> list[dict[str, Any]]:
    """Groups for an optimiser: its fused loops take no tensors of different meshes together."""
    groups: dict[Any, list[nn.Parameter]] = {}
    for parameter in parameters:
        mesh = parameter.device_mesh if isinstance(parameter, DTensor) else None
        groups.setdefault(mesh, []).append(parameter)
    return [{"params": group} for group in groups.values()]


@contextlib.contextmanager
def gradients_aside(parameters: Iterable[nn.Parameter]) -> Iterator[None]:
    """Let a backward pass start from no gradient in whole parameters, and add what was there before to what it gives.

    Under tensor parallelism a hook of transformers' adds up over ranks what stands in `.grad` after each backward
    pass: what micro-batches before have left there would be counted once more for every rank.
    """
    before = [(p, p.grad) for p in parameters if p.grad is not None and not isinstance(p, DTensor)]
    for parameter, _ in before:
        parameter.grad = None
    yield
    for parameter, gradient in before:
        parameter.grad = gradient if parameter.grad is None else gradient.add_(parameter.grad)


def average_whole_gradients(parameters: Iterable[nn.Parameter]) -> None:
    """The mean over all ranks of the gradients of parameters that every rank holds whole (a critic's head).

    Ranks that share rows have the same gradient of them, or each its tokens' part: both are right in this mean.
    """
    whole = [p.grad for p in parameters if p.grad is not None and not isinstance(p.grad, DTensor)]
    for gradient in whole:
        distributed.all_reduce(gradient)
        gradient.div_(distributed.get_world_size())


def clip_over_meshes(parameters: Sequence[nn.Parameter], limit: float) -> float:
    """Clip gradients by their one norm over all meshes, and return it.

    Every rank takes the main one's figure: sums over several dimensions of a mesh may differ in the last bit, and
    copies that are clipped differently would drift apart.
    """
    norms = []
    for group in by_mesh(p for p in parameters if p.grad is not None):
        norm = nn.utils.get_total_norm([p.grad for p in group["params"]])
        norms.append(norm.full_tensor() if isinstance(norm, DTensor) else norm)
    total = torch.linalg.vector_norm(torch.stack(norms)) if norms else torch.zeros(())
    distributed.broadcast(total, src=0)
    factor = (limit / (total + 1e-6)).clamp(max=1.0)
    for parameter in parameters:
        if parameter.grad is not None:
            gradient = parameter.grad
            (gradient.to_local() if isinstance(gradient, DTensor) else gradient).mul_(factor)
    return float(total)
