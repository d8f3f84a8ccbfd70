"""What a checkpoint holds of a learner, as named tensors, each rank's part of them; out of its memory, and back.

policy.weights.<name>          every parameter and buffer, once where two names are tied; with an adapter only that
policy.moments.<name>.<key>    what the optimiser keeps for a parameter; by name, as groups and ranks may change
critic.…                       the same
rng.<rank>                     the states of a rank's generators
"""

from __future__ import annotations

import pickle
import random
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, TensorStorageMetadata
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from learner.model.layers import lasting
from learner.model.trainee import Trainee

State = dict[str, Any]
"""Tensors by name; the generators' states are bytes."""

Saved = Mapping[str, TensorStorageMetadata | BytesStorageMetadata]
"""What a checkpoint says of its content."""


def state_of(trainees: Mapping[str, Trainee]) -> dict[str, Tensor]:
    """The tensors of weights and moments, in place: a rank's own part where weights are cut."""
    state: dict[str, Tensor] = {}
    for which, trainee in trainees.items():
        for name, weight in _weights(trainee).items():
            state[f"{which}.weights.{name}"] = weight.detach()
            for key, value in trainee.optimizer.state.get(weight, {}).items():
                state[f"{which}.moments.{name}.{key}"] = value.detach()
    return state


def host_copy(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """A copy of `state` in this machine's memory, which later steps leave as it is. Collective: all ranks together."""
    copied = {}
    for name, tensor in state.items():
        part = _in_one_piece(tensor)
        on_host = part.to_local().device.type == "cpu" if isinstance(part, DTensor) else part.device.type == "cpu"
        copied[name] = part.clone() if on_host else part.cpu()
    return copied


def differences(trainees: Mapping[str, Trainee], saved: Saved) -> list[str]:
    """How a checkpoint's weights are not those of `trainees`, in words; [] where they are."""
    own = {f"{w}.weights.{n}": tuple(t.shape) for w, trainee in trainees.items() for n, t in _weights(trainee).items()}
    theirs = {
        name: tuple(about.size)
        for name, about in saved.items()
        if isinstance(about, TensorStorageMetadata) and ".weights." in name
    }
    kinds = {
        "missing": sorted(own.keys() - theirs.keys()),
        "unknown": sorted(theirs.keys() - own.keys()),
        "of another shape": sorted(name for name in own.keys() & theirs.keys() if own[name] != theirs[name]),
    }
    return [f"{len(names)} {kind} {names[:3]}" for kind, names in kinds.items() if names]


class Arrival:
    """Where a checkpoint's tensors go: `tensors` are filled by whoever reads it, then `settle` puts them in place."""

    def __init__(self, trainees: Mapping[str, Trainee], saved: Saved) -> None:
        self.tensors: dict[str, Tensor] = {}
        self._weights: list[tuple[Tensor, str]] = []
        self._moments: list[tuple[Trainee, Tensor, dict[str, str]]] = []
        for which, trainee in trainees.items():
            trained = {
                id(parameter): group for group in trainee.optimizer.param_groups for parameter in group["params"]
            }
            for name, weight in _weights(trainee).items():
                self._weights.append((weight, self._expect(f"{which}.weights.{name}", weight.detach())))
                if id(weight) not in trained:
                    continue
                keys = {}
                for full in (n for n in saved if n.startswith(f"{which}.moments.{name}.")):
                    key = full.removeprefix(f"{which}.moments.{name}.")
                    if "." not in key:
                        keys[key] = self._expect(full, _moment_like(weight, key, saved[full], trained[id(weight)]))
                self._moments.append((trainee, weight, keys))
        self.homeless = sorted(n for n in saved if ".moments." in n and n not in self.tensors)
        """Moments of parameters that are not trained here."""

    @torch.no_grad()
    def settle(self) -> None:
        """Put the tensors into modules and optimisers. Collective: all ranks together."""
        for weight, name in self._weights:
            _put_back(self.tensors.pop(name), weight)
        for trainee, weight, keys in self._moments:
            trainee.optimizer.state.pop(weight, None)
            if keys:
                moments = {key: _as_placed(self.tensors.pop(name), weight) for key, name in keys.items()}
                trainee.optimizer.state[weight] = moments

    def _expect(self, name: str, like: Tensor) -> str:
        self.tensors[name] = _in_one_piece(like)
        return name


def _weights(trainee: Trainee) -> dict[str, Tensor]:
    return lasting(trainee.unwrapped)


def _moment_like(weight: Tensor, key: str, about: Any, group: dict[str, Any]) -> Tensor:
    dtype = about.properties.dtype
    if key == "step":  # where torch's own optimisers want it
        on_device = group.get("fused") or group.get("capturable")
        return torch.zeros(about.size, dtype=dtype, device=weight.device if on_device else "cpu")
    if tuple(about.size) == tuple(weight.shape):
        return torch.zeros_like(weight, dtype=dtype).detach()
    return torch.zeros(about.size, dtype=dtype, device=weight.device)


def _in_one_piece(tensor: Tensor) -> Tensor:
    """A part that is not one block of its tensor, as one that is: a checkpoint knows blocks only. Collective."""
    if not isinstance(tensor, DTensor):
        return tensor
    placements = tuple(Shard(p.dim) if isinstance(p, _StridedShard) else p for p in tensor.placements)
    return tensor if placements == tensor.placements else tensor.redistribute(placements=placements)


def _as_placed(tensor: Tensor, weight: Tensor) -> Tensor:
    if isinstance(tensor, DTensor) and isinstance(weight, DTensor) and tensor.placements != weight.placements:
        return tensor.redistribute(placements=weight.placements)
    return tensor


def _put_back(tensor: Tensor, weight: Tensor) -> None:
    if isinstance(weight, DTensor) and isinstance(tensor, DTensor) and tensor.placements != weight.placements:
        weight.copy_(_as_placed(tensor, weight))  # else it is the weight's own memory


def rng_state() -> bytes:
    """The states of every generator that this process draws from."""
    state = {"python": random.getstate(), "numpy": np.random.get_state(), "torch": torch.get_rng_state()}
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state_all()
    return pickle.dumps(state)


def restore_rng(saved: bytes) -> None:
    """Set every generator back."""
    state = pickle.loads(saved)
    random.setstate(state["python"])
    np.random.set_state(state["numpy"])
    torch.set_rng_state(state["torch"])
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state_all(state["cuda"])
