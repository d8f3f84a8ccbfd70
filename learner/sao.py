"""Single-Rollout Asynchronous Optimization (arXiv 2607.07508), one step.

    claim 128 finished episodes -> K critic updates -> values read again -> advantages -> gated policy update

Read `sao_step` from top to bottom. What it leaves out lives elsewhere: where the episodes come from
(agent/store), how they become rows (learner/batch.py), the formulas (learner/advantages.py, learner/losses.py), how
gradients of micro-batches and ranks become one (learner/trainee.py), what is saved and published (learner/loop.py).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor

from learner.advantages import RunningMeanBaseline, skip_observation_gae
from learner.algorithms import Algorithm, compute_advantages, compute_value_targets, policy_loss
from learner.batch import Batch
from learner.losses import masked_value_loss
from learner.metrics import ratio_metrics
from learner.statistics import EVStatistics
from learner.trainee import Buckets, Trainee


@dataclass(frozen=True)
class StepSettings:
    """What a step needs beside the algorithm's own numbers."""

    advantage_scale: str = "none"  # "std": divide the batch's advantages by their standard deviation
    truncation: str = "terminal"
    micro_batch_tokens: int = 16_384
    max_padding: float = 0.05
    train_policy: bool = True  # False: only the critic moves (the steps before the first policy update)


@dataclass
class StepResult:
    """Figures of one step; per-token results [B,T] on the CPU; whether each optimiser moved."""

    figures: dict[str, float] = field(default_factory=dict)
    logprobs: Tensor | None = None
    values: Tensor | None = None
    advantages: Tensor | None = None
    policy_moved: bool = False
    critic_moved: bool = False


def sao_step(
    batch: Batch,
    policy: Trainee,
    critic: Trainee | None,
    algorithm: Algorithm,
    settings: StepSettings,
    running_mean: RunningMeanBaseline | None = None,
) -> StepResult:
    """Learn from one batch: K critic updates, then at most one policy update. `critic` is None for critic-free presets.

    `batch` is this rank's part; every mean is over the global batch.
    """
    accelerator, result = policy.accelerator, StepResult()
    action_tokens = _total(accelerator, batch.action_tokens)
    if action_tokens == 0:  # nothing to learn from: no optimiser moves
        return result
    buckets = Buckets.of(batch, accelerator, max_tokens=settings.micro_batch_tokens, max_padding=settings.max_padding)
    before = None  # the policy's own log-probs at the start of the step, for the algorithms that ask for them
    if algorithm.needs_old_logprobs or algorithm.needs_current_logprobs:
        before = read_logprobs(buckets, batch, policy)

    bootstrap = None
    if critic is not None and algorithm.critic is not None:
        for update in range(algorithm.critic.updates):
            norm, statistics = update_critic(buckets, critic, algorithm, settings, action_tokens, before)
            if update == 0:  # before the first update the critic has not seen this batch: the honest figure
                result.figures |= {"critic/gradient_norm": norm, "critic/explained_variance": statistics.value()}
        result.critic_moved = True
        result.values, bootstrap = read_values(buckets, batch, critic, settings)  # again, after all K updates

    result.advantages = compute_advantages(
        algorithm,
        rewards=batch.rewards,
        action_mask=batch.action_mask,
        values=result.values,
        turn_ids=batch.turn_ids,
        logprobs=before,
        rollout_logprobs=batch.rollout_logprobs,
        bootstrap=bootstrap,
        group_ids=batch.group_ids,
        prompt_ids=batch.task_ids,
        task_ids=batch.env_ids,
        running_mean=running_mean,
    )
    if settings.advantage_scale == "std":
        result.advantages = result.advantages / _standard_deviation(accelerator, result.advantages, batch.action_mask)
    if settings.train_policy:
        update_policy(buckets, batch, policy, algorithm, result, action_tokens, before)
    return result


def update_critic(
    buckets: Buckets,
    critic: Trainee,
    algorithm: Algorithm,
    settings: StepSettings,
    action_tokens: float,
    logprobs: Tensor | None = None,
) -> tuple[float, EVStatistics]:
    """One regression step towards the value targets, made again from the values of this very forward.

    Returns the gradient norm and the statistics of explained variance before the step. `logprobs` [B,T] are for
    V-trace only.
    """
    accelerator = critic.accelerator
    statistics = EVStatistics()
    where = iter(buckets.rows)

    def loss_of(part: Batch) -> Tensor:
        nonlocal statistics
        rows = next(where)
        values, after = critic.module(part.input_ids.to(accelerator.device))
        known = values.detach().cpu()
        targets = compute_value_targets(
            algorithm,
            rewards=part.rewards,
            values=known,
            action_mask=part.action_mask,
            logprobs=_rows_of(logprobs, rows, part),
            rollout_logprobs=part.rollout_logprobs,
            bootstrap=_bootstrap(part, after.detach().cpu(), settings),
        )
        statistics = statistics.merge(EVStatistics.of(targets, known, part.action_mask))
        device = values.device
        normalizer = action_tokens / accelerator.num_processes
        return masked_value_loss(values, targets.to(device), part.action_mask.to(device), normalizer=normalizer)

    critic.backward(buckets.parts, loss_of)
    return critic.step(), _merge(accelerator, statistics)


@torch.no_grad()
def read_values(
    buckets: Buckets, batch: Batch, critic: Trainee, settings: StepSettings
) -> tuple[Tensor, Tensor | None]:
    """values[B,T] and, where truncated episodes bootstrap, the value after each episode's last action [B]."""
    values, bootstraps = [], torch.zeros(batch.size)
    for rows, part in zip(buckets.rows, buckets.parts, strict=True):
        value, after = critic.module(part.input_ids.to(critic.accelerator.device))
        values.append(value.float().cpu())
        found = _bootstrap(part, after.float().cpu(), settings)
        if found is not None and rows:
            bootstraps[torch.as_tensor(rows)] = found
    return buckets.scatter(values, batch.rewards), bootstraps if settings.truncation == "bootstrap" else None


@torch.no_grad()
def read_logprobs(buckets: Buckets, batch: Batch, policy: Trainee) -> Tensor:
    """logprobs[B,T] of the policy as it stands."""
    device = policy.accelerator.device
    found = [policy.module(p.input_ids.to(device), p.action_mask.to(device))[0] for p in buckets.parts]
    return buckets.scatter([piece.cpu() for piece in found], batch.rewards)


def update_policy(
    buckets: Buckets,
    batch: Batch,
    policy: Trainee,
    algorithm: Algorithm,
    result: StepResult,
    action_tokens: float,
    old_logprobs: Tensor | None = None,
) -> None:
    """One policy step on the batch's advantages. A batch whose tokens are all gated moves nothing."""
    accelerator = policy.accelerator
    device, world = accelerator.device, accelerator.num_processes
    assert result.advantages is not None
    advantages = result.advantages
    normalizer = action_tokens
    if algorithm.aggregation == "sequence_mean":
        normalizer = _total(accelerator, int(batch.action_mask.any(-1).sum()))
    counts: dict[str, float] = {}
    pieces: list[Tensor] = []
    entropy = 0.0
    where = iter(buckets.rows)

    def loss_of(part: Batch) -> Tensor:
        nonlocal entropy
        rows = next(where)
        ids, mask = part.input_ids.to(device), part.action_mask.to(device)
        logprobs, spread = policy.module(ids, mask)
        old = _rows_of(old_logprobs, rows, part)
        loss = policy_loss(
            algorithm,
            logprobs=logprobs,
            rollout_logprobs=part.rollout_logprobs.to(device),
            advantages=_rows_of(advantages, rows, part).to(device),
            action_mask=mask,
            old_logprobs=None if old is None else old.to(device),
            normalizer=normalizer / world,
        )
        for name, count in loss.metrics.items():
            counts[name] = counts.get(name, 0.0) + count
        pieces.append(logprobs.detach().float().cpu())
        entropy += float(spread.sum())
        return loss.loss

    policy.backward(buckets.parts, loss_of)
    counts = {name: _total(accelerator, count) for name, count in counts.items()}
    trusted = counts["action_tokens"] - counts["gated_low"] - counts["gated_high"] - counts["nonfinite"]
    result.logprobs = buckets.scatter(pieces, batch.rewards)
    result.figures |= {
        "gate/low_share": counts["gated_low"] / action_tokens,
        "gate/high_share": counts["gated_high"] / action_tokens,
        "gate/share": (counts["gated_low"] + counts["gated_high"]) / action_tokens,
        "gate/nonfinite": counts["nonfinite"],
        "policy/entropy": _total(accelerator, entropy) / action_tokens,
        "policy/advantage_std": _standard_deviation(accelerator, advantages, batch.action_mask),
    }
    result.figures |= ratio_metrics(result.logprobs, batch.rollout_logprobs, batch.action_mask)
    if trusted > 0:
        result.figures["policy/gradient_norm"] = policy.step()
        result.policy_moved = True
    else:
        policy.discard()


def _rows_of(tensor: Tensor | None, rows: list[int], part: Batch) -> Any:
    """The rows [b,t] of a full-batch tensor that belong to a micro-batch (zeros for one that only fills up)."""
    if tensor is None:
        return None
    return tensor[rows, : part.input_ids.shape[1]] if rows else torch.zeros(part.rewards.shape)


def _bootstrap(part: Batch, after: Tensor, settings: StepSettings) -> Tensor | None:
    """The value after the last action of truncated episodes, 0 for the others; None where nothing bootstraps."""
    if settings.truncation != "bootstrap":
        return None
    positions = torch.arange(part.action_mask.shape[1])
    last = torch.where(part.action_mask, positions, 0).amax(-1)
    value = after.gather(1, last[:, None]).squeeze(1)
    return torch.where(part.truncated & part.action_mask.any(-1), value, 0.0)


def _total(accelerator: Accelerator, count: float) -> float:
    """The sum over ranks."""
    return float(accelerator.gather(torch.tensor([float(count)], dtype=torch.float64, device=accelerator.device)).sum())


def _merge(accelerator: Accelerator, statistics: EVStatistics) -> EVStatistics:
    """Statistics of the global batch from those of the ranks."""
    return EVStatistics.from_tensor(accelerator.gather(statistics.to_tensor().to(accelerator.device)[None]))


def _standard_deviation(accelerator: Accelerator, advantages: Tensor, action_mask: Tensor) -> float:
    """The population's standard deviation over the action tokens of the global batch; 1 where it is 0."""
    own = advantages[action_mask].double()
    count, total, squares = (_total(accelerator, float(x)) for x in (own.numel(), own.sum(), own.square().sum()))
    variance = squares / count - (total / count) ** 2 if count else 0.0
    return math.sqrt(variance) if variance > 1e-16 else 1.0


def explained_variance_of(parts: Sequence[Batch], critic: Trainee) -> EVStatistics:
    """Statistics of explained variance over held-out episodes of all ranks, without training."""
    statistics = EVStatistics()
    with torch.no_grad():
        for part in parts:
            values = critic.module(part.input_ids.to(critic.accelerator.device))[0].cpu()
            _, returns = skip_observation_gae(part.rewards, values, part.action_mask, lam=1.0)
            statistics = statistics.merge(EVStatistics.of(returns, values, part.action_mask))
    return _merge(critic.accelerator, statistics)
