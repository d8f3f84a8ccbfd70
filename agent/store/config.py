"""The store's configuration. It is saved in the store's file, and the keys that fix the deal may not change later."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, model_validator

from agent.store.protocol import StoreFault
from envs.key_values import WrongWord, key_values

FIXED_KEYS = ("tasks", "seed", "group_size")
"""Keys that decide which ticket comes next: another value would make the saved data cursor mean something else."""


NAME = r"^[A-Za-z0-9][A-Za-z0-9_.-]*$"
"""How an environment of a mixture may be called: its name is part of tickets' ids, and so of addresses."""


class EnvironmentShare(BaseModel):
    """One environment of a mixture: so many tasks, dealt in proportion to `weight`."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: str = Field(pattern=NAME)
    tasks: int = Field(ge=1)
    weight: float = Field(default=1.0, gt=0, allow_inf_nan=False)


class StoreConfig(BaseModel):
    """Keys of the episode store.

    Counts are episodes, lags are policy versions, times are seconds.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    tasks: int = Field(default=0, ge=0, description="number of training tasks; 0: the store deals evaluations only")
    environments: tuple[EnvironmentShare, ...] = Field(
        default=(), description="instead of tasks: several environments, each task's drawn by weight"
    )
    seed: int = 0
    group_size: int = Field(default=1, ge=1, description="episodes of a task that are claimed together or not at all")
    batch: int = Field(default=128, ge=1, description="episodes of one learner step")
    max_lag: int = Field(default=1, ge=0, description="staleness budget: see docs/store.md")
    forced_lag: int | None = Field(
        default=None, ge=0, description="so many batches wait in the queue before one is claimed; at most max_lag"
    )
    max_ready: int | None = Field(default=None, ge=1, description="no new training tickets while so many are ready")
    stale_policy: Literal["train", "drop"] = "train"
    max_lag_at_claim: int | None = Field(default=None, ge=0, description="with drop; default max_lag + 1")
    drop_truncated: bool = Field(default=False, description="truncated episodes are kept but never trained")
    order: Literal["completion", "window", "quota"] = "completion"
    window: int | None = Field(default=None, ge=1, description="with order window, in episodes; default: the batch")
    quota_strata: int = Field(default=4, ge=2, description="with order quota: latency classes with equal shares")
    max_share_per_user: float | None = Field(
        default=None, gt=0, le=1, description="most of a batch that one user's verdicts may fill: see docs/store.md"
    )
    user_window_s: float = Field(
        default=600.0, ge=0, description="who has judged within it is active; a batch beyond the share waits so long"
    )
    max_attempts: int = Field(default=3, ge=1, description="attempts of a ticket before it is given up")
    worker_timeout_s: float = Field(default=60.0, gt=0, description="silence after which a worker counts as dead")
    restart_grace_s: float = Field(default=15.0, ge=0, description="the same, counted from a restart of the store")
    max_bytes: int | None = Field(
        default=None,
        ge=65536,
        description="ceiling of the file; the oldest trained episodes make room. Default: the disk",
    )
    keep_trained: int | None = Field(
        default=None, ge=0, description="tokens of so many trained, stale or dropped episodes are kept. Default: of all"
    )
    evaluations_at_once: int | None = Field(
        default=None, ge=1, description="evaluation tickets leased at once; default: as many as there are"
    )

    @model_validator(mode="after")
    def _possible(self) -> StoreConfig:
        if self.tasks and self.environments:
            raise ValueError("tasks is for a single environment: leave it out, each of environments has its own")
        names = [share.name for share in self.environments]
        if len(set(names)) < len(names):
            raise ValueError(f"environments: two have the same name among {', '.join(names)}; rename one")
        if self.batch % self.group_size:
            raise ValueError(f"batch={self.batch} is no multiple of group_size={self.group_size}: no batch would fit")
        if self.max_ready is not None and self.max_ready < self.batch:
            raise ValueError(f"max_ready={self.max_ready} < batch={self.batch}: a batch would never be complete")
        self._check_forced_lag()
        return self

    def _check_forced_lag(self) -> None:
        lag = self.forced_lag
        if lag is None:
            return
        if lag > self.max_lag:
            raise ValueError(
                f"forced_lag={lag} > max_lag={self.max_lag}: so many batches are never outstanding; raise max_lag"
            )
        if self.max_ready is not None and self.max_ready < self.batch * (lag + 1):
            raise ValueError(
                f"max_ready={self.max_ready} is below the {self.batch * (lag + 1)} episodes that forced_lag={lag} "
                "waits for"
            )
        if self.stale_policy == "drop":
            raise ValueError(f"forced_lag={lag} with stale_policy=drop: what is kept back would be dropped; use train")
        if self.order != "completion":
            raise ValueError(f"forced_lag={lag} with order={self.order}: what waits longest must come first")

    @property
    def kept_back(self) -> int:
        """Units that stay in the queue when a claim takes its own."""
        return (self.forced_lag or 0) * self.batch // self.group_size

    @property
    def what_is_dealt(self) -> dict[str, str]:
        """What may not change over a run's sessions, by key, as text: another value would make the saved place in the
        data mean something else. Weights may: they decide only what is drawn from then on."""
        environments = [[share.name, share.tasks] for share in self.environments]
        return {key: json.dumps(getattr(self, key)) for key in FIXED_KEYS} | {"environments": json.dumps(environments)}

    @property
    def capacity(self) -> int:
        """Training episodes that may be outstanding at once: batch * (max_lag + 1)."""
        return self.batch * (self.max_lag + 1)

    @property
    def lag_limit(self) -> int | None:
        """The lag above which an episode is not claimed any more, or None if every episode is."""
        if self.stale_policy == "train":
            return None
        return self.max_lag + 1 if self.max_lag_at_claim is None else self.max_lag_at_claim

    @property
    def kept_when_full(self) -> int | None:
        """How many finished episodes keep their tokens even when the file is full; None: all of them."""
        return 0 if self.keep_trained is None and self.max_bytes is not None else self.keep_trained

    @property
    def window_units(self) -> int:
        """The window in units (episodes, or groups for group methods), at least 1."""
        return max(1, (self.window or self.batch) // self.group_size)


def read_config(file: Path | None, overrides: Sequence[str]) -> StoreConfig | None:
    """The keys of a YAML file and of `key=value` words; None if there are none: then the saved configuration counts.

    Raises `StoreFault`, and pydantic's ValidationError for keys that are wrong.
    """
    values: dict[str, Any] = {}
    if file is not None:
        loaded = yaml.safe_load(file.read_text()) or {}
        if not isinstance(loaded, dict):
            raise StoreFault(f"{file}: expected keys and values")
        values.update(loaded)
    try:
        values.update(key_values(overrides))
    except WrongWord as error:
        raise StoreFault(str(error)) from error
    return StoreConfig(**values) if values else None
