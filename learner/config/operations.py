"""What a run leaves for whoever looks after it: traces of a profiler, models on a hub. Nothing here changes a step."""

from __future__ import annotations

import re
from typing import Literal

from pydantic import Field, field_validator

from learner.config.section import Section

_REPO = re.compile(r"[\w.-]+/[\w.-]+")


class ProfileConfig(Section):
    """Steps that torch's profiler watches, from `start` (the run's first step is 1), each with a trace of its own.

    `ranks`: whose traces are written, the main process's or those of all. A first step also shows what is made once.
    """

    start: int = Field(ge=1)
    steps: int = Field(default=1, ge=1)
    ranks: Literal["main", "all"] = "main"

    def watches(self, step: int) -> bool:
        """Whether step `step` is one of them."""
        return self.start <= step < self.start + self.steps


class HubConfig(Section):
    """A repository `repo` ("owner/name") of a Hugging Face hub that is given the model, made if it is not there.

    `every`: policy updates between two pushes (0: only the trained model, at the end). The token is $HF_TOKEN, the hub
    $HF_ENDPOINT. A push that fails is said and never ends a run.
    """

    repo: str
    private: bool = True
    every: int = Field(default=0, ge=0)

    @field_validator("repo")
    @classmethod
    def _owner_and_name(cls, repo: str) -> str:
        if not _REPO.fullmatch(repo):
            raise ValueError(f"{repo!r} is no owner/name")
        return repo
