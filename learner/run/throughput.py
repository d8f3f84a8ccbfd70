"""How fast the learner is, and how much of its devices that is: figures of one step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from learner.algorithms import Algorithm
from learner.config import Recipe
from learner.data.batch import Batch
from learner.data.buckets import bucket_by_length, micro_batch_tokens
from learner.model.critic import FreezingError
from learner.model.flops import Passes, StepFlops, Work, module_flops
from learner.model.trainee import Trainee
from learner.updates import StepSettings

# Dense bfloat16 peaks as the makers publish them, without sparsity; the first name that a device's own holds.
_BFLOAT16_PEAKS: tuple[tuple[str, float], ...] = (
    ("B200", 2250e12),
    ("H200", 989e12),
    ("H100 PCIe", 756e12),
    ("H100 NVL", 835e12),
    ("H100", 989e12),
    ("H20", 148e12),
    ("A100", 312e12),
    ("L40S", 362e12),
    ("L40", 181e12),
    ("L4", 121e12),
    ("A40", 149.7e12),
    ("A10", 125e12),
    ("RTX 5090", 209.5e12),
    ("RTX 4090", 165.2e12),
    ("RTX 3090", 71e12),
    ("MI300X", 1307e12),
)


def peak_flops(recipe: Recipe, device: str | None) -> float | None:
    """Operations a second that one of the learner's devices can make: the recipe's word, else by the device's name.

    None where nobody knows: on CPUs (`device` None), on GPUs that the table has not, for float32.
    """
    if recipe.hardware.peak_flops is not None:
        return recipe.hardware.peak_flops
    if device is None or recipe.model.computes_in != "bfloat16":
        return None
    return next((peak for name, peak in _BFLOAT16_PEAKS if name in device), None)


@dataclass(frozen=True)
class Rows:
    """Of every episode of a global batch: its tokens, and those that are actions."""

    lengths: Sequence[int]
    actions: Sequence[int]


def count_logits_again(rows: Rows, *, micro_batch_tokens: int, max_padding: float, chunk: int) -> int:
    """Action tokens whose logits are made again, since their micro-batch has more than a chunk of them.

    As if one rank had all rows: with several they lie in other micro-batches, of about the same size.
    """
    parts = bucket_by_length(rows.lengths, max_tokens=micro_batch_tokens, max_padding=max_padding)
    sizes = (sum(rows.actions[row] for row in part) for part in parts)
    return sum(size for size in sizes if size > chunk)


def step_flops(
    rows: Rows,
    policy: Work,
    critic: Work | None,
    algorithm: Algorithm,
    settings: StepSettings,
    *,
    recompute_layers: bool = False,
    logits_again: int = 0,
    minibatches: int = 1,
    reference: bool = False,
) -> StepFlops:
    """What `learner.sao.sao_step` computes for these rows; see it for who is gone through how often."""
    several = settings.policy_epochs * minibatches > 1
    before = algorithm.needs_old_logprobs or algorithm.needs_current_logprobs or several or settings.kl_in_reward
    updates = settings.policy_epochs * settings.train_policy
    trusted = algorithm.denominator == "trusted" and algorithm.aggregation == "token_mean"
    found = module_flops(
        policy,
        Passes(updates, before + updates * trusted),
        rows.lengths,
        rows.actions,
        recompute_layers=recompute_layers,
        logits_again=logits_again,
    )
    if reference:
        found += module_flops(policy, Passes(0, 1), rows.lengths, rows.actions)
    if critic is not None and algorithm.critic is not None:
        passes = Passes(algorithm.critic.updates, 1)
        found += module_flops(critic, passes, rows.lengths, rows.lengths, recompute_layers=recompute_layers)
    return found


def throughput_figures(
    rows: Rows, flops: StepFlops | None, seconds: float, *, devices: int, peak: float | None
) -> dict[str, float]:
    """`speed/…` of a step that took `seconds` on `devices`, each with that `peak`.

    Without `flops` the tokens alone, without a `peak` no share of it.
    """
    if seconds <= 0:
        return {}
    figures = {"speed/tokens_per_s": sum(rows.lengths) / seconds}
    if flops is None:
        return figures
    figures["speed/tflops"] = flops.model / seconds / 1e12
    if peak is not None:
        figures["speed/mfu"] = flops.model / seconds / devices / peak
        figures["speed/hfu"] = (flops.model + flops.again) / seconds / devices / peak
    return figures


class Speedometer:
    """Has the `figures` of a learner's last step; what its modules compute is counted once.

    They are apart from what the step found: the same step is not as fast again.
    """

    def __init__(self, recipe: Recipe, algorithm: Algorithm, policy: Trainee, critic: Trainee | None) -> None:
        self._recipe, self._algorithm, self._device = recipe, algorithm, policy.accelerator.device
        self._devices = policy.accelerator.num_processes
        name = torch.cuda.get_device_name(self._device) if self._device.type == "cuda" else None
        self._peak = peak_flops(recipe, name)
        self._policy = _work_of(policy.unwrapped, policy.unwrapped.model.config)
        self._critic = None if critic is None else _work_of(critic.unwrapped, critic.unwrapped.body.config)
        self.figures: dict[str, float] = {}
        self._known = self._policy is not None and (critic is None or self._critic is not None)

    def note(self, batch: Batch, settings: StepSettings, seconds: float) -> None:
        """A step on the global `batch` took so long; see `throughput_figures`."""
        config = self._recipe.learner
        rows = Rows(batch.lengths.tolist(), batch.action_mask.sum(1).tolist())
        flops = None
        if self._known and self._policy is not None:
            limit = micro_batch_tokens(config.micro_batch_tokens, self._device.type)
            flops = step_flops(
                rows,
                self._policy,
                self._critic,
                self._algorithm,
                settings,
                recompute_layers=self._recipe.model.recompute_layers,
                logits_again=count_logits_again(
                    rows, micro_batch_tokens=limit, max_padding=config.max_padding, chunk=config.logprob_chunk
                ),
                minibatches=config.policy_minibatches,
                reference=config.kl is not None,
            )
        self.figures = throughput_figures(rows, flops, seconds, devices=self._devices, peak=self._peak)


def _work_of(module: nn.Module, config: Any) -> Work | None:
    try:
        return Work.of(module, config)
    except FreezingError:  # parameters of a kind that nobody has named: a policy trains them all the same
        return None
