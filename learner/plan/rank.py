"""What one process of the learner holds in every phase of RL, without what runs beside it: arithmetic."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

from agent.engines.weight_stream import BUCKET_BYTES
from learner.config import OptimizerConfig, Recipe
from learner.data.buckets import micro_batch_tokens
from learner.model.layers import FILE_BYTES
from learner.parallel.layout import Layout
from learner.plan.memory import (
    EIGHT_BIT_MOMENT_BYTES,
    PROCESS_BYTES,
    Architecture,
    Parameters,
    Stepping,
    Usage,
    batch_bytes,
    optimizer_bytes,
    publication_bytes,
    resting_usage,
    update_usage,
)
from learner.plan.shapes import critic_parameters

VALUE_BYTES = {"float32": 4, "bfloat16": 2}


@dataclass(frozen=True)
class Rank:
    """One process of `layout`; `policy` and `body` (of critics) as `learner.plan.shapes` gives them.

    On a CPU everything lies in the machine's memory. Beside a GPU the process keeps a batch and a checkpoint's copy
    there (`host_bytes`), and the rest on the device.
    """

    recipe: Recipe
    layout: Layout
    model: Architecture
    policy: Parameters
    body: Any

    @property
    def on_cpu(self) -> bool:
        return not self.recipe.hardware.learner_gpus

    @property
    def shards(self) -> int:
        """Over how many ranks a copy of the weights is cut; experts lie across the same ranks."""
        return self.layout.fsdp * self.layout.context * self.layout.tensor

    @property
    def tokens(self) -> int:
        """Of a micro-batch; a row that is longer goes alone."""
        device = "cpu" if self.on_cpu else "cuda"
        limit = micro_batch_tokens(self.recipe.learner.micro_batch_tokens, device)
        return max(limit, self.recipe.runtime.max_context_tokens)

    def update(self, parameters: Parameters, optimizer: OptimizerConfig, tokens: int, positions: int) -> Usage:
        """While a module makes its update; see `learner.plan.memory.update_usage`."""
        return self._process + update_usage(
            parameters,
            self.model,
            tokens=-(-tokens // self.layout.context),
            positions=positions,
            weight_bytes=self._weight_bytes,
            value_bytes=VALUE_BYTES[self.recipe.model.computes_in],
            shards=self.shards,
            recompute=self.recipe.model.recompute_layers,
            gathered=self._gathered,
            moment_bytes=self._moment_bytes(parameters, optimizer),
            stepping=self._stepping(optimizer),
            offload=optimizer.offload,
        )

    def rest(self, parameters: Parameters, optimizer: OptimizerConfig) -> Usage:
        """Weights and moments of a module that others are at work beside."""
        return resting_usage(
            parameters,
            weight_bytes=self._weight_bytes,
            shards=self.shards,
            moment_bytes=self._moment_bytes(parameters, optimizer),
            offload=optimizer.offload,
        )

    def rl_phases(self) -> dict[str, Usage]:
        """Bytes by phase of RL. A checkpoint may still be written, from its copy, in all that follow it."""
        learner = self.recipe.learner
        held, kept, critic = self._at_rest, self._kept, self._critic
        phases = {"loading": Usage(parameters=held.parameters) + self._process}
        phases["rollouts"] = held + self._process + kept
        if critic is not None:
            others = self.rest(self.policy, learner.policy) + self._reference + self._batch + kept
            phases["critic update"] = self.update(critic, learner.critic, self.tokens, 0) + others
        others = self._reference + self._batch + kept
        if critic is not None:
            others += self.rest(critic, learner.critic)
        positions = min(self.tokens, learner.logprob_chunk)
        phases["policy update"] = self.update(self.policy, learner.policy, self.tokens, positions) + others
        phases["checkpoint"] = held + self._process + kept
        phases["publication"] = held + self._process + kept + self._publication
        return phases

    @property
    def host_bytes(self) -> float:
        """Of a process beside a GPU, in its machine's memory: a checkpoint's copy, a batch, moments that rest there."""
        if self.on_cpu:
            return 0.0
        moments = sum(
            (1 + optimizer.offload)
            * optimizer_bytes(part.trained, moment_bytes=self._moment_bytes(part, optimizer), shards=self.shards)
            for part, optimizer in self._modules
        )
        return PROCESS_BYTES + self._lasting.parameters + moments + self._rows_bytes(self.recipe.learner.batch_size)

    @cached_property
    def _critic(self) -> Parameters | None:
        critic = self.recipe.learner.resolve().critic
        return None if critic is None else critic_parameters(self.body, critic.trainable)

    @property
    def _modules(self) -> list[tuple[Parameters, OptimizerConfig]]:
        """What is trained in RL, each with its optimiser."""
        learner = self.recipe.learner
        critic = [] if self._critic is None else [(self._critic, learner.critic)]
        return [(self.policy, learner.policy), *critic]

    @property
    def _reference(self) -> Usage:
        kl = self.recipe.learner.kl
        if kl is None or (kl.reference == "start" and self.recipe.model.policy_adapter is not None):
            return Usage()  # with an adapter the start is the policy without it
        return Usage(parameters=self.policy.total * self._weight_bytes / self.shards)

    @property
    def _at_rest(self) -> Usage:
        return sum((self.rest(part, optimizer) for part, optimizer in self._modules), self._reference)

    @property
    def _lasting(self) -> Usage:
        """What training changes: what a checkpoint holds, and a step that may be taken back."""
        return sum((self.rest(part.lasting, optimizer) for part, optimizer in self._modules), Usage())

    @property
    def _kept(self) -> Usage:
        """Copies of weights and moments: for a checkpoint, where it lies on the device, and to go back to."""
        config = self.recipe.learner
        copies = int(self.on_cpu) + int(config.held_out_probe is not None or config.judged_gate is not None)
        return Usage(copies=copies * self._lasting.total)

    @property
    def _batch(self) -> Usage:
        """All rows and this rank's own, each as long as they may be; beside a GPU the experts stay with the host."""
        learner, rows = self.recipe.learner, -(-self.recipe.learner.batch_size // self.layout.data_ranks)
        if self.on_cpu:
            return Usage(activations=self._rows_bytes(learner.batch_size + rows))
        tokens = self.recipe.runtime.max_context_tokens
        return Usage(activations=batch_bytes(self.model, rows, tokens, carries_experts=False))

    def _rows_bytes(self, rows: int) -> int:
        carries = self.recipe.learner.routing != "own"
        return batch_bytes(self.model, rows, self.recipe.runtime.max_context_tokens, carries_experts=carries)

    @property
    def _process(self) -> Usage:
        return Usage(process=PROCESS_BYTES if self.on_cpu else 0)

    @property
    def _publication(self) -> Usage:
        published = VALUE_BYTES[self.recipe.published_dtype]
        holds = 2 * FILE_BYTES if self.recipe.engine.transfer == "snapshot" else 2 * BUCKET_BYTES
        return Usage(
            copies=publication_bytes(
                self.policy,
                weight_bytes=self._weight_bytes,
                published_bytes=published,
                gathered=self.layout.cut,
                holds=holds,
            )
        )

    @property
    def _weight_bytes(self) -> int:
        return VALUE_BYTES[self.recipe.model.dtype]

    def _moment_bytes(self, parameters: Parameters, optimizer: OptimizerConfig) -> float:
        if optimizer.kind == "adamw_8bit":
            return EIGHT_BIT_MOMENT_BYTES
        return parameters.trained_bytes(self._weight_bytes)

    def _stepping(self, optimizer: OptimizerConfig) -> Stepping:
        """As `learner.model.optimizer.build_optimizer` has it."""
        if optimizer.kind == "adamw_8bit":
            return "unpacked"
        if not self.layout.cut:
            return "fused"
        return "one_by_one" if self.on_cpu else "together"

    @property
    def _gathered(self) -> float:
        """Of the weights of a layer, what a device puts together for its forward."""
        layout, model = self.layout, self.model
        if layout.fsdp * layout.context == 1:
            return 0.0
        experts = model.experts * 3 * model.hidden * model.mlp_width / self.policy.largest_layer
        return experts / max(layout.experts, layout.tensor) + (1 - experts) / layout.tensor
