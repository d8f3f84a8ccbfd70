"""A model's weights as its checkpoint names them, a layer at a time, also where each rank holds a part of them.

    weights ─▶ layers ─▶ gathered (a collective: all ranks, in the same order) ─▶ in the checkpoint's own terms

No more than one layer is whole at a time, and only where it is wanted.
"""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Iterable, Iterator
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers.core_model_loading import revert_weight_conversion

from learner.faults import LearnerFault
from learner.model.adapter import additions, kept, merged, plain_name
from learner.model.finite import first_not_finite

FILE_BYTES = 2**28
"""A file of a snapshot is closed before it grows above this; a layer that is larger is a file of its own."""

_LAYER = re.compile(r".*?\.\d+\.")  # up to the first number in a name: "model.layers.3."

Layer = list[tuple[str, Tensor]]
"""Names and tensors in the checkpoint's own terms."""


def layer_count(model: Any) -> int:
    """How many layers `whole_layer` knows; what stands before and behind the decoder's layers counts too."""
    return len(_layers(model))


def whole_layer(model: Any, index: int, *, wanted: bool = True, dtype: torch.dtype | None = None) -> Layer:
    """The `index`-th layer, its floating-point weights in `dtype` (None: as they are); [] where it is not `wanted`.

    Where ranks hold parts of the weights, all of them must call this. Fused experts are taken apart, a tied head is
    left out, as `from_pretrained` expects; an adapter is added to the weights. The tensors may be the model's own: they
    hold until its next update. Raises `LearnerFault` for weights that are not finite.
    """
    layer, added = {}, additions(model)
    for name, tensor in _layers(model)[index].items():
        gathered = whole(tensor)
        if wanted and name in added:
            gathered = merged(gathered, added[name]).to(dtype or gathered.dtype)
        if wanted:
            layer[name] = gathered
        del gathered  # no second tensor is whole where none is wanted
    if not wanted:
        return []
    _check_finite(layer)
    kept = tuple(getattr(model, "_keep_in_fp32_modules_strict", None) or ())
    return [
        (name, tensor.to(dtype) if _follows(name, tensor, dtype, kept) else tensor)
        for name, tensor in revert_weight_conversion(model, layer).items()
    ]


def whole(tensor: Tensor) -> Tensor:
    """A tensor that ranks may hold parts of, whole; a collective then."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def whole_layers(model: Any, *, wanted: bool = True, dtype: torch.dtype | None = None) -> Iterator[tuple[str, Tensor]]:
    """Every weight by name, layer after layer; see `whole_layer`, also on who must take part."""
    for index in range(layer_count(model)):
        yield from whole_layer(model, index, wanted=wanted, dtype=dtype)


def write_snapshot(
    model: Any, weights: Iterable[tuple[str, Tensor]], target: Path, *, dtype: torch.dtype | None = None
) -> None:
    """Write `weights`, as `whole_layers` gives them in `dtype`, and the model's configuration: a folder in Hugging Face
    format, in one safetensors file or several with an index. For the main process alone."""
    target.mkdir(parents=True, exist_ok=True)
    _write_configuration(model, target, dtype)
    parts: list[list[str]] = []
    held: dict[str, Tensor] = {}
    size = total = 0
    for name, tensor in weights:
        more = tensor.numel() * tensor.element_size()
        if held and size + more > FILE_BYTES:
            parts.append(_write_part(held, target, len(parts)))
            held, size = {}, 0
        held[name] = tensor.detach().cpu().contiguous()
        size, total = size + more, total + more
    parts.append(_write_part(held, target, len(parts)))
    names = ["model.safetensors"]
    if len(parts) > 1:
        names = [f"model-{i + 1:05d}-of-{len(parts):05d}.safetensors" for i in range(len(parts))]
        index = {name: file for file, part in zip(names, parts, strict=True) for name in part}
        text = json.dumps({"metadata": {"total_size": total}, "weight_map": index}, indent=1)
        (target / "model.safetensors.index.json").write_text(text)
    for number, name in enumerate(names):
        _part(target, number).rename(target / name)


def _write_configuration(model: Any, target: Path, dtype: torch.dtype | None) -> None:
    config = copy.deepcopy(model.config)
    config.dtype = str(dtype or model.dtype).removeprefix("torch.")
    config.architectures = [type(model).__name__.removeprefix("FSDP")]  # what sharding makes of a class's name
    config.save_pretrained(target)
    if model.can_generate():
        model.generation_config.save_pretrained(target)
    if model.is_remote_code():
        from transformers.dynamic_module_utils import custom_object_save

        custom_object_save(model, target, config=config)


def _part(target: Path, number: int) -> Path:
    return target / f".part-{number}"


def _write_part(tensors: dict[str, Tensor], target: Path, number: int) -> list[str]:
    save_file(tensors, _part(target, number), metadata={"format": "pt"})
    return list(tensors)


def _layers(model: Any) -> list[dict[str, Tensor]]:
    named = ((plain_name(name), tensor.detach()) for name, tensor in untied(model).items())
    weights = {name: tensor for name, tensor in named if name is not None}
    for name in model._keys_to_ignore_on_save or ():
        weights.pop(name, None)
    return [dict(layer) for _, layer in groupby(weights.items(), key=lambda item: _layer_of(item[0]))]


def untied(module: nn.Module) -> dict[str, Tensor]:
    """The parameters and buffers of a module's state by name, each once: a tied head goes under the embedding's name.

    By identity, not by address: the empty parts that some ranks hold all have the same one.
    """
    state: dict[str, Tensor] = module.state_dict(keep_vars=True)
    for target, source in (getattr(module, "all_tied_weights_keys", None) or {}).items():
        if target in state and source in state and state[target] is state[source]:
            del state[target]
    seen: set[int] = set()
    return {name: t for name, t in state.items() if not (id(t) in seen or seen.add(id(t)))}  # type: ignore[func-returns-value]


def lasting(module: nn.Module) -> dict[str, Tensor]:
    """What training changes of a module, or may: of `untied`, without the base of an adapter."""
    return kept(module, untied(module))


def _layer_of(name: str) -> str:
    layer = _LAYER.match(name)
    return layer.group() if layer else ""


def _follows(name: str, tensor: Tensor, dtype: torch.dtype | None, kept: tuple[str, ...]) -> bool:
    """Whether a weight is published in `dtype`: a router's bias that the model computes with in float32 stays so."""
    return dtype is not None and tensor.is_floating_point() and not any(module in name.split(".") for module in kept)


def _check_finite(weights: dict[str, Tensor]) -> None:
    if bad := first_not_finite(weights.items()):
        raise LearnerFault(
            f"the weights {bad} are not finite, so they are neither published nor exported. The last checkpoint holds "
            "finite ones: run the same command again to go on from there, with a lower learning rate if it happens "
            "again"
        )
