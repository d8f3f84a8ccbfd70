"""Single-Rollout Asynchronous Optimization (arXiv 2607.07508), one step.

    claim 128 finished episodes -> K critic updates -> values read again -> advantages -> gated policy update

Read `sao_step` from top to bottom, then the two updates in learner/updates.py. What they leave out lives elsewhere:
where the episodes come from (agent/store), how they become rows (learner/data/batch.py) and micro-batches
(learner/data/buckets.py), the formulas (learner/advantages.py, learner/losses.py) and their choice
(learner/algorithms.py), one optimiser step (learner/model/trainee.py), sums over ranks
(learner/parallel/collectives.py), what is saved (learner/run/checkpoint.py) and published (learner/run/publication.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from torch import Tensor, nn

from learner.advantages import RunningMeanBaseline
from learner.algorithms import Algorithm, compute_advantages
from learner.data.batch import Batch
from learner.data.buckets import Buckets
from learner.model.trainee import Trainee
from learner.parallel.collectives import standard_deviation, total
from learner.updates import (
    StepSettings,
    read_logprobs,
    read_reference,
    read_values,
    update_critic,
    update_policy,
    update_policy_often,
    with_kl_in_reward,
)


@dataclass
class StepResult:
    """Figures of one step; per-token results [B,T] on the CPU; whether each optimiser moved.

    `critic_discarded`, `policy_discarded`: updates that were thrown away, as a gradient or a loss was not finite.
    An optimiser whose every update was discarded has not moved.
    """

    figures: dict[str, float] = field(default_factory=dict)
    logprobs: Tensor | None = None
    values: Tensor | None = None
    advantages: Tensor | None = None
    gated: Tensor | None = field(default=None, kw_only=True)  # see `learner.losses.Gate.codes`; of the last update
    policy_moved: bool = field(default=False, kw_only=True)
    critic_moved: bool = field(default=False, kw_only=True)
    policy_discarded: int = field(default=0, kw_only=True)
    critic_discarded: int = field(default=0, kw_only=True)


def sao_step(
    batch: Batch,
    policy: Trainee,
    critic: Trainee | None,
    algorithm: Algorithm,
    settings: StepSettings,
    running_mean: RunningMeanBaseline | None = None,
    *,
    minibatches: Sequence[Sequence[int]] = (),
    reference: nn.Module | None = None,
) -> StepResult:
    """Learn from one batch: K critic updates, then the policy's. `critic` is None for critic-free presets.

    `batch` is this rank's part; every mean is over the global batch. `minibatches`: this rank's rows of each, where the
    policy is updated more than once; () is one of all rows. `reference`: the policy that `kl_coefficient` pulls to.
    """
    accelerator, figures = policy.accelerator, dict[str, float]()
    action_tokens = total(accelerator, batch.action_tokens)
    if action_tokens == 0:  # nothing to learn from: no optimiser moves
        return StepResult()
    buckets = Buckets.of(batch, accelerator, **settings.cut)
    batch = buckets.batch  # on the device, as everything is until the step is over
    before = None  # the policy's own log-probs at the start of the step, for the algorithms that ask for them
    several = settings.policy_epochs * max(len(minibatches), 1) > 1
    if algorithm.needs_old_logprobs or algorithm.needs_current_logprobs or several or settings.kl_in_reward:
        before = read_logprobs(buckets, policy)
    towards = None if reference is None else read_reference(buckets, reference)
    if settings.kl_in_reward and before is not None and towards is not None:
        batch = with_kl_in_reward(batch, before, towards, settings)
        buckets = replace(buckets, batch=batch)

    values = bootstrap = None
    critic_moved, critic_discarded = False, 0
    if critic is not None and algorithm.critic is not None:
        discarded = critic.discarded
        for update in range(algorithm.critic.updates):
            norm, statistics = update_critic(buckets, critic, algorithm, settings, action_tokens, before)
            if update == 0:  # before the first update the critic has not seen this batch: the honest figure
                figures |= {"critic/gradient_norm": norm, "critic/explained_variance": statistics.value()}
                figures |= {f"norms/critic_{kind}": own for kind, own in critic.norms.items()}
        critic_discarded = critic.discarded - discarded
        critic_moved = critic_discarded < algorithm.critic.updates
        # Again, after all K updates. A discarded one has left the critic as it was, so the policy learns from its
        # values all the same; an episode whose own values are not finite is left out by the policy's loss.
        values, bootstrap = read_values(buckets, critic, settings)

    inputs = batch.credit_inputs(values=values, bootstrap=bootstrap, logprobs=before, running_mean=running_mean)
    advantages = compute_advantages(algorithm, inputs)
    if settings.advantage_scale == "std":
        advantages = advantages / standard_deviation(accelerator, advantages, batch.action_mask)

    logprobs, gated, policy_moved = None, None, False
    discarded = policy.discarded
    if settings.train_policy and several:
        parts = minibatches or [range(batch.size)]
        terms = (advantages, before, towards)
        gated, policy_moved, more = update_policy_often(buckets, policy, algorithm, settings, parts, *terms)
        logprobs, figures = before, figures | more
    elif settings.train_policy:
        read, policy_moved, more = update_policy(
            buckets, policy, algorithm, advantages, action_tokens, before, settings=settings, reference=towards
        )
        logprobs, gated, figures = read["logprobs"], read["gated"], figures | more
    # Where nothing was trusted and some of it was no number, it was no gate that held the policy back.
    no_number = not policy_moved and figures.get("gate/nonfinite", 0.0) > 0
    per_token = [None if tensor is None else tensor.cpu() for tensor in (logprobs, values, advantages)]
    return StepResult(
        figures,
        *per_token,
        gated=None if gated is None else gated.cpu(),
        policy_moved=policy_moved,
        critic_moved=critic_moved,
        policy_discarded=max(policy.discarded - discarded, int(no_number)),
        critic_discarded=critic_discarded,
    )
