"""A row of the table of algorithms: which parts a method has, and its numbers."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from learner.baselines import RunningMeanBaseline
from learner.losses import Aggregation, Denominator, log_bounds

Baseline = Literal["critic", "vtrace", "group", "leave_one_out", "running_mean", "batch_mean"]
RatioRule = Literal["dis", "ppo_clip", "gspo", "icepop", "sequence_trust", "none"]
Granularity = Literal["token", "step_average", "step_last"]
Trainable = Literal["experts", "mlp", "lora", "all"]


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

    `family`: the preset of which this is an ablation; what a recipe sets for that one holds here too, see
    `learner.methods.options.carried`. `lam` is the policy's lambda; None means adaptive, 1 - 1/(`alpha` * l). The
    critic's is always 1. `eps_low` and `eps_high` are the ends of the ratio rule's interval, 1 - eps_low and
    1 + eps_high; `mismatch` is IcePop's, `max_divergence` FlashREINFORCE's.
    """

    name: str
    source: str
    family: str = ""
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
    max_divergence: float = 3e-3

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
        if not 0 <= self.mismatch[0] <= self.mismatch[1] or self.mismatch[1] == 0:
            raise ValueError(f"{self.name}: mismatch is {self.mismatch}, expected two rising numbers of at least 0")
        if not self.max_divergence >= 0:
            raise ValueError(f"{self.name}: max_divergence is {self.max_divergence}, expected a number of at least 0")
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
    def needs_whole_batch(self) -> bool:
        """Whether advantages compare all episodes of a batch, so that one process must hold them all."""
        return self.baseline == "batch_mean"

    @property
    def needs_old_logprobs(self) -> bool:
        """Whether the loss wants the learner's own log-probs of the start of the step, next to the engine's."""
        return self.ratio in ("ppo_clip", "gspo", "icepop")

    @property
    def needs_current_logprobs(self) -> bool:
        """Whether advantages and value targets depend on the policy's present log-probs."""
        return self.baseline == "vtrace"

    @property
    def trusted_log_ratios(self) -> tuple[float, float]:
        """The ends of log pi - log mu between which a token is learned from; infinite where the rule asks another
        ratio, or none."""
        if self.ratio == "dis":
            return log_bounds(self.eps_low, self.eps_high)
        if self.ratio == "icepop":
            low, high = self.mismatch
            return (math.log(low) if low > 0 else -math.inf), math.log(high)
        return -math.inf, math.inf
