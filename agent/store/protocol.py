"""What runtime, store and learner say to each other. The bodies are msgpack of these structs."""

from __future__ import annotations

from typing import Any, Literal

import msgspec


class StoreFault(RuntimeError):
    """The store could not be reached or refused; the message says what to do."""


class Ticket(msgspec.Struct, frozen=True):
    """Leave to run one episode. A runtime leases tickets, and ends each with an episode or a failure.

    `task_index` points into the environment's `task_ids` (the training environment's, or the held-out one's for
    kind "evaluate"); the store deals every index once an epoch (once a group for group methods) in a seeded
    order. `id` is also the episode's id, so that delivering twice is harmless.
    """

    id: str
    kind: Literal["train", "evaluate"]
    task_index: int
    epoch: int
    seed: int
    attempt: int = 0
    group_id: str | None = None
    pinned_version: int | None = None


class Claim(msgspec.Struct, frozen=True):
    """A batch that the learner has taken and not yet committed. `episodes` are `agent.episode.encode`d, in the
    order of completion. `facts[i]` belongs to `episodes[i]`: issued_at, finished_at, claimed_at (Unix seconds)."""

    id: str
    episodes: list[bytes]
    facts: list[dict[str, float]]


class EvaluationStatus(msgspec.Struct, frozen=True):
    """Progress of one evaluation; `episodes` is filled (encoded) once `finished == requested`."""

    id: str
    version: int
    requested: int
    finished: int
    failed: int
    episodes: list[bytes] = []


class StoreStatus(msgspec.Struct, frozen=True):
    """Counts for displays and tests. `counters` are sums since the run began and survive restarts."""

    version: int
    ready: int
    leased: int
    claimed: int
    trained: int
    epoch: int
    counters: dict[str, int] = {}
    metrics: dict[str, Any] = {}
