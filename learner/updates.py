"""The two updates of a step, and what is read of policy and critic before, between and after them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.profiler import record_function

from learner.algorithms import Algorithm, compute_value_targets, policy_loss
from learner.data.batch import Batch
from learner.data.buckets import Buckets, Piece
from learner.losses import LossInputs, dis_gate, masked_value_loss
from learner.maths.aggregation import Denominators
from learner.maths.statistics import EVStatistics
from learner.model.trainee import Trainee
from learner.parallel.collectives import merged, standard_deviation, total
from learner.parallel.layout import layout_of
from learner.parallel.sharding import release_gathered
from learner.regularization import entropy_loss, k3_divergence, kl_loss, kl_penalized_rewards


@dataclass(frozen=True)
class StepSettings:
    """What a step needs beside the algorithm's own numbers."""

    advantage_scale: str = "none"  # "std": divide the batch's advantages by their standard deviation
    truncation: str = "terminal"
    micro_batch_tokens: int | None = None  # None: by device, see `learner.data.buckets.micro_batch_tokens`
    max_padding: float = 0.05
    packed: bool = False  # rows of a micro-batch are packed by policy, critic and reference
    entropy: bool = True  # whether the policy's entropy is measured in this step
    train_policy: bool = True  # False: only the critic moves (the steps before the first policy update)
    policy_epochs: int = 1  # how often the policy goes through the batch
    kl_coefficient: float = 0.0
    kl_in_reward: bool = False
    entropy_bonus: float = 0.0

    @property
    def cut(self) -> dict[str, Any]:
        """How `Buckets.of` cuts a batch."""
        return {"max_tokens": self.micro_batch_tokens, "max_padding": self.max_padding, "packed": self.packed}


@record_function("critic update")
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
    normalizer = action_tokens / layout_of(critic.accelerator).averaged_over

    def loss_of(part: Batch, rows: list[int]) -> tuple[Tensor, Piece]:
        values, next_values = critic.module(part.input_ids, lengths=part.lengths)
        before = None if logprobs is None else logprobs[rows, : part.width]
        bootstrap = _bootstrap(part, next_values.detach(), settings)
        inputs = part.credit_inputs(values=values.detach(), bootstrap=bootstrap, logprobs=before)
        targets = compute_value_targets(algorithm, inputs)
        loss = masked_value_loss(values, targets, part.action_mask, normalizer=normalizer)
        return loss, {"targets": targets, "values": values.detach()}

    read = critic.backward(buckets, loss_of)
    statistics = EVStatistics.merge_all(
        EVStatistics.of(read["targets"][rows], read["values"][rows], buckets.batch.action_mask[rows])
        for rows in buckets.rows
    )
    return critic.step(), merged(critic.accelerator, statistics)


@record_function("policy update")
def update_policy(
    buckets: Buckets,
    policy: Trainee,
    algorithm: Algorithm,
    advantages: Tensor,
    action_tokens: float,
    old_logprobs: Tensor | None = None,
    *,
    settings: StepSettings = StepSettings(),  # it is frozen
    reference: Tensor | None = None,
) -> tuple[dict[str, Tensor], bool, dict[str, float]]:
    """One policy step on the advantages [B,T]: what was `gated`, `logprobs` before it, both [B,T]; whether the policy
    moved; figures.

    A batch whose tokens are all gated moves nothing, and so does an update that is discarded.
    """
    accelerator, mask = policy.accelerator, buckets.batch.action_mask
    normalizer = action_tokens
    if algorithm.aggregation == "sequence_mean":
        normalizer = total(accelerator, mask.any(-1).sum())
    trusted = None
    if algorithm.denominator == "trusted":
        trusted = normalizer
        if algorithm.aggregation == "token_mean":
            trusted = count_trusted(buckets, policy, algorithm, advantages)
    shares = layout_of(accelerator).averaged_over
    wants_entropy = settings.entropy or settings.entropy_bonus > 0

    def loss_of(part: Batch, rows: list[int]) -> tuple[Tensor, Piece]:
        logprobs, entropy = policy.module(*part.policy_inputs, entropy=wants_entropy, lengths=part.lengths)
        inputs = LossInputs(
            logprobs=logprobs,
            rollout_logprobs=part.rollout_logprobs,
            advantages=advantages[rows, : part.width],
            action_mask=part.action_mask,
            old_logprobs=None if old_logprobs is None else old_logprobs[rows, : part.width],
            normalizer=normalizer / shares if trusted is None else None,
            trusted_normalizer=None if trusted is None else trusted / shares,
        )
        loss = policy_loss(algorithm, inputs)
        assert loss.gate is not None
        piece: Piece = {
            "logprobs": logprobs.detach().float(),
            "gated": loss.gate.codes(),
            "entropy": entropy.detach().sum(),
            **loss.metrics,
        }
        whole, options = loss.loss, Denominators(normalizer=normalizer / shares, aggregation=algorithm.aggregation)
        if reference is not None:
            towards = reference[rows, : part.width]
            piece = {**piece, "kl": k3_divergence(logprobs.detach(), towards, part.action_mask).sum()}
            if settings.kl_coefficient and not settings.kl_in_reward:
                pull = kl_loss(logprobs, towards, part.action_mask, **options)
                whole = whole + settings.kl_coefficient * pull
        if settings.entropy_bonus:
            whole = whole + settings.entropy_bonus * entropy_loss(entropy, part.action_mask, **options)
        return whole, piece

    read = policy.backward(buckets, loss_of)
    gated_low, gated_high, nonfinite, entropy = (
        total(accelerator, read[name]) for name in ("gated_low", "gated_high", "nonfinite", "entropy")
    )
    figures = {
        "gate/low_share": gated_low / action_tokens,
        "gate/high_share": gated_high / action_tokens,
        "gate/share": (gated_low + gated_high) / action_tokens,
        "gate/nonfinite": nonfinite,
        "policy/advantage_std": standard_deviation(accelerator, advantages, mask),
    }
    if wants_entropy:
        figures["policy/entropy"] = entropy / action_tokens
    routing = getattr(policy.unwrapped, "routing", None)
    if routing is not None:
        figures |= routing.counted(lambda counts: accelerator.reduce(counts.to(accelerator.device)).cpu())
    if reference is not None:
        figures["policy/kl"] = total(accelerator, read["kl"]) / action_tokens
    discarded = policy.discarded
    if moved := action_tokens > gated_low + gated_high + nonfinite:
        figures["policy/gradient_norm"] = policy.step()
        figures |= {f"norms/policy_{kind}": own for kind, own in policy.norms.items()}
        moved = policy.discarded == discarded
    else:
        policy.discard()
    return read, moved, figures


def update_policy_often(
    buckets: Buckets,
    policy: Trainee,
    algorithm: Algorithm,
    settings: StepSettings,
    minibatches: Sequence[Sequence[int]],
    advantages: Tensor,
    old_logprobs: Tensor | None,
    reference: Tensor | None,
) -> tuple[Tensor, bool, dict[str, float]]:
    """`settings.policy_epochs` times an update on each of the minibatches, advantages and old log-probs as they are.

    Returns what the last update of each token did with it [B,T], whether any moved the policy, and the figures' means.
    Every rank goes through as many updates: one that has no row of a minibatch takes part with tokens that don't count.
    """
    batch, accelerator = buckets.batch, policy.accelerator
    gated = torch.zeros(batch.input_ids.shape, dtype=torch.int8, device=batch.input_ids.device)
    found: list[dict[str, float]] = []
    updates = 0
    for _ in range(settings.policy_epochs):
        for chosen in minibatches:
            rows = list(chosen) or [0]
            part = batch.rows(rows) if chosen else batch.rows(rows).without_actions()
            if (tokens := total(accelerator, part.action_tokens)) == 0:
                continue
            own = Buckets.of(part, accelerator, **settings.cut)
            terms = [None if t is None else t[rows, : part.width] for t in (old_logprobs, reference)]
            read, moved, figures = update_policy(
                own,
                policy,
                algorithm,
                advantages[rows, : part.width],
                tokens,
                terms[0],
                settings=settings,
                reference=terms[1],
            )
            updates += moved
            found.append(figures)
            if chosen:
                gated[rows, : part.width] = read["gated"]
    names = dict.fromkeys(name for figures in found for name in figures)
    seen = {name: [figures[name] for figures in found if name in figures] for name in names}
    means = {name: sum(values) / len(values) for name, values in seen.items()}
    return gated, updates > 0, means | {"policy/updates": float(updates)}


@record_function("values read")
def read_values(buckets: Buckets, critic: Trainee, settings: StepSettings) -> tuple[Tensor, Tensor | None]:
    """values[B,T] and, where truncated episodes bootstrap, what each is taken to be worth from its end on, [B]."""

    def values_of(part: Batch, rows: list[int]) -> Piece:
        values, next_values = critic.module(part.input_ids, lengths=part.lengths)
        bootstrap = _bootstrap(part, next_values, settings)
        return {"values": values} | ({} if bootstrap is None else {"bootstrap": bootstrap})

    with critic.reading():
        read = buckets.map(values_of)
    return read["values"], read.get("bootstrap")


@record_function("log-probs read")
def read_logprobs(buckets: Buckets, policy: Trainee) -> Tensor:
    """logprobs[B,T] of the policy as it stands."""
    with policy.reading():
        read = buckets.map(lambda part, _: {"logprobs": _logprobs(policy.module, part, part.policy_inputs)})
    return read["logprobs"]


@record_function("reference read")
@torch.no_grad()
def read_reference(buckets: Buckets, reference: nn.Module) -> Tensor:
    """logprobs[B,T] of the reference, which no optimiser knows."""
    read = buckets.map(lambda part, _: {"logprobs": _logprobs(reference, part, part.policy_inputs[:2])})
    release_gathered(reference)
    return read["logprobs"]


def _logprobs(policy: nn.Module, part: Batch, inputs: tuple[Tensor, ...]) -> Tensor:
    logprobs: Tensor = policy(*inputs, entropy=False, lengths=part.lengths)[0]
    return logprobs


def with_kl_in_reward(batch: Batch, logprobs: Tensor, reference: Tensor, settings: StepSettings) -> Batch:
    """The batch with every action token's rewards less its divergence from the reference."""
    rewards = kl_penalized_rewards(
        batch.rewards, logprobs, reference, batch.action_mask, coefficient=settings.kl_coefficient
    )
    return replace(batch, rewards=rewards)


def count_trusted(buckets: Buckets, policy: Trainee, algorithm: Algorithm, advantages: Tensor) -> float:
    """How many tokens of the global batch the gate lets through as the policy stands: a forward of its own."""
    batch = buckets.batch
    gate = dis_gate(
        read_logprobs(buckets, policy),
        batch.rollout_logprobs,
        batch.action_mask & advantages.isfinite(),
        eps_low=algorithm.eps_low,
        eps_high=algorithm.eps_high,
    )
    return total(policy.accelerator, gate.trusted.sum())


def _bootstrap(part: Batch, next_values: Tensor, settings: StepSettings) -> Tensor | None:
    return part.bootstrap(next_values) if settings.truncation == "bootstrap" else None
