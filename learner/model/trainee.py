"""A module under training: gradients of one global batch, one clipped optimiser step, its schedule."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from accelerate import Accelerator
from torch import Tensor, nn

from learner.config import OptimizerConfig, RecipeError
from learner.data.batch import Batch
from learner.data.buckets import Buckets, Piece
from learner.faults import LearnerFault
from learner.model.critic import gradient_norm
from learner.model.forward import InParts, PolicyForward
from learner.model.kinds import kinds_of
from learner.model.memory import LARGEST_KEPT, LARGEST_KEPT_OF_CUT_WEIGHTS, keep_freed_memory
from learner.model.optimizer import build_optimizer, moments_at_hand, rest_moments
from learner.model.tokens import LastLayer, packs_rows
from learner.parallel.collectives import largest
from learner.parallel.context import Parts
from learner.parallel.layout import layout_of
from learner.parallel.sharding import (
    average_whole_gradients,
    clip_over_meshes,
    compute_narrow,
    enter_through_root,
    gradients_aside,
    release_gathered,
)


def learning_rate(config: OptimizerConfig, step: int, total_steps: int) -> float:
    """The rate of step `step` (from 0): linear warm-up over `warmup_steps`, then to `final_lr_ratio` x lr at
    `total_steps`, on a line or along half a cosine.

    A pure function of recipe and step, so a resumed run follows the recipe as it stands now, not the checkpoint.
    """
    if step < config.warmup_steps:
        return config.lr * (step + 1) / config.warmup_steps
    span = max(total_steps - config.warmup_steps, 1)
    done = min((step - config.warmup_steps) / span, 1.0)
    if config.schedule == "cosine":
        done = (1.0 - math.cos(math.pi * done)) / 2
    return config.lr * (1.0 - done * (1.0 - config.falls_to))


def lay_out(module: nn.Module, accelerator: Accelerator) -> None:
    """Have a forward that Accelerate does not wrap compute in the recipe's precision, on weights that may be cut over
    ranks, and on this rank's part of each row. A collective where there are parts.
    """
    if isinstance(module, PolicyForward):
        enter_through_root(module, module.model)
    compute_narrow(module, accelerator)
    parts = Parts.of(accelerator)
    if parts.size > 1:
        cast(InParts, module).cut_into(parts)
        release_gathered(module)


@dataclass
class Trainee:
    """A prepared module, its optimiser and its schedule.

    `updates` counts optimiser steps taken; the schedule counts steps of the run, of which each has
    `updates_per_step`. `discarded` counts, since the trainee was made, those that were not taken because a gradient or
    a loss was not finite; `discarded_in_row` those since the last one that was taken. `norms`: the gradient's norm
    before the last step's clip, by kind of parameter; {} where weights are cut.
    """

    module: nn.Module
    optimizer: Any
    config: OptimizerConfig
    accelerator: Accelerator
    total_steps: int = 0
    updates: int = 0
    parameters: list[nn.Parameter] = field(default_factory=list)
    updates_per_step: int = 1
    discarded: int = 0
    discarded_in_row: int = 0
    norms: dict[str, float] = field(default_factory=dict)
    _kinds: dict[str, list[nn.Parameter]] = field(default_factory=dict)
    _losses_finite: Tensor | None = None  # of the gradients since the last step, on the device

    @classmethod
    def prepare(
        cls, module: nn.Module, config: OptimizerConfig, accelerator: Accelerator, *, total_steps: int
    ) -> Trainee:
        """Make ready for the accelerator's world. Frozen parameters get no optimiser state and no decay.

        Whole copies are wrapped by Accelerate. A module whose weights are cut keeps its ranks in step by itself.
        """
        cut = layout_of(accelerator).cut
        trained = [p for p in module.parameters() if p.requires_grad]
        optimizer = build_optimizer(trained, config)
        if accelerator.device.type == "cpu":
            keep_freed_memory(LARGEST_KEPT_OF_CUT_WEIGHTS if cut else LARGEST_KEPT)
        module.eval()  # dropout off: every forward here is compared with the engine's
        if cut:
            lay_out(module, accelerator)
            prepared = accelerator.prepare_optimizer(optimizer, device_placement=False)
        else:
            own = module
            module, prepared = accelerator.prepare(module, optimizer)
            if isinstance(own, PolicyForward):
                with accelerator.autocast():
                    own.last_layer = LastLayer.of(own.model.base_model)
        trained = [p for p in module.parameters() if p.requires_grad]
        trainee = cls(module, prepared, config, accelerator, total_steps, 0, trained)
        trainee._kinds = {} if cut else kinds_of(trainee.unwrapped)
        return trainee

    def pack_rows(self) -> None:
        """Pack rows from now on; `RecipeError` for a model that cannot. A collective where weights are cut."""
        with self.reading(), self.accelerator.autocast():
            self.unwrapped.pack_rows()

    @property
    def unwrapped(self) -> Any:
        return self.accelerator.unwrap_model(self.module)

    @contextlib.contextmanager
    def reading(self) -> Iterator[None]:
        """Forwards without gradients; whole weights that they gathered are let go at the end."""
        with torch.no_grad():
            yield
        if layout_of(self.accelerator).cut:
            release_gathered(self.module)

    def backward(
        self, buckets: Buckets, loss_of: Callable[[Batch, list[int]], tuple[Tensor, Piece]]
    ) -> dict[str, Tensor]:
        """Add up the gradients of a loss over the micro-batches; whole copies synchronise once, in
        the last, and ranks that hold parts of the weights in each.

        `loss_of(part, rows)` gives a micro-batch's loss, and by name what else is wanted of it, detached; the answer
        holds that for the whole batch (see `Buckets.assemble`).
        """
        pieces = []
        for number, (part, rows) in enumerate(buckets, start=1):
            with contextlib.nullcontext() if number == len(buckets) else self.accelerator.no_sync(self.module):
                loss, piece = loss_of(part, rows)
                self.add_gradients(loss)
            pieces.append(piece)
        return buckets.assemble(pieces)

    def add_gradients(self, loss: Tensor) -> None:
        """The backward pass of one micro-batch's loss; whether that was a number is remembered."""
        aside = gradients_aside(self.parameters) if layout_of(self.accelerator).cut else contextlib.nullcontext()
        with aside:
            self.accelerator.backward(loss)
        finite = loss.detach().isfinite().all()
        self._losses_finite = finite if self._losses_finite is None else self._losses_finite & finite

    def step(self) -> float:
        """Clip, step, clear. Returns the gradient norm before clipping.

        Where the norm or a loss is not finite on any rank, every rank discards the update instead and counts it.
        """
        rate = learning_rate(self.config, self.updates // self.updates_per_step, self.total_steps)
        for group in self.optimizer.param_groups:
            if isinstance(group["lr"], Tensor):  # torchao compiles its step around it
                group["lr"].fill_(rate)
            else:
                group["lr"] = rate
        self.norms = {kind: float(gradient_norm(own)) for kind, own in self._kinds.items()}
        if layout_of(self.accelerator).cut:
            average_whole_gradients(self.parameters)
            value = clip_over_meshes(self.parameters, self.config.clip_norm)
        else:
            norm = self.accelerator.clip_grad_norm_(self.parameters, self.config.clip_norm)
            value = float(norm if norm is not None else gradient_norm(self.parameters))
        losses_finite = self._losses_finite is None or bool(self._losses_finite)
        if largest(self.accelerator, int(not (math.isfinite(value) and losses_finite))):
            self.discard()
            self.discarded += 1
            self.discarded_in_row += 1
            return value
        with moments_at_hand(self.optimizer, offload=self.config.offload):
            self.optimizer.step()
        self.discard()
        self.updates += 1
        self.discarded_in_row = 0
        return value

    def rest(self) -> None:
        """Have moments that were put into the optimiser where they lie between steps."""
        if self.config.offload:
            rest_moments(self.optimizer)

    def discard(self) -> None:
        """Throw the gradients away: parameters, momentum and schedule stay as they are."""
        self.optimizer.zero_grad(set_to_none=True)
        self._losses_finite = None

    def require_progress(self, limit: int, stage: str) -> None:
        """Raise `LearnerFault` once `limit` updates in a row were discarded; `stage`: in what, for the message."""
        if self.discarded_in_row >= limit:
            raise LearnerFault(
                f"{stage}: {self.discarded_in_row} updates in a row had to be discarded, for a gradient or a loss that "
                "was not finite. Lower the lr of its optimizer, or compute in float32 (model.compute_dtype)"
            )

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
        self.rest()


def pack_rows(packing: str | None, attention: str, trainees: Sequence[Trainee]) -> None:
    """Have `trainees` pack rows where `learner.packing` and transformers' `attention` say so (see `packs_rows`).

    A model that cannot is a `RecipeError` where the recipe asks for it, else its rows stay in buckets, and those of
    the other trainees too.
    """
    if not packs_rows(packing, attention) or any(trainee.unwrapped.parts.size > 1 for trainee in trainees):
        return
    try:
        for trainee in trainees:
            trainee.pack_rows()
    except RecipeError:
        if packing is not None:
            raise
        for trainee in trainees:
            trainee.unwrapped.packed = False
