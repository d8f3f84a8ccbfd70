"""Held-out evaluation: what is evaluated, when, where, and which result ends the run."""

from __future__ import annotations

import re

from pydantic import Field, model_validator

from agent.estimates import passes
from agent.runtime.settings import EnvConfig, SamplingConfig
from agent.store.config import NAME
from learner.config.section import Section

_PASS_AT = re.compile(r"pass_at_(\d+)$")


class HeldOutSet(Section):
    """One evaluation set with everything settled. `name` "": the only one, which needs none. `every`: in steps."""

    name: str
    env: EnvConfig
    tasks: int
    samples: int
    sampling: SamplingConfig
    max_tokens_per_turn: int
    max_context_tokens: int
    every: int

    @property
    def prefix(self) -> str:
        """What its figures begin with."""
        return f"evaluation/{self.name}" if self.name else "evaluation"

    @property
    def metrics(self) -> tuple[str, ...]:
        """The figures of it that a run may be stopped at: all grow as the policy gets better."""
        return ("success", "reward", *(f"pass_at_{k}" for k in passes(self.samples) if k > 1))


class SamplingOfSet(Section):
    """How the episodes of a set are sampled. None: as in training."""

    sampling: SamplingConfig | None = None
    max_tokens_per_turn: int | None = Field(default=None, ge=1)
    max_context_tokens: int | None = Field(default=None, ge=2)


class EvaluationSetConfig(SamplingOfSet):
    """One of several evaluation sets. What is None is as `evaluation` itself says; `every`: as
    `learner.evaluate_every`."""

    name: str = Field(pattern=NAME)
    env: EnvConfig | None = None
    tasks: int | None = Field(default=None, ge=0)
    samples: int | None = Field(default=None, ge=1)
    every: int | None = Field(default=None, ge=1)


class StopAtConfig(Section):
    """The run ends once `metric` of the set `set` is at least `value`. `set` "": of the only one there is."""

    set: str = ""
    metric: str = "success"
    value: float = Field(allow_inf_nan=False)


class EvaluationConfig(SamplingOfSet):
    """Held-out evaluation: of the environment `env` (None: the training one), or of several `sets`.

    `engines`: so many engines of its own are started, and training goes on beside it. `share`: it takes this share of
    the runtime's episodes, on the engines of training, and training goes on beside it; its tokens may then come from
    several versions. Neither: training waits. `timeout_s`: of one set. `stop_at`: a result that ends the run.
    """

    env: EnvConfig | None = None
    tasks: int = Field(default=256, ge=0)
    samples: int = Field(default=1, ge=1)
    timeout_s: float = Field(default=600.0, gt=0)
    sets: tuple[EvaluationSetConfig, ...] = ()
    engines: int | None = Field(default=None, ge=1)
    share: float | None = Field(default=None, gt=0, le=1)
    stop_at: StopAtConfig | None = None

    @property
    def is_beside(self) -> bool:
        """Whether training goes on meanwhile."""
        return self.engines is not None or self.share is not None

    @model_validator(mode="after")
    def _one_place(self) -> EvaluationConfig:
        if self.engines is not None and self.share is not None:
            raise ValueError("give `engines` (of its own) or `share` (of those of training), not both")
        names = [chosen.name for chosen in self.sets]
        if len(set(names)) < len(names):
            raise ValueError(f"sets: two have the same name among {', '.join(names)}; rename one")
        return self


def check_stop_at(stop_at: StopAtConfig | None, sets: tuple[HeldOutSet, ...]) -> None:
    """Raise `ValueError` for a target that no evaluation of `sets` could ever meet."""
    if stop_at is None:
        return
    key = "evaluation.stop_at"
    chosen = next((one for one in sets if one.name == stop_at.set), None)
    if chosen is None:
        known = ", ".join(repr(one.name) for one in sets)
        raise ValueError(f"{key}.set: there is no evaluation set {stop_at.set!r}; choose one of {known}")
    if stop_at.metric not in chosen.metrics:
        raise ValueError(
            f"{key}.metric: {stop_at.metric!r} is none of {', '.join(chosen.metrics)}"
            + (
                f"; that k needs as many samples, and there are {chosen.samples}"
                if _PASS_AT.match(stop_at.metric)
                else ""
            )
        )
    if stop_at.metric != "reward" and not 0 < stop_at.value <= 1:
        raise ValueError(f"{key}.value: {stop_at.value:g} of a share of episodes; choose one above 0 and at most 1")
