"""One schedule run: slots that lease and deliver, a learner that claims, and a real store between them."""

from __future__ import annotations

import asyncio
import bisect
import contextlib
import math
import os
import random
import statistics
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from agent.child_processes import start_service, stop_child
from agent.episode import Episode, Segment, StopReason, Timings, decode
from agent.runtime.tickets import TicketSource
from agent.store.client import StoreClient
from agent.store.protocol import Ticket

TASKS = 100_000
TOKENS = 32
START_LIMIT_S = 30.0
STOP_LIMIT_S = 15.0
Z99 = statistics.NormalDist().inv_cdf(0.99)


@dataclass(frozen=True)
class Load:
    """The work, the same for all schedules. `scale_s`: the median episode in seconds; `tail`: p99 over p50;
    `train_s`: a learner's step; `seconds`: how long a schedule runs, of which `warmup_s` is not counted;
    `batches`: stop earlier after so many counted ones (None: time decides)."""

    slots: int = 128
    batch: int = 128
    scale_s: float = 0.4
    tail: float = 30.0
    train_s: float = 0.6
    seconds: float = 70.0
    warmup_s: float = 8.0
    batches: int | None = None
    seed: int = 0

    def duration(self, ticket_seed: int) -> float:
        """Seconds that the episode of a ticket with this seed takes."""
        sigma = math.log(self.tail) / Z99
        return self.scale_s * math.exp(sigma * random.Random(ticket_seed).gauss(0.0, 1.0))

    @property
    def mean_s(self) -> float:
        """The expected duration in seconds."""
        return self.scale_s * math.exp((math.log(self.tail) / Z99) ** 2 / 2)


@dataclass(frozen=True)
class Schedule:
    """A name, and the keys of the store that make the difference."""

    name: str
    group_size: int
    max_lag: int
    order: str = "completion"


@dataclass(frozen=True)
class Step:
    """One learner step: when its version was published, and what it had claimed."""

    published_at: float
    episodes: tuple[str, ...]
    prompts: int
    lags: tuple[int, ...]
    token_lag: float


@dataclass
class Record:
    """What happened; times are `time.monotonic()`, intervals (begin, end). What a slot does: wait, work, deliver."""

    waiting: list[tuple[float, float]] = field(default_factory=list)
    work: list[tuple[float, float]] = field(default_factory=list)
    delivering: list[tuple[float, float]] = field(default_factory=list)
    finished: dict[str, float] = field(default_factory=dict)
    on_disk: dict[str, float] = field(default_factory=dict)
    groups: dict[str, list[str]] = field(default_factory=dict)
    group_of: dict[str, str] = field(default_factory=dict)
    steps: list[Step] = field(default_factory=list)
    training: list[tuple[float, float]] = field(default_factory=list)


class Served:
    """The versions that the engine has served and since when: what each token of an episode was sampled by."""

    def __init__(self) -> None:
        self._since: list[float] = [0.0]

    def publish(self) -> int:
        """Serve the next version from now on."""
        self._since.append(time.monotonic())
        return len(self._since) - 1

    def at(self, moment: float) -> int:
        """The version that was served at `moment` (`time.monotonic()`)."""
        return bisect.bisect_right(self._since, moment) - 1


@contextlib.contextmanager
def timed(intervals: list[tuple[float, float]]) -> Iterator[None]:
    """Append the interval that the block takes; also if it is cancelled."""
    begun = time.monotonic()
    try:
        yield
    finally:
        intervals.append((begun, time.monotonic()))


async def slot(load: Load, tickets: TicketSource, store: StoreClient, served: Served, record: Record) -> None:
    """One episode after the other: lease, work, deliver; ends by cancellation."""
    while True:
        with timed(record.waiting):
            ticket = await tickets.next()
        with timed(record.work):
            await asyncio.sleep(load.duration(ticket.seed))  # this is the episode
        begun, ended = record.work[-1]
        name = ticket.group_id or ticket.id
        record.finished[ticket.id] = ended
        record.group_of[ticket.id] = name
        record.groups.setdefault(name, []).append(ticket.id)
        with timed(record.delivering):
            ending = await store.put(ticket.id, episode_of(ticket, begun, ended, served))
        if ending.outcome != "accepted":
            raise RuntimeError(f"the store made {ending.outcome!r} of {ticket.id}: {ending.reason}")
        record.on_disk[ticket.id] = time.monotonic()


def episode_of(ticket: Ticket, begun: float, ended: float, served: Served) -> Episode:
    """A small episode whose tokens were sampled evenly between `begun` and `ended`."""
    moments = [begun + (ended - begun) * (i + 0.5) / TOKENS for i in range(TOKENS)]
    action = Segment("action", (1,) * TOKENS, "", (-1.0,) * TOKENS, tuple(map(served.at, moments)), "stop")
    return Episode(
        id=ticket.id,
        env_id="benchmark",
        task_id=str(ticket.task_index),
        segments=(Segment("prompt", (1, 2)), action),
        turn_rewards=(1.0,),
        stop_reason=StopReason.TERMINATED,
        timings=Timings(generate_s=ended - begun),
        group_id=ticket.group_id,
    )


async def learner(
    load: Load, schedule: Schedule, store: StoreClient, served: Served, record: Record, counted_from: float
) -> None:
    """Claim, train for a fixed time, commit, publish; until the time or the number of batches is used up.

    A schedule that is too slow for two counted publications goes on until it has them, for three times as long at
    most. A barrier's last batch is waited for: to leave out those that were under way when the time was up would leave
    out the long ones.
    """
    version, counted = 0, 0
    end, latest = (counted_from + n * load.seconds - load.warmup_s for n in (1, 3))
    while load.batches is None or counted <= load.batches:
        if time.monotonic() >= (end if counted >= 2 else latest):
            break
        limit, claim = latest if counted < 2 or schedule.max_lag == 0 else end, None
        while claim is None and (left := limit - time.monotonic()) > 0:
            claim = await store.claim(load.batch, version, wait_s=min(left, 1.0))
        if claim is None:
            break
        with timed(record.training):
            await asyncio.sleep(load.train_s)  # this is the step
        episodes = [decode(data) for data in claim.episodes]
        token_lag = statistics.fmean(version - v for e in episodes for s in e.actions for v in s.versions)
        version += 1
        await store.commit(claim.id, version)
        assert served.publish() == version
        await store.set_version(version)
        step = Step(
            published_at=time.monotonic(),
            episodes=tuple(e.id for e in episodes),
            prompts=len({e.task_id for e in episodes}),
            lags=tuple(int(fact["lag"]) for fact in claim.facts),
            token_lag=token_lag,
        )
        record.steps.append(step)
        counted += step.published_at >= counted_from


@contextlib.asynccontextmanager
async def running_store(load: Load, schedule: Schedule, folder: Path) -> AsyncIterator[StoreClient]:
    """`python -m agent.store` with the schedule's keys, and a client."""
    keys = {
        "tasks": TASKS,
        "seed": load.seed,
        "batch": load.batch,
        "group_size": schedule.group_size,
        "max_lag": schedule.max_lag,
        "order": schedule.order,
    }
    process, port = await start_service(
        *(sys.executable, "-m", "agent.store", "--path", str(folder / "episodes.sqlite")),
        *("--exit-with-parent", *(f"{k}={v}" for k, v in keys.items())),
        name="the episode store",
        log=folder / "store.log",
        env=os.environ,
        limit_s=START_LIMIT_S,
        fault=RuntimeError,
    )
    try:
        async with StoreClient(f"http://127.0.0.1:{port}") as client:
            yield client
    finally:
        await stop_child(process, grace_s=STOP_LIMIT_S)


async def run_schedule(load: Load, schedule: Schedule) -> Record:
    """Run one schedule on a fresh store."""
    record, served = Record(), Served()

    async def ready() -> None:
        """The stand-in for the engine is always there."""

    with tempfile.TemporaryDirectory() as folder:
        async with running_store(load, schedule, Path(folder)) as store:
            tickets = TicketSource(store, "benchmark", wait_s=5.0, patience_s=30.0, gate=ready)
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(tickets.run())]
                tasks += [group.create_task(slot(load, tickets, store, served, record)) for _ in range(load.slots)]
                await learner(load, schedule, store, served, record, time.monotonic() + load.warmup_s)
                for task in tasks:
                    task.cancel()
    return record
