"""The update: an algorithm, and what the recipe changes of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from pydantic import Field, model_validator

from learner.config.methods import MethodsConfig
from learner.config.operations import ProfileConfig
from learner.config.optimizer import OptimizerConfig
from learner.config.section import Section
from learner.config.stages import HeldOutProbeConfig, JudgedGateConfig

_STEPS = 60
ENDLESS = 2**31 - 1
"""`learner.steps` of a run without an end."""


class KLConfig(Section):
    """A pull to a reference policy, by the k3 estimate of the divergence, in the loss or in the rewards.

    `reference`: "start" is the policy that RL begins from, else the folder of a model. It is held beside the policy.
    """

    coefficient: float = Field(gt=0)
    form: Literal["loss", "reward"] = "loss"
    reference: Literal["start"] | Path = "start"


class LearnerConfig(MethodsConfig):
    """The update: a method with its numbers (see `MethodConfig`), and how it is run.

    `critic` is for the methods that have one. `critic_only_steps`: before the policy's first.
    `policy_epochs` and `policy_minibatches`: how often the policy goes through a batch, and in how many parts of whole
    groups; their product is its updates a step. `entropy_bonus`: weight of the mean entropy. `skip_constant_groups`:
    groups of equal rewards are left out of every mean.
    `steps`: the last one. None is 60; with `online` it is no end (`ENDLESS`).
    `online`: episodes come from a server whenever users have judged them (docs/online.md). Then nothing is evaluated,
    no environment is needed, and silence is no fault. `discard_limit`: an update whose gradient or loss is not finite
    is discarded; after so many steps in a row with one the run ends.
    `checkpoint_every`: steps between two checkpoints, which are written while training goes on; a batch counts as
    trained (its claim is committed) once a checkpoint that holds it is on the disk. `commit_within`: training waits for
    the disk rather than be more than so many steps ahead of it (None: as far as `store.max_lag` lets it), so that is
    what a crash costs at most.
    `keep_checkpoints`: how many stay on the disk.
    `packing`: rows of like length lie beside each other, padded by at most `max_padding` ("buckets"), or behind each
    other without padding ("packed").
    `freeze_router`: no router of the policy is trained. `routing`: a mixture's tokens go to the experts that the
    trainer chooses ("own"), the same with figures of it ("watched"), or to those that the engine chose and the episode
    carries ("replayed").
    `record_batches`: the batches of so many last updates are kept, so that `learner.replay` can make them again.
    `profile`: steps whose time is looked into.
    """

    steps: int = Field(default=_STEPS, ge=0)
    batch_size: int = 128
    policy: OptimizerConfig = OptimizerConfig(lr=1e-6)
    critic: OptimizerConfig = OptimizerConfig(lr=5e-6)
    critic_only_steps: int = Field(default=0, ge=0)
    policy_epochs: int = Field(default=1, ge=1)
    policy_minibatches: int = Field(default=1, ge=1)
    kl: KLConfig | None = None
    entropy_bonus: float = Field(default=0.0, ge=0)
    skip_constant_groups: bool = False
    freeze_router: bool = False
    routing: Literal["own", "watched", "replayed"] = "own"
    online: bool = False
    held_out_probe: HeldOutProbeConfig | None = None
    judged_gate: JudgedGateConfig | None = None
    advantage_scale: Literal["none", "std"] = "none"
    truncation: Literal["terminal", "bootstrap", "drop"] = "terminal"
    micro_batch_tokens: int | None = Field(default=None, ge=1)  # None: 4,096 on CPUs, 16,384 elsewhere
    max_padding: float = 0.05
    packing: Literal["buckets", "packed"] | None = None  # None: packed where attention is transformers' flash attention
    logprob_chunk: int = 8_192
    checkpoint_every: int = 1
    commit_within: int | None = None
    keep_checkpoints: int | None = Field(default=None, ge=1)  # None: 2, online as many as versions may be gone back to
    evaluate_every: int = 10
    entropy_every: int = Field(default=1, ge=0)  # steps between two measurements of the policy's entropy; 0: none
    shuffle_rewards: bool = False
    parity_threshold: float = 0.05
    probe_every: int = Field(default=1, ge=0)  # publications between two comparisons of engines and trainer; 0: none
    rollout_patience_s: float = 120.0
    publication_timeout_s: float = 60.0
    collective_timeout_s: float = 600.0
    discard_limit: int = Field(default=5, ge=1)
    tracker: str | None = "tensorboard"
    record_batches: int = Field(default=0, ge=0)
    profile: ProfileConfig | None = None

    @model_validator(mode="before")
    @classmethod
    def _as_long_as_people_judge(cls, data: Any) -> Any:
        if isinstance(data, dict) and data.get("steps") is None:
            return {**data, "steps": ENDLESS if data.get("online") is True else _STEPS}
        return data

    @model_validator(mode="after")
    def _rates_have_an_end(self) -> LearnerConfig:
        if self.steps >= ENDLESS:
            for key in ("policy", "critic"):
                if getattr(self, key).falls_to != 1.0:
                    raise ValueError(
                        f"{key}: a rate that falls (schedule, final_lr_ratio) needs a last step to fall towards, and a "
                        "run that learns online has none by default; set steps, or leave them out"
                    )
        return self

    @model_validator(mode="after")
    def _known_algorithm(self) -> LearnerConfig:
        algorithm = self.resolve()
        if self.batch_size % algorithm.samples_per_prompt:
            raise ValueError(
                f"batch_size {self.batch_size} is no multiple of the {algorithm.samples_per_prompt} samples "
                f"a prompt of {self.algorithm!r}"
            )
        if self.critic_only_steps and algorithm.critic is None:
            raise ValueError(f"critic_only_steps has no effect with {self.algorithm!r}, which has no critic")
        if self.skip_constant_groups and not algorithm.needs_groups:
            raise ValueError(f"skip_constant_groups has no effect with {self.algorithm!r}, which compares no groups")
        for key in ("policy_epochs", "policy_minibatches"):
            if getattr(self, key) > 1 and algorithm.ratio == "none":
                raise ValueError(
                    f"{key} is {getattr(self, key)}, and {self.algorithm!r} has no ratio: nothing would tell that the "
                    "policy has moved since the batch's first update"
                )
        if self.policy_minibatches > self.batch_size // algorithm.samples_per_prompt:
            raise ValueError(
                f"policy_minibatches {self.policy_minibatches} is more than the "
                f"{self.batch_size // algorithm.samples_per_prompt} prompts of a batch, and a prompt is never split"
            )
        if self.truncation == "bootstrap" and not algorithm.needs_critic:
            raise ValueError(f"truncation 'bootstrap' needs a critic, and {self.algorithm!r} has none")
        if self.evaluate_every < 1 or self.checkpoint_every < 1:
            raise ValueError("evaluate_every and checkpoint_every must be at least 1")
        kept = self.keep_checkpoints or 2
        if self.record_batches > (held := (kept - 1) * self.checkpoint_every):
            raise ValueError(
                f"record_batches {self.record_batches}: keep_checkpoints {kept} lets only the last "
                f"{held} updates be made again from a checkpoint; raise it"
            )
        if self.judged_gate is not None and (not self.online or self.record_batches):
            what = "record_batches, which replays whole batches" if self.record_batches else "tasks that are graded"
            raise ValueError(f"judged_gate is for conversations that users judge (learner.online), not for {what}")
        if self.record_batches and self.held_out_probe is not None and self.checkpoint_every > 1:
            raise ValueError(
                "record_batches with held_out_probe needs checkpoint_every 1: a step that was dropped leaves no state "
                "to begin the next one from"
            )
        if self.commit_within is not None and self.commit_within < self.checkpoint_every:
            raise ValueError(
                f"commit_within {self.commit_within} is below checkpoint_every {self.checkpoint_every}: a batch is "
                "committed with the checkpoint that holds it, and would not have one by then"
            )
        return self
