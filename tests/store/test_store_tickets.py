"""Tickets: dealt within the budget, leased, ended, given back when their worker is gone."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from store_tools import bench, ids, make_episode

from agent.episode import StopReason, encode
from agent.store import rules
from agent.store.config import StoreConfig
from agent.store.ledger import Ledger


def test_a_ticket_given_up_gives_its_capacity_back(tmp_path: Path) -> None:
    """Cases D2 and C: 127 of 128 must not wait for ever for the one that failed for good."""
    b = bench(tmp_path, batch=128, max_lag=0, tasks=1000, max_attempts=3)
    tickets = b.lease(128)
    for ticket in tickets[1:]:
        b.put(ticket)
    assert b.lease(1) == []  # the budget is used up
    attempts, endings = [], []
    failing = tickets[0]
    while True:
        endings.append(b.fail(failing).outcome)
        if endings[-1] == "given_up":
            break
        [failing] = b.lease(5)
        assert failing.id == tickets[0].id
        attempts.append(failing.attempt)
    assert (attempts, endings) == ([1, 2], ["retry", "retry", "given_up"])
    assert b.claim("a", 128) is None
    [fresh] = b.lease(5)  # one slot is free, not more
    b.put(fresh)
    assert len(ids(b.claim("a", 128))) == 128
    assert b.counters()["given_up"] == 1


def test_a_retry_has_another_seed(tmp_path: Path) -> None:
    b = bench(tmp_path)
    [ticket] = b.lease(1)
    b.fail(ticket)
    [again] = b.lease(1)
    assert again.seed != ticket.seed


def test_a_failure_that_must_not_be_retried_is_not(tmp_path: Path) -> None:
    b = bench(tmp_path)
    [ticket] = b.lease(1)
    assert b.fail(ticket, retry=False).outcome == "given_up"
    assert b.lease(1)[0].id != ticket.id


@pytest.mark.parametrize(
    ("stop", "outcome"),
    [
        (StopReason.TERMINATED, "accepted"),
        (StopReason.TRUNCATED_TURNS, "accepted"),
        (StopReason.TRUNCATED_CONTEXT, "accepted"),
        (StopReason.TRUNCATED_WALL_CLOCK, "accepted"),
        (StopReason.ABORTED, "returned"),
        (StopReason.INFRASTRUCTURE_ERROR, "retry"),
    ],
)
def test_every_stop_reason_has_its_rule(tmp_path: Path, stop: StopReason, outcome: str) -> None:
    """Case C: truncated ones are trained, aborted ones resumable, infrastructure errors retried and counted."""
    b = bench(tmp_path)
    [ticket] = b.lease(1)
    assert b.put(ticket, stop=stop).outcome == outcome
    assert b.ledger.status().ready == (outcome == "accepted")
    if outcome != "accepted":
        [again] = b.lease(1)
        assert again.id == ticket.id
        assert again.attempt == (outcome == "retry")
        assert b.counters()["aborted" if outcome == "returned" else "infrastructure"] == 1


def test_truncated_episodes_that_are_not_wanted_free_their_slot(tmp_path: Path) -> None:
    """Cases C and D2: `truncation: drop` keeps the episode for reading and gives its capacity back."""
    b = bench(tmp_path, max_lag=0, drop_truncated=True)
    tickets = b.lease(4)
    assert b.put(tickets[0], stop=StopReason.TRUNCATED_TURNS).outcome == "dropped"
    assert len(b.lease(5)) == 1
    assert b.statuses() == {tickets[0].id: "dropped"}


def test_a_full_queue_slows_the_rollouts_and_drops_nothing(tmp_path: Path) -> None:
    """Case D5: no ticket while max_ready wait; all that was finished is still there."""
    b = bench(tmp_path, max_lag=9, max_ready=6)
    tickets = b.lease(8)
    for ticket in tickets:
        b.put(ticket)
    assert b.lease(1) == []
    assert b.ledger.status().ready == 8
    assert len(ids(b.claim("a", 4))) == 4
    assert len(b.lease(1)) == 1


def test_no_task_twice_before_the_epoch_wraps(tmp_path: Path) -> None:
    """Case D10: every index once an epoch, in an order that depends on seed and epoch only."""
    b = bench(tmp_path, tasks=7, batch=21)
    dealt = [(t.epoch, t.task_index) for t in b.lease(21)]
    assert [epoch for epoch, _ in dealt] == [0] * 7 + [1] * 7 + [2] * 7
    orders = [tuple(index for e, index in dealt if e == epoch) for epoch in range(3)]
    assert all(sorted(order) == list(range(7)) for order in orders)
    assert len(set(orders)) > 1
    assert orders[1] == rules.epoch_order(0, 1, 7)


def test_group_that_lost_a_member_gives_all_its_capacity_back(tmp_path: Path) -> None:
    """Cases A21 and D2: seven ready members of a group that will never be whole must not block the queue."""
    b = bench(tmp_path, batch=4, group_size=4, max_lag=0, max_attempts=1)
    tickets = b.lease(4)
    b.put(tickets[0])
    b.fail(tickets[1])
    assert b.lease(4) == []  # two members still run
    assert b.put(tickets[2]).outcome == "dropped"
    b.fail(tickets[3])
    fresh = b.lease(4)
    assert len({t.group_id for t in fresh} - {tickets[0].group_id}) == 1
    assert len(fresh) == 4
    assert b.counters()["dropped"] == 2


def test_delivering_twice_is_harmless(tmp_path: Path) -> None:
    """Case D3: the first delivery counts, also when the ticket has been dealt to another worker meanwhile."""
    b = bench(tmp_path)
    [ticket] = b.lease(1, "presumed dead")
    b.do(lambda: b.ledger.tickets.release_worker("presumed dead"))
    assert [t.id for t in b.lease(1, "other")] == [ticket.id]
    assert b.put(ticket).outcome == "accepted"
    assert b.put(ticket).outcome == "duplicate"
    assert b.ledger.status().ready == 1
    with pytest.raises(KeyError, match="another run"):
        b.put("no-such-ticket")


@pytest.mark.parametrize("stop", [StopReason.ABORTED, StopReason.INFRASTRUCTURE_ERROR, None])
def test_a_late_failure_of_a_worker_that_lost_its_ticket_touches_nobody(
    tmp_path: Path, stop: StopReason | None
) -> None:
    """Cases C and D10: the worker that holds the ticket now is neither robbed of its episode nor doubled."""
    b = bench(tmp_path, tasks=1, max_attempts=1)
    [ticket] = b.lease(1, "presumed dead")
    b.do(lambda: b.ledger.tickets.release_worker("presumed dead"))
    assert [t.id for t in b.lease(1, "other")] == [ticket.id]
    if stop is None:
        late = b.do(lambda: b.ledger.tickets.fail(ticket.id, "too late", retry=True, worker="presumed dead"))
    else:
        late = b.put(ticket, stop=stop, worker="presumed dead")
    assert late.outcome == "superseded"
    assert ticket.id not in [t.id for t in b.lease(1, "third")]
    assert b.put(ticket, worker="other").outcome == "accepted"


def test_a_silent_worker_loses_its_tickets_and_a_heartbeat_keeps_them(tmp_path: Path) -> None:
    """Case D2: a runtime that was killed must not hold capacity for ever."""
    b = bench(tmp_path, max_lag=0, worker_timeout_s=60, restart_grace_s=15)
    dead, alive = b.lease(2, "dead"), b.lease(2, "alive")
    b.now += 59
    b.do(lambda: b.ledger.tickets.heard_of("alive"))
    b.now += 2
    assert b.do(b.ledger.tickets.reap) == 2
    assert [t.id for t in b.lease(9, "new")] == [t.id for t in dead]
    b.restart()
    b.now += 14
    assert b.do(b.ledger.tickets.reap) == 0  # a runtime outlives the store's restart
    b.do(lambda: b.ledger.tickets.heard_of("alive"))
    b.now += 2
    assert b.do(b.ledger.tickets.reap) == 2
    assert {t.id for t in b.lease(9)} == {t.id for t in dead}
    assert len(alive) == 2


def test_a_bad_episode_is_a_counted_rejection(tmp_path: Path) -> None:
    """Case C: it is logged with its reason, retried up to the cap, and its capacity comes back."""
    b = bench(tmp_path, max_attempts=1, max_lag=0)
    [ticket, *_] = b.lease(4)
    ending = b.do(lambda: b.ledger.tickets.reject(ticket.id, "no action token"))
    assert ending.outcome == "given_up"
    assert b.counters()["rejected"] == 1
    assert b.ledger.one("SELECT reason FROM events WHERE ticket = ?", ticket.id) == "no action token"
    assert len(b.lease(4)) == 1


def test_an_episode_under_a_wrong_id_is_rejected(tmp_path: Path) -> None:
    b = bench(tmp_path)
    [ticket] = b.lease(1)
    episode = make_episode("somebody-else")
    assert b.do(lambda: b.ledger.tickets.deliver(ticket.id, episode, encode(episode))).outcome == "retry"
    assert b.ledger.status().ready == 0


def test_a_store_that_stood_still_heard_nobody_and_blames_nobody(tmp_path: Path) -> None:
    """Case M5."""
    b = bench(tmp_path, worker_timeout_s=4)
    b.lease(2, "alive")
    b.now += 6
    assert b.do(lambda: b.ledger.tickets.reap(deaf_s=5.0)) == 0
    b.now += 4
    assert b.do(b.ledger.tickets.reap) == 2, "and then it is silent after all"


def test_a_wall_clock_put_forward_ends_no_lease(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Case M5."""
    ledger = Ledger(tmp_path / "e.sqlite", StoreConfig(tasks=9, batch=4))
    now = time.time()
    ledger.apply([lambda: ledger.tickets.lease(2, "alive")])
    monkeypatch.setattr(time, "time", lambda: now + 1e6)
    assert ledger.apply([ledger.tickets.reap]) == [0]
    ledger.close()


@pytest.mark.parametrize("group_size", [1, 4])
def test_a_lease_of_many_tickets_costs_as_many_statements_and_no_more(tmp_path: Path, group_size: int) -> None:
    """Case M6: each ticket counted all tickets, so that 4,000 took 17 s."""

    def statements(count: int) -> int:
        b = bench(tmp_path / str(count), tasks=8000, batch=4000, group_size=group_size)
        seen = 0

        def note(_: str) -> None:
            nonlocal seen
            seen += 1

        b.ledger.sql.set_trace_callback(note)
        assert len(b.lease(count)) == count
        b.ledger.close()
        return seen

    for count in (256, 1024):
        (tmp_path / str(count)).mkdir()
    few, many = statements(256), statements(1024)
    assert many <= 4 * few
    # What looks at all tickets is asked once a lease, not once a ticket.
    b = bench(tmp_path, tasks=8000, batch=4000, group_size=group_size)
    counted: list[str] = []
    b.ledger.sql.set_trace_callback(counted.append)
    b.lease(512)
    b.ledger.close()
    assert sum("count(*)" in statement for statement in counted) <= 4
