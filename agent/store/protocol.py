"""What runtime, store and learner say to each other. The bodies are msgpack of these structs."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

MSGPACK = "application/msgpack"


class StoreFault(RuntimeError):
    """The store could not be reached or refused; the message says what to do."""


class StoreFull(StoreFault):
    """The disk (or `max_bytes`) is full. Nothing acknowledged is lost; make room and repeat the call."""


class StoreInUse(StoreFault):
    """Another process uses the file."""


class Ticket(msgspec.Struct, frozen=True):
    """Leave to run one episode. A runtime leases tickets, and ends each with an episode or a failure.

    `task_index` points into the environment's `task_ids` (the training environment's, or the held-out one's for
    kind "evaluate"); the store deals every index once an epoch (once a group for group methods) in a seeded
    order. `id` is also the episode's id, so that delivering twice is harmless. `seed` differs between the members
    of a group and between attempts. `environment` names one of several environments (or evaluation sets) that the
    runtime knows; "" where there is one only.
    """

    id: str
    kind: Literal["train", "evaluate"]
    task_index: int
    epoch: int
    seed: int
    attempt: int = 0
    group_id: str | None = None
    pinned_version: int | None = None
    environment: str = ""


class Ending(msgspec.Struct, frozen=True):
    """What the store made of a delivered episode or a reported failure.

    `outcome`: "accepted" (on disk), "duplicate" (had been accepted before), "dropped" (on disk, but never trained:
    its group is lost, or truncated episodes are not wanted), "returned" (the ticket will be dealt again, same
    attempt), "retry" (dealt again, attempt + 1), "given_up" (attempts used up, its capacity is free again),
    "superseded" (the ticket had already ended otherwise). `reason` is for people, empty where all is well.
    """

    outcome: Literal["accepted", "duplicate", "dropped", "returned", "retry", "given_up", "superseded"]
    reason: str = ""


class Claim(msgspec.Struct, frozen=True):
    """A batch that the learner has taken and not yet committed. `episodes` are `agent.episode.encode`d, in the
    order of completion. `facts[i]` belongs to `episodes[i]`: issued_at, finished_at, claimed_at (Unix seconds),
    issued_version (the store's at the lease), task_index, epoch, attempt, and lag (the claim's version minus the
    oldest token's)."""

    id: str
    episodes: list[bytes]
    facts: list[dict[str, float]]


class EvaluationStatus(msgspec.Struct, frozen=True):
    """Progress of one evaluation. `finished` counts every ticket that has ended, `failed` those among them that
    gave no episode; `episodes` is filled (encoded) once `finished == requested`."""

    id: str
    version: int
    requested: int
    finished: int
    failed: int
    episodes: list[bytes] = []


class EpisodeRow(msgspec.Struct, frozen=True):
    """One line of a list of episodes: what can be known without reading its tokens. Times are Unix seconds.

    `kind`: "train", "evaluate", or "served" (offered without a ticket). `status`: "ready", "claimed", "trained",
    "stale" (too old when it was to be claimed), "dropped", "set_aside" (by a rollback, see `SetAsideRequest`) or
    "evaluation". `judge`: whose verdict it is, "" where nobody is known. `gone`: why its tokens are not there any
    more, "pruned" (see `keep_trained`) or "wiped" (at its user's wish); None while they are.
    """

    id: str
    kind: str
    status: str
    task_index: int
    epoch: int
    group_id: str | None
    env_id: str
    task_id: str
    reward: float
    tokens: int
    turns: int
    oldest_version: int
    newest_version: int
    stop_reason: str
    worker: str
    attempt: int
    issued_at: float
    issued_version: int
    finished_at: float
    claimed_at: float | None
    claim: str | None
    evaluation: str | None
    gone: str | None = None
    judge: str | None = None


class StoreStatus(msgspec.Struct, frozen=True):
    """Counts for displays and tests. `ready`, `leased`, `claimed` and `trained` are training episodes only.
    `counters` are sums since the run began and survive restarts. `wanted`: how many episodes a learner asks for at this
    moment, 0 while none does."""

    version: int
    ready: int
    leased: int
    claimed: int
    trained: int
    epoch: int
    set_aside: int = 0
    counters: dict[str, int] = {}
    metrics: dict[str, Any] = {}
    wanted: int = 0


class LeaseRequest(msgspec.Struct, forbid_unknown_fields=True):
    """Body of /lease. `request` names this call; `void` names earlier ones whose answers were lost: their tickets come
    back. `kind`: only tickets of that kind."""

    n: int
    worker: str
    kind: Literal["train", "evaluate"] | None = None
    wait_s: float = 0.0
    request: str | None = None
    void: list[str] = []


class ClaimRequest(msgspec.Struct, forbid_unknown_fields=True):
    """Body of /claim. `claim_id` is chosen by the caller; `void` names earlier claims whose answers were lost."""

    claim_id: str
    n: int
    version: int
    wait_s: float = 0.0
    void: list[str] = []


class FailRequest(msgspec.Struct, forbid_unknown_fields=True):
    """Body of /tickets/{id}/failure. `worker` "": nobody says who held the ticket."""

    reason: str
    retry: bool = True
    worker: str = ""


class CommitRequest(msgspec.Struct, forbid_unknown_fields=True):
    """Body of /commit. `version`: the one that the step made, or the present one."""

    claim_id: str
    version: int


class ReleaseRequest(msgspec.Struct, forbid_unknown_fields=True):
    """Body of /release."""

    claim_id: str


class RecoverRequest(msgspec.Struct, forbid_unknown_fields=True):
    """Body of /recover: the claims that the learner's checkpoint holds."""

    claim_ids: list[str] = []


class VersionRequest(msgspec.Struct, forbid_unknown_fields=True):
    """Body of /version: what the engines serve from now on."""

    version: int


class SetAsideRequest(msgspec.Struct, forbid_unknown_fields=True):
    """Body of /set_aside: the version that a rollback goes back to."""

    version: int


class ReturnRequest(msgspec.Struct, forbid_unknown_fields=True):
    """Body of /set_aside/return: everything but what these judges judged."""

    without: list[str] = []


class AsideOf(msgspec.Struct, frozen=True):
    """What is set aside of one judge: how many episodes, and their mean reward."""

    judge: str
    episodes: int
    reward: float


class WorkerRequest(msgspec.Struct, forbid_unknown_fields=True):
    """Body of /heartbeat and /release_worker."""

    worker: str


class PauseRequest(msgspec.Struct, forbid_unknown_fields=True):
    """Body of /pause."""

    paused: bool


class EvaluationRequest(msgspec.Struct, forbid_unknown_fields=True):
    """Body of /evaluations: `samples` of each of the held-out `tasks` of `environment`, by `version`.

    `pinned` false: tokens may be of other versions too, for engines that are given new weights meanwhile.
    """

    version: int
    tasks: list[int]
    samples: int
    name: str = ""
    environment: str = ""
    pinned: bool = True
