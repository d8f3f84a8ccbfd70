"""An optimiser and its schedule."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from learner.config.section import Section


class OptimizerConfig(Section):
    """AdamW with linear warm-up (steps) and a gradient-norm clip.

    Then the rate falls to `final_lr_ratio` of it over the steps that are left, on a line or along half a cosine. None:
    a line stays at 1, a cosine goes to 0.

    `kind`: "adamw" is PyTorch's, all parameters in one kernel; "adamw_8bit" is torchao's, whose moments take a quarter
    of the memory, and which rounds bfloat16 weights at random, so that updates of 1e-6 are kept on average.
    `offload`: between steps the moments rest in the host's memory, for learners on GPUs.
    """

    kind: Literal["adamw", "adamw_8bit"] = "adamw"
    lr: float
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8
    weight_decay: float = 0.0
    warmup_steps: int = 10
    clip_norm: float = 1.0
    schedule: Literal["linear", "cosine"] = "linear"
    final_lr_ratio: float | None = Field(default=None, ge=0, le=1)
    offload: bool = False

    @model_validator(mode="after")
    def _moments_that_travel(self) -> OptimizerConfig:
        if self.offload and self.kind != "adamw":
            raise ValueError(f"offload is for kind 'adamw'; the moments of {self.kind!r} are small already")
        return self

    @property
    def falls_to(self) -> float:
        """The share of the rate that is left at the end."""
        if self.final_lr_ratio is not None:
            return self.final_lr_ratio
        return 0.0 if self.schedule == "cosine" else 1.0
