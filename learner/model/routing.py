"""Which experts a mixture's tokens go to: replay of what an engine chose, and figures of it.

Engine and trainer compute a router's logits with other kernels. Where two experts are nearly even they choose
differently, and the log-prob of that token differs by more than rounding. In replay the trainer's tokens go where the
engine's went; the weights of the chosen experts are still those of the trainer's router, with their gradient.
"""

from __future__ import annotations

import contextlib
import math
import re
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from learner.config import RecipeError
from learner.faults import LearnerFault

_LAYER = re.compile(r"(?:^|\.)layers\.(\d+)\.")


class Routing:
    """The routers of a model, from now on watched; with `replay` they choose what is recorded, where something is.

    What is counted, since the last `counted`, is of forwards with gradients: those of the update.
    """

    def __init__(self, model: Any, *, replay: bool) -> None:
        self.replay = replay
        self.layers: list[int] = []
        self.experts = self.top_k = 0
        self._recorded: Tensor | None = None  # [tokens, layers, top_k] of the micro-batch, for its backward pass too
        self._counts: Tensor | None = None  # bool[tokens], while figures are taken
        for name, module in model.named_modules():
            layer = _LAYER.search(name)
            if layer and "Router" in type(module).__name__ and hasattr(module, "top_k"):
                self.experts = int(getattr(module, "num_experts", None) or module.n_routed_experts)
                self.top_k = int(module.top_k)
                module.forward = partial(self._route, len(self.layers), module.forward)
                self.layers.append(int(layer[1]))
        if not self.layers:
            raise RecipeError("learner.routing: this model has no router that is known here; write own")
        self._clear()

    def _clear(self) -> None:
        self._load = torch.zeros(len(self.layers), self.experts, dtype=torch.int64)
        self._agreed = torch.zeros(3, dtype=torch.int64)  # choices in common, choices recorded, tokens counted

    @contextlib.contextmanager
    def of(self, recorded: Tensor | None, counts: Tensor) -> Iterator[None]:
        """Within it one forward runs, of tokens [B,t] and what is `recorded` of them [B,t,layers,top_k] (-1: nothing).

        What is recorded holds beyond it, until the next, since layers may be computed again in the backward pass.
        """
        self._recorded = None if recorded is None else recorded.flatten(0, 1)
        self._counts = counts.flatten() if torch.is_grad_enabled() else None
        if self._counts is not None:
            self._agreed[2] += int(self._counts.sum())
        try:
            yield
        finally:
            self._counts = None

    def check(self, recorded: Tensor) -> None:
        """Raise `LearnerFault` unless what is `recorded` [...,layers,top_k] may be this model's."""
        found = tuple(recorded.shape[-2:])
        wanted = (max(self.layers) + 1, self.top_k)
        if found[0] < wanted[0] or found[1] != wanted[1]:
            raise LearnerFault(
                f"learner.routing: episodes hold {found[1]} experts a token in {found[0]} layers, the model has "
                f"{wanted[1]} in at least {wanted[0]}; the engine serves another model"
            )
        chosen = recorded[..., self.layers, :]
        if chosen.numel() and not -1 <= int(chosen.min()) <= int(chosen.max()) < self.experts:
            raise LearnerFault(
                f"learner.routing: episodes hold expert {int(chosen.max())}, the model has {self.experts}; the engine "
                "serves another model"
            )

    def counted(self, sum_up: Callable[[Tensor], Tensor]) -> dict[str, float]:
        """Figures since the last call, a collective; `sum_up` adds a tensor of counts up over all ranks."""
        load, (agreed, recorded, tokens) = sum_up(self._load).double(), sum_up(self._agreed).tolist()
        self._clear()
        choices = load.sum(-1)
        busiest = load.amax(-1) * self.experts / choices
        return {
            "router/busiest": float(busiest.mean()) if bool(choices.all()) else math.nan,
            "router/agreement": agreed / recorded if recorded else math.nan,
            "router/recorded": recorded / (tokens * self.top_k * len(self.layers)) if tokens else math.nan,
        }

    @torch.compiler.disable  # a compiled layer leaves its router as it is: nothing here could be traced
    def _route(self, number: int, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        recorded = None if self._recorded is None else self._recorded[:, self.layers[number]]
        with _Choice(self, recorded) as choice:
            routed = forward(*args, **kwargs)
        if choice.own is None or choice.taken is None:
            raise RecipeError("learner.routing: this model's router does not choose by top-k; write own")
        if self._counts is not None:
            self._count(number, choice.own, choice.taken, recorded, self._counts)
        return routed

    def _count(self, number: int, own: Tensor, taken: Tensor, recorded: Tensor | None, counts: Tensor) -> None:
        self._load[number] += torch.bincount(taken[counts].flatten(), minlength=self.experts).cpu()
        if recorded is not None:
            known = counts & (recorded >= 0).all(-1)
            common = (own[known][:, :, None] == recorded[known][:, None, :]).sum()
            self._agreed[:2] += torch.stack([common, known.sum() * self.top_k]).cpu()


class _Choice(TorchFunctionMode):
    """Sees a router's choice among all experts, and replaces it by what is recorded."""

    def __init__(self, routing: Routing, recorded: Tensor | None) -> None:
        super().__init__()
        self.routing, self.recorded = routing, recorded
        self.own: Tensor | None = None
        self.taken: Tensor | None = None

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        if func not in (torch.topk, Tensor.topk):
            return found
        scores = args[0] if args else (kwargs or {})["input"]
        if (scores.shape[-1], found.indices.shape[-1]) != (self.routing.experts, self.routing.top_k):
            return found  # among groups of experts
        self.own = self.taken = found.indices
        if self.recorded is None or not self.routing.replay:
            return found
        recorded = self.recorded.to(found.indices.dtype)
        self.taken = torch.where((recorded >= 0).all(-1, keepdim=True), recorded, found.indices)
        return torch.return_types.topk((scores.gather(-1, self.taken), self.taken))
