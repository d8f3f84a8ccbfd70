"""Random interleavings of everything that runtime, learner and crashes can do to a ledger. See docs/store.md."""

from __future__ import annotations

import math
import shutil
import tempfile
from collections import Counter
from pathlib import Path

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from store_tools import Bench

from agent.episode import StopReason, decode
from agent.store.config import StoreConfig
from agent.store.protocol import Ticket

SHARED_MEMORY = Path("/dev/shm")


class StoreMachine(RuleBasedStateMachine):
    """The model keeps what a runtime and a learner know, and never asks the ledger what it should believe."""

    def __init__(self) -> None:
        super().__init__()
        self.folder = Path(tempfile.mkdtemp(dir=SHARED_MEMORY if SHARED_MEMORY.is_dir() else None))
        self.version = 0
        self.running: dict[str, Ticket] = {}
        self.issued_version: dict[str, int] = {}  # at the first lease: the bound counts from there
        self.acknowledged: set[str] = set()
        self.ended: set[str] = set()  # given up, dropped or stale: holds no slot
        self.open: dict[str, list[str]] = {}  # claims in the learner's memory
        self.checkpoint: list[str] = []  # claims, on the learner's disk
        self.committed: set[str] = set()
        self.trained: Counter[str] = Counter()  # episodes in the checkpoint: what can not be undone
        self.claims = 0

    @initialize(
        group_size=st.sampled_from([1, 1, 2]),
        batch=st.sampled_from([2, 4]),
        max_lag=st.integers(0, 2),
        order=st.sampled_from(["completion", "window", "quota"]),
        window=st.integers(1, 8),
        stale_policy=st.sampled_from(["train", "drop"]),
        max_ready=st.sampled_from([None, 4]),
        max_attempts=st.integers(1, 2),
        tasks=st.integers(1, 9),
    )
    def begin(self, **keys: object) -> None:
        self.config = StoreConfig(**keys)
        self.bench = Bench(self.folder / "episodes.sqlite", self.config, durable=False)

    # -- the runtime

    @rule(count=st.integers(1, 6))
    def lease(self, count: int) -> None:
        for ticket in self.bench.lease(count):
            assert ticket.id not in self.running, "dealt to two slots"
            assert ticket.id not in self.acknowledged, "dealt again after it was done"
            assert ticket.id not in self.ended
            self.running[ticket.id] = ticket
            self.issued_version.setdefault(ticket.id, self.version)

    def _pick(self, data: st.DataObject) -> Ticket:
        return self.running[data.draw(st.sampled_from(sorted(self.running)))]

    @precondition(lambda self: self.running)
    @rule(data=st.data(), behind=st.integers(0, 3))
    def put(self, data: st.DataObject, behind: int) -> None:
        ticket = self._pick(data)
        self._finish(ticket, max(self.issued_version[ticket.id], self.version - behind))

    @rule(count=st.integers(2, 8), slow=st.integers(0, 7))
    def work(self, count: int, slow: int) -> None:
        """What mostly happens: a few tickets are leased, and all that run are finished but one."""
        self.lease(count)
        for place, ticket in enumerate(list(self.running.values())):
            self.bench.now += 1
            if place != slow:
                self._finish(ticket, self.version)

    def _finish(self, ticket: Ticket, version: int) -> None:
        assert self.bench.put(ticket, version).outcome in ("accepted", "dropped")
        del self.running[ticket.id]
        self.acknowledged.add(ticket.id)

    @precondition(lambda self: self.acknowledged)
    @rule(data=st.data())
    def put_again(self, data: st.DataObject) -> None:
        assert self.bench.put(data.draw(st.sampled_from(sorted(self.acknowledged)))).outcome == "duplicate"

    @precondition(lambda self: self.running)
    @rule(data=st.data(), retry=st.booleans(), aborted=st.booleans())
    def end_without_episode(self, data: st.DataObject, retry: bool, aborted: bool) -> None:
        ticket = self._pick(data)
        put, fail = self.bench.put, self.bench.fail
        ending = put(ticket, stop=StopReason.ABORTED) if aborted else fail(ticket, retry=retry)
        del self.running[ticket.id]
        if ending.outcome == "given_up":
            self.ended.add(ticket.id)

    @rule()
    def runtime_restarts(self) -> None:
        self.bench.do(lambda: self.bench.ledger.tickets.release_worker("w"))
        self.running.clear()

    # -- the learner

    @rule()
    def claim(self) -> None:
        self.publish()  # what the bound asks of a learner: commit, publish, claim
        self.claims += 1
        name = f"c{self.claims}"
        claim = self.bench.claim(name, self.config.batch, self.version)
        if claim is None:
            return
        episodes = [decode(data) for data in claim.episodes]
        members = [episode.id for episode in episodes]
        assert len(set(members)) == len(members) == self.config.batch
        assert not set(members) & {i for other in self.open.values() for i in other}, "in two open claims"
        tasks = Counter(i.rpartition("-")[0] for i in members)
        assert set(tasks.values()) == {self.config.group_size}, "a task twice, or a group in pieces"
        for episode in episodes:
            assert self.trained[episode.id] == 0, "claimed after it was trained"
            oldest = episode.oldest_version
            assert oldest is not None
            if self.config.lag_limit is not None:
                assert self.version - oldest <= self.config.lag_limit
            if self.config.order == "window" and self.config.group_size == 1:
                window = self.config.window_units
                bound = self.config.max_lag + math.ceil((window - 1) / self.config.batch)
                assert self.version - self.issued_version[episode.id] <= bound, "the staleness bound"
        self.open[name] = members

    @rule(count=st.integers(2, 8), slow=st.integers(0, 7))
    def work_and_train(self, count: int, slow: int) -> None:
        """One turn of the whole loop, one episode staying behind."""
        self.work(count, slow)
        self.claim()
        if self.open:
            self.step("no")

    @precondition(lambda self: self.open)
    @rule(crash=st.sampled_from(["no", "no", "before the checkpoint", "before the commit", "before the publication"]))
    def step(self, crash: str) -> None:
        name = next(iter(self.open))
        if crash == "before the checkpoint":
            return self.learner_restarts()
        self.checkpoint.append(name)
        self.trained.update(self.open.pop(name))
        if crash == "before the commit":
            return self.learner_restarts()
        self.bench.commit(name, self.version + 1)
        self.committed.add(name)
        if crash == "before the publication":
            return self.learner_restarts()
        return None

    @rule()
    def publish(self) -> None:
        if len(self.checkpoint) > self.version:
            self.version = len(self.checkpoint)
            self.bench.do(lambda: self.bench.ledger.set_version(self.version))

    @precondition(lambda self: self.open)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.open)))
        self.bench.do(lambda: self.bench.ledger.claims.release(name))
        del self.open[name]

    @rule()
    def learner_restarts(self) -> None:
        self.open.clear()
        self.publish()  # the weights of the checkpoint, before it says what it had trained
        self.bench.recover(*self.checkpoint[-1:])

    # -- the store

    @rule()
    def store_restarts(self) -> None:
        self.bench.restart()

    # -- what must hold after every one of these

    @invariant()
    def nothing_is_lost_and_nothing_trained_twice(self) -> None:
        if not hasattr(self, "bench"):
            return
        statuses = self.bench.statuses()
        assert set(statuses) == self.acknowledged
        assert all(count == 1 for count in self.trained.values()), "trained twice"
        assert {i for i, status in statuses.items() if status == "trained"} == set(self.trained)
        assert {i for i, status in statuses.items() if status == "claimed"} == {
            i for members in self.open.values() for i in members
        }
        self.ended |= {i for i, status in statuses.items() if status in ("stale", "dropped")}
        if self.config.stale_policy == "train" and self.config.group_size == 1:
            assert not set(statuses.values()) & {"stale", "dropped"}

    @invariant()
    def the_budget_is_never_exceeded(self) -> None:
        if not hasattr(self, "bench"):
            return
        unfinished = (set(self.running) | self.acknowledged) - self.ended - set(self.trained)
        assert len(unfinished) <= self.config.capacity

    @invariant()
    def no_task_is_in_flight_twice_in_an_epoch(self) -> None:
        flights = Counter((t.epoch, t.task_index) for t in self.running.values())
        assert all(count <= getattr(self, "config", StoreConfig()).group_size for count in flights.values())

    def teardown(self) -> None:
        """Whatever happened, work that is done leads to batches: no deadlock."""
        try:
            if hasattr(self, "bench"):
                for _ in range(3):
                    self._a_batch_comes()
        finally:
            if hasattr(self, "bench"):
                self.bench.ledger.close()
            shutil.rmtree(self.folder)

    def _a_batch_comes(self) -> None:
        for _ in range(4):
            while self.running or self._lease_all():
                for ticket in list(self.running.values()):
                    self.bench.now += 1
                    self._finish(ticket, self.version)
            if not self.open:
                self.claim()
            if self.open:
                self.step("no")
                return
        raise AssertionError("deadlock: all that was dealt is done, and there is no batch")

    def _lease_all(self) -> bool:
        self.lease(100)
        return bool(self.running)


StoreMachine.TestCase.settings = settings(
    max_examples=80, stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck)
)
TestAnyInterleaving = StoreMachine.TestCase
TestAnyInterleaving.__doc__ = (
    """Cases A21, D2, D3, D5, D9, D10: no loss, no double training, budget kept, no deadlock."""
)
