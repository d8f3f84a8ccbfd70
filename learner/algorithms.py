# ruff: noqa: F722
"""The table of algorithms: each is data, put together from the parts of `advantages` and `losses`.

`get_algorithm(name)` gives a preset, `dataclasses.replace(preset, eps_high=3.0)` a variant. The learner asks three
questions of it, whatever it is: `compute_value_targets`, `compute_advantages`, `policy_loss`.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal, TypeVar

from torch import Tensor

from learner.advantages import (
    RunningMeanBaseline,
    episode_rewards,
    group_advantages,
    leave_one_out_advantages,
    length_adaptive_lambda,
    normalize_by_task,
    skip_observation_gae,
    spread_over_actions,
    step_level_gae,
    turn_counts,
    vtrace,
)
from learner.losses import (
    Aggregation,
    Denominator,
    PolicyLoss,
    dis_policy_loss,
    gspo_loss,
    icepop_loss,
    log_bounds,
    ppo_clip_loss,
    reinforce_loss,
)
from learner.tensors import as_mask

if TYPE_CHECKING:
    from jaxtyping import Float, Int, Shaped

Baseline = Literal["critic", "vtrace", "group", "leave_one_out", "running_mean"]
RatioRule = Literal["dis", "ppo_clip", "gspo", "icepop", "none"]
Granularity = Literal["token", "step_average", "step_last"]
Trainable = Literal["experts", "mlp", "lora", "all"]
_T = TypeVar("_T")


@dataclass(frozen=True)
class CriticSettings:
    """How the critic is trained: `updates` (K) before each policy update, and which of its parameters move.

    `experts` trains the MoE projections (where a dense model's MLP stands in) and the head, attention frozen; `mlp`
    the MLP of a dense model; `lora` adapters; `all` everything.
    """

    updates: int = 2
    trainable: Trainable = "experts"

    def __post_init__(self) -> None:
        if self.updates < 1:
            raise ValueError(f"critic.updates is {self.updates}, expected at least 1")


@dataclass(frozen=True)
class RunningMeanSettings:
    """The history of a `running_mean` baseline: the last `window` rewards of the same prompt, or of all."""

    window: int = 8
    per_prompt: bool = True
    include_current: bool = False

    def build(self) -> RunningMeanBaseline:
        """A baseline with an empty history; its state belongs into the checkpoint."""
        return RunningMeanBaseline(self.window, self.per_prompt, self.include_current)


@dataclass(frozen=True)
class Algorithm:
    """One row of the table. Impossible combinations raise `ValueError` naming the key.

    `lam` is the policy's lambda; None means adaptive, 1 - 1/(`alpha` * l). The critic's is always 1. `eps_low` and
    `eps_high` are the ends of the ratio rule's interval, 1 - eps_low and 1 + eps_high; `mismatch` is IcePop's.
    """

    name: str
    source: str
    baseline: Baseline = "critic"
    ratio: RatioRule = "dis"
    granularity: Granularity = "token"
    samples_per_prompt: int = 1
    critic: CriticSettings | None = CriticSettings()
    aggregation: Aggregation = "token_mean"
    denominator: Denominator = "action"
    eps_low: float = 0.3
    eps_high: float = 5.0
    mismatch: tuple[float, float] = (0.5, 5.0)
    gamma: float = 1.0
    lam: float | None = None
    alpha: float = 1.5
    normalize_group: bool = True
    normalize_task: bool = False
    running_mean: RunningMeanSettings | None = None
    rho_bar: float = 1.0
    c_bar: float = 1.0

    def __post_init__(self) -> None:
        log_bounds(self.eps_low, self.eps_high)
        if self.needs_critic != (self.critic is not None):
            verb = "needs" if self.needs_critic else "has no use for"
            raise ValueError(f"{self.name}: baseline {self.baseline!r} {verb} critic settings")
        if self.needs_groups != (self.samples_per_prompt > 1):
            raise ValueError(
                f"{self.name}: samples_per_prompt is {self.samples_per_prompt}, and baseline {self.baseline!r} "
                + ("compares the samples of one prompt: at least 2" if self.needs_groups else "needs only 1")
            )
        if self.granularity != "token" and self.baseline != "critic":
            raise ValueError(f"{self.name}: granularity {self.granularity!r} needs baseline 'critic'")
        if (self.baseline == "running_mean") != (self.running_mean is not None):
            raise ValueError(f"{self.name}: running_mean settings go with baseline 'running_mean', and only with it")
        if self.denominator != "action" and self.ratio != "dis":
            raise ValueError(f"{self.name}: denominator {self.denominator!r} is an option of ratio 'dis' only")
        if self.lam is not None and not 0 <= self.lam <= 1:
            raise ValueError(f"{self.name}: lam is {self.lam}, expected a number in [0, 1], or null for adaptive")
        if not 0 <= self.gamma <= 1:
            raise ValueError(f"{self.name}: gamma is {self.gamma}, expected a number in [0, 1]")

    @property
    def needs_critic(self) -> bool:
        """Whether values are read at all."""
        return self.baseline in ("critic", "vtrace")

    @property
    def needs_groups(self) -> bool:
        """Whether several episodes of one prompt must be complete before any of them can be trained: the barrier."""
        return self.baseline in ("group", "leave_one_out")

    @property
    def needs_old_logprobs(self) -> bool:
        """Whether the loss wants the learner's own log-probs of the start of the step, next to the engine's."""
        return self.ratio in ("ppo_clip", "gspo", "icepop")

    @property
    def needs_current_logprobs(self) -> bool:
        """Whether advantages and value targets depend on the policy's present log-probs."""
        return self.baseline == "vtrace"


_FULL = CriticSettings(updates=1, trainable="all")
_SAO = Algorithm("sao", "SAO, arXiv 2607.07508")
_GRPO = Algorithm(
    "grpo",
    "DeepSeekMath, arXiv 2402.03300, with DAPO's clip-higher, arXiv 2503.14476",
    baseline="group",
    ratio="ppo_clip",
    samples_per_prompt=8,
    critic=None,
    aggregation="sequence_mean",
    eps_low=0.2,
    eps_high=0.28,
)

ALGORITHMS: dict[str, Algorithm] = {
    a.name: a
    for a in (
        _SAO,
        replace(_SAO, name="sao_k1", source="SAO, table 3: without faster value updates", critic=CriticSettings(1)),
        replace(
            _SAO,
            name="sao_full_critic",
            source="SAO, table 3: without frozen attention",
            critic=CriticSettings(2, "all"),
        ),
        replace(_SAO, name="sao_dis_only", source="SAO, table 1: DIS only", critic=_FULL),
        replace(_SAO, name="sao_step_average", source="SAO, table 5: step level, average", granularity="step_average"),
        replace(_SAO, name="sao_step_last", source="SAO, table 5: step level, last token", granularity="step_last"),
        replace(
            _SAO,
            name="sao_running_mean",
            source="SAO, table 4: running mean of the prompt's last 8 rewards",
            baseline="running_mean",
            critic=None,
            running_mean=RunningMeanSettings(),
        ),
        replace(
            _SAO,
            name="vapo",
            source="VAPO, arXiv 2504.05118; SAO, table 4: without DIS",
            ratio="ppo_clip",
            critic=_FULL,
            eps_low=0.2,
            eps_high=0.28,
        ),
        replace(
            _SAO,
            name="ppo",
            source="PPO, arXiv 1707.06347",
            ratio="ppo_clip",
            critic=_FULL,
            aggregation="sequence_mean",
            eps_low=0.2,
            eps_high=0.2,
            lam=0.95,
        ),
        _GRPO,
        replace(
            _GRPO,
            name="grpo_dis",
            source="SAO, table 1: GRPO with DIS",
            ratio="dis",
            aggregation="token_mean",
            eps_low=_SAO.eps_low,
            eps_high=_SAO.eps_high,
        ),
        # The log-prob of an episode is the sum over its tokens, so a long one is not divided by its length.
        replace(
            _GRPO,
            name="rloo",
            source="RLOO, arXiv 2402.14740",
            baseline="leave_one_out",
            ratio="none",
            aggregation="token_mean",
        ),
        replace(_GRPO, name="gspo", source="GSPO, arXiv 2507.18071", ratio="gspo", eps_low=3e-4, eps_high=4e-4),
        replace(_GRPO, name="icepop", source="IcePop, arXiv 2510.18855", ratio="icepop"),
        replace(
            _SAO,
            name="impala",
            source="IMPALA, arXiv 1802.01561",
            baseline="vtrace",
            ratio="none",
            critic=_FULL,
        ),
        replace(
            _GRPO,
            name="agentrl",
            source="AgentRL, arXiv 2510.04206",
            aggregation="token_mean",
            normalize_task=True,
        ),
    )
}


def get_algorithm(name: str) -> Algorithm:
    """The preset called `name`; raises `ValueError` with the names there are."""
    if name not in ALGORITHMS:
        raise ValueError(f"unknown algorithm {name!r}; there are {', '.join(ALGORITHMS)}")
    return ALGORITHMS[name]


def compute_value_targets(
    algorithm: Algorithm,
    *,
    rewards: Float[Tensor, "B T"],
    values: Float[Tensor, "B T"],
    action_mask: Shaped[Tensor, "B T"],
    logprobs: Float[Tensor, "B T"] | None = None,
    rollout_logprobs: Float[Tensor, "B T"] | None = None,
    bootstrap: Float[Tensor, " B"] | None = None,
) -> Float[Tensor, "B T"]:
    """What the critic is fitted to, [B, T] and detached: returns with lambda 1, or V-trace's vs.

    Called again before each of the K updates: with a bootstrap, or with V-trace, the targets follow the values.
    """
    if not algorithm.needs_critic:
        raise ValueError(f"{algorithm.name} has no critic, so there are no value targets")
    if algorithm.baseline == "vtrace":
        return _vtrace(algorithm, rewards, values, action_mask, logprobs, rollout_logprobs, bootstrap)[0]
    detached = values.detach()
    return skip_observation_gae(rewards, detached, action_mask, gamma=algorithm.gamma, lam=1.0, bootstrap=bootstrap)[1]


def compute_advantages(
    algorithm: Algorithm,
    *,
    rewards: Float[Tensor, "B T"],
    action_mask: Shaped[Tensor, "B T"],
    values: Float[Tensor, "B T"] | None = None,
    turn_ids: Int[Tensor, "B T"] | None = None,
    logprobs: Float[Tensor, "B T"] | None = None,
    rollout_logprobs: Float[Tensor, "B T"] | None = None,
    bootstrap: Float[Tensor, " B"] | None = None,
    group_ids: Int[Tensor, " B"] | Sequence[Hashable] | None = None,
    prompt_ids: Sequence[str | int] | None = None,
    task_ids: Int[Tensor, " B"] | Sequence[Hashable] | None = None,
    running_mean: RunningMeanBaseline | None = None,
) -> Float[Tensor, "B T"]:
    """The advantage of every action token of a batch, [B, T] and detached; what the row of the table needs is read.

    critic: `values` (and `turn_ids` for the step presets); vtrace: also both log-probs; group baselines: `group_ids`,
    all samples of a prompt in this call; running_mean: `running_mean`, in row order, and `prompt_ids` if it is kept
    per prompt; agentrl: `task_ids`, the kind of task of each episode. A missing one raises `ValueError`.
    """
    mask = as_mask(action_mask)
    if algorithm.baseline == "critic":
        values = _given(algorithm, "values", values).detach()
        if algorithm.granularity == "token":
            lam = _policy_lambda(algorithm, mask.sum(1))
            advantages, _ = skip_observation_gae(
                rewards, values, mask, gamma=algorithm.gamma, lam=lam, bootstrap=bootstrap
            )
        else:
            turn_ids = _given(algorithm, "turn_ids", turn_ids)
            advantages = step_level_gae(
                rewards,
                values,
                mask,
                turn_ids,
                gamma=algorithm.gamma,
                lam=_policy_lambda(algorithm, turn_counts(mask, turn_ids)),
                pooling="average" if algorithm.granularity == "step_average" else "last",
                bootstrap=bootstrap,
            )
    elif algorithm.baseline == "vtrace":
        values = _given(algorithm, "values", values)
        advantages = _vtrace(algorithm, rewards, values, mask, logprobs, rollout_logprobs, bootstrap)[1]
    else:
        totals = episode_rewards(rewards, mask)
        if algorithm.baseline == "running_mean":
            per_episode = _running_mean(algorithm, totals, prompt_ids, running_mean)
        else:
            if group_ids is None:
                raise _missing(algorithm, "group_ids")
            if algorithm.baseline == "group":
                per_episode = group_advantages(totals, group_ids, normalize=algorithm.normalize_group)
            else:
                per_episode = leave_one_out_advantages(totals, group_ids)
        advantages = spread_over_actions(per_episode, mask)
    if algorithm.normalize_task:
        if task_ids is None:
            raise _missing(algorithm, "task_ids")
        advantages = normalize_by_task(advantages, mask, task_ids)
    return advantages


def policy_loss(
    algorithm: Algorithm,
    *,
    logprobs: Float[Tensor, "B T"],
    rollout_logprobs: Float[Tensor, "B T"],
    advantages: Float[Tensor, "B T"],
    action_mask: Shaped[Tensor, "B T"],
    old_logprobs: Float[Tensor, "B T"] | None = None,
    normalizer: float | None = None,
) -> PolicyLoss:
    """The policy loss of the algorithm's ratio rule, with its bounds and aggregation; see `learner.losses`.

    `old_logprobs` are needed where `algorithm.needs_old_logprobs`. A batch in one call may leave `normalizer` out;
    with `denominator="trusted"` it must, for a count of action tokens would silently undo that option.
    """
    if algorithm.denominator == "trusted" and normalizer is not None:
        raise ValueError(
            f"{algorithm.name}: denominator 'trusted' divides by the trusted tokens of one call, so it takes no "
            "normalizer; use 'action' where a batch comes in micro-batches or ranks"
        )
    if algorithm.ratio == "none":
        return reinforce_loss(
            logprobs, advantages, action_mask, normalizer=normalizer, aggregation=algorithm.aggregation
        )
    if algorithm.ratio == "dis":
        return dis_policy_loss(
            logprobs,
            rollout_logprobs,
            advantages,
            action_mask,
            eps_low=algorithm.eps_low,
            eps_high=algorithm.eps_high,
            normalizer=normalizer,
            aggregation=algorithm.aggregation,
            denominator=algorithm.denominator,
        )
    old = _given(algorithm, "old_logprobs", old_logprobs)
    if algorithm.ratio == "icepop":
        alpha, beta = algorithm.mismatch
        return icepop_loss(
            logprobs,
            rollout_logprobs,
            advantages,
            action_mask,
            old,
            eps_low=algorithm.eps_low,
            eps_high=algorithm.eps_high,
            alpha=alpha,
            beta=beta,
            normalizer=normalizer,
            aggregation=algorithm.aggregation,
        )
    loss = ppo_clip_loss if algorithm.ratio == "ppo_clip" else gspo_loss
    return loss(
        logprobs,
        rollout_logprobs,
        advantages,
        action_mask,
        old,
        eps_low=algorithm.eps_low,
        eps_high=algorithm.eps_high,
        normalizer=normalizer,
        aggregation=algorithm.aggregation,
    )


def _given(algorithm: Algorithm, name: str, value: _T | None) -> _T:
    if value is None:
        raise _missing(algorithm, name)
    return value


def _missing(algorithm: Algorithm, name: str) -> ValueError:
    return ValueError(f"{algorithm.name} needs {name}")


def _policy_lambda(algorithm: Algorithm, counts: Int[Tensor, " B"]) -> float | Float[Tensor, " B"]:
    return length_adaptive_lambda(counts, algorithm.alpha) if algorithm.lam is None else algorithm.lam


def _vtrace(
    algorithm: Algorithm,
    rewards: Float[Tensor, "B T"],
    values: Float[Tensor, "B T"],
    action_mask: Shaped[Tensor, "B T"],
    logprobs: Float[Tensor, "B T"] | None,
    rollout_logprobs: Float[Tensor, "B T"] | None,
    bootstrap: Float[Tensor, " B"] | None,
) -> tuple[Float[Tensor, "B T"], Float[Tensor, "B T"]]:
    return vtrace(
        _given(algorithm, "logprobs", logprobs),
        _given(algorithm, "rollout_logprobs", rollout_logprobs),
        rewards,
        values.detach(),
        action_mask,
        gamma=algorithm.gamma,
        rho_bar=algorithm.rho_bar,
        c_bar=algorithm.c_bar,
        bootstrap=bootstrap,
    )


def _running_mean(
    algorithm: Algorithm,
    totals: Float[Tensor, " B"],
    prompt_ids: Sequence[str | int] | None,
    running_mean: RunningMeanBaseline | None,
) -> Float[Tensor, " B"]:
    baseline = _given(algorithm, "running_mean", running_mean)
    prompts: Sequence[str | int | None] = prompt_ids if prompt_ids is not None else [None] * len(totals)
    if len(prompts) != len(totals):
        raise ValueError(f"prompt_ids has {len(prompts)} entries, expected {len(totals)}: one an episode")
    pairs = zip(totals.tolist(), prompts, strict=True)
    return totals.new_tensor([baseline.advantage(reward, prompt) for reward, prompt in pairs])
