"""A module under training: forwards over buckets, gradients of one global batch, one clipped optimiser step.

Collectives are never skipped: every rank runs as many micro-batches as the rank that has most, with empty ones
where it has none, and gradients are synchronised in the last one.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor, nn

from learner.batch import Batch, bucket_by_length
from learner.config import OptimizerConfig
from learner.critic import gradient_norm


def learning_rate(config: OptimizerConfig, step: int, total_steps: int) -> float:
    """The rate of update `step` (from 0): linear warm-up over `warmup_steps`, then linear to `final_lr_ratio` x lr.

    A pure function of recipe and step, so a resumed run follows the recipe as it stands now, not the checkpoint.
    """
    if step < config.warmup_steps:
        return config.lr * (step + 1) / config.warmup_steps
    span = max(total_steps - config.warmup_steps, 1)
    done = min((step - config.warmup_steps) / span, 1.0)
    return config.lr * (1.0 - done * (1.0 - config.final_lr_ratio))


@dataclass
class Buckets:
    """One rank's part of a batch, cut into micro-batches. `rows[i]` are the batch rows of `parts[i]`."""

    rows: list[list[int]]
    parts: list[Batch]

    @classmethod
    def of(cls, batch: Batch, accelerator: Accelerator, *, max_tokens: int, max_padding: float) -> Buckets:
        """Cut `batch` by length; ranks with fewer micro-batches get copies with an empty action mask."""
        rows = bucket_by_length(batch.lengths.tolist(), max_tokens=max_tokens, max_padding=max_padding)
        parts = [batch.rows(index) for index in rows]
        count = int(accelerator.gather(torch.tensor([len(parts)], device=accelerator.device)).max())
        while len(parts) < count:
            spare = parts[0]
            empty = {**vars(spare), "action_mask": torch.zeros_like(spare.action_mask)}
            parts.append(Batch(**empty))
            rows.append([])
        return cls(rows, parts)

    def scatter(self, pieces: Sequence[Tensor], like: Tensor) -> Tensor:
        """Put per-bucket tensors [b,t] back into the batch's own shape [B,T]."""
        result = torch.zeros(like.shape, dtype=pieces[0].dtype if pieces else torch.float32)
        for index, piece in zip(self.rows, pieces, strict=True):
            if index:
                result[torch.as_tensor(index), : piece.shape[1]] = piece.cpu()
        return result


@dataclass
class Trainee:
    """A prepared module, its AdamW and its schedule. `updates` counts optimiser steps taken."""

    module: nn.Module
    optimizer: Any
    config: OptimizerConfig
    accelerator: Accelerator
    total_steps: int = 0
    updates: int = 0
    parameters: list[nn.Parameter] = field(default_factory=list)

    @classmethod
    def prepare(
        cls, module: nn.Module, config: OptimizerConfig, accelerator: Accelerator, *, total_steps: int
    ) -> Trainee:
        """Wrap for the accelerator's world. Frozen parameters get no optimiser state and no decay."""
        trained = [p for p in module.parameters() if p.requires_grad]
        optimizer = torch.optim.AdamW(
            trained, lr=config.lr, betas=config.betas, eps=config.eps, weight_decay=config.weight_decay
        )
        module.eval()  # dropout off: every forward here is compared with the engine's
        module, prepared = accelerator.prepare(module, optimizer)
        trained = [p for p in module.parameters() if p.requires_grad]
        return cls(module, prepared, config, accelerator, total_steps, 0, trained)

    @property
    def unwrapped(self) -> Any:
        return self.accelerator.unwrap_model(self.module)

    def backward(self, parts: Sequence[Batch], loss_of: Callable[[Batch], Tensor]) -> None:
        """Add up the gradients of `loss_of` over the micro-batches; synchronise once, in the last."""
        for i, part in enumerate(parts):
            last = i == len(parts) - 1
            with contextlib.nullcontext() if last else self.accelerator.no_sync(self.module):
                self.accelerator.backward(loss_of(part))

    def step(self) -> float:
        """Clip, step, clear. Returns the gradient norm before clipping."""
        rate = learning_rate(self.config, self.updates, self.total_steps)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        norm = self.accelerator.clip_grad_norm_(self.parameters, self.config.clip_norm)
        value = float(norm if norm is not None else gradient_norm(self.parameters))
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.updates += 1
        return value

    def discard(self) -> None:
        """Throw the gradients away: parameters, momentum and schedule stay as they are."""
        self.optimizer.zero_grad(set_to_none=True)

    def state_dict(self) -> dict[str, Any]:
        return {"optimizer": self.optimizer.state_dict(), "updates": self.updates, "lr": self.config.lr}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Moments and counters come from the checkpoint; rates, betas and decay from the recipe."""
        groups = [
            {k: v for k, v in group.items() if k != "params"} for group in self.optimizer.state_dict()["param_groups"]
        ]
        self.optimizer.load_state_dict(state["optimizer"])
        for group, own in zip(self.optimizer.param_groups, groups, strict=True):
            group.update(own)
        self.updates = state["updates"]
