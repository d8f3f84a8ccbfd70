"""The ledger's rules, one by one, on a real SQLite file."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pydantic
import pytest
from store_tools import Bench, make_episode

from agent.episode import StopReason, decode, encode
from agent.store import rules
from agent.store.config import StoreConfig
from agent.store.protocol import Claim, StoreFault, StoreFull


def bench(tmp_path: Path, **keys: object) -> Bench:
    return Bench(tmp_path / "episodes.sqlite", StoreConfig(**{"tasks": 100, "batch": 4, **keys}))


def ids(claim: Claim | None) -> list[str]:
    assert claim is not None
    return [decode(data).id for data in claim.episodes]


def test_a_claim_leaves_what_it_does_not_take(tmp_path: Path) -> None:
    """Case D1: taking 4 of 7 leaves 3 there, and the next claim has them."""
    b = bench(tmp_path)
    tickets = b.lease(7)
    for ticket in tickets:
        b.put(ticket)
    assert ids(b.claim("a", 4)) == [t.id for t in tickets[:4]]
    assert b.ledger.status().ready == 3
    assert b.claim("b", 4) is None
    assert b.ledger.status().ready == 3
    b.put(b.lease(1)[0])
    assert ids(b.claim("b", 4))[:3] == [t.id for t in tickets[4:]]


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


def test_the_budget_survives_a_restart(tmp_path: Path) -> None:
    """Case D3: what is out, ready and claimed still counts after the store was started again."""
    b = bench(tmp_path, max_lag=1)
    tickets = b.lease(100)
    assert len(tickets) == 8
    for ticket in tickets[:6]:
        b.put(ticket)
    b.claim("a", 4)
    b.restart()
    assert b.lease(100, "other") == []
    assert b.do(lambda: b.ledger.release_worker("w")) == 2
    assert {t.id for t in b.lease(100)} == {t.id for t in tickets[6:]}


def test_a_commit_frees_its_slots_when_the_new_version_is_published(tmp_path: Path) -> None:
    """Case D3 (staleness bound): between commit and publication the old version must not be handed more work."""
    b = bench(tmp_path, max_lag=0)
    for ticket in b.lease(4):
        b.put(ticket)
    b.claim("a", 4)
    b.commit("a", version=1)
    assert b.lease(4) == []
    b.do(lambda: b.ledger.set_version(1))
    assert len(b.lease(4)) == 4


def test_a_step_that_publishes_nothing_does_not_stop_the_run(tmp_path: Path) -> None:
    """Cases A22 and D2: a commit whose version never comes holds its slots only until the next claim."""
    b = bench(tmp_path, max_lag=0)
    for ticket in b.lease(4):
        b.put(ticket)
    b.claim("a", 4)
    b.commit("a", version=7)
    assert b.claim("b", 4) is None
    assert len(b.lease(9)) == 4


def test_a_crash_between_checkpoint_and_commit_neither_trains_twice_nor_loses(tmp_path: Path) -> None:
    """Case D3: the checkpoint's claim is committed at resume, and only that one."""
    b = bench(tmp_path, max_lag=3)
    for ticket in b.lease(12):
        b.put(ticket)
    first, second = ids(b.claim("first", 4)), ids(b.claim("second", 4))
    b.restart()
    b.recover("first")
    assert {b.statuses()[i] for i in first} == {"trained"}
    assert {b.statuses()[i] for i in second} == {"ready"}
    assert ids(b.claim("third", 4)) == second  # in their old places
    b.commit("first")  # late, and harmless
    b.recover("first")
    assert b.counters()["trained"] == 4


def test_a_checkpoint_wins_over_a_release_that_came_too_early(tmp_path: Path) -> None:
    """Case D3: a claim that was released although its checkpoint exists is still never trained again."""
    b = bench(tmp_path, max_lag=3)
    for ticket in b.lease(8):
        b.put(ticket)
    trained = ids(b.claim("a", 4))
    b.recover()
    b.claim("b", 4)
    b.recover("a")
    assert {b.statuses()[i] for i in trained} == {"trained"}
    assert not set(ids(b.claim("c", 4))) & set(trained)


def test_commit_and_release_refuse_what_would_train_twice(tmp_path: Path) -> None:
    """Case D3."""
    b = bench(tmp_path)
    for ticket in b.lease(8):
        b.put(ticket)
    b.claim("a", 4)
    b.claim("b", 4)
    b.do(lambda: b.ledger.claims.release("a"))
    with pytest.raises(StoreFault, match="released"):
        b.commit("a")
    b.commit("b")
    b.commit("b")
    with pytest.raises(StoreFault, match="committed"):
        b.do(lambda: b.ledger.claims.release("b"))
    with pytest.raises(KeyError, match="one run"):
        b.recover("of another run")
    assert b.counters()["trained"] == 4


def test_the_data_cursor_survives_a_restart(tmp_path: Path) -> None:
    """Cases H1 and D10: the order goes on where it was, and is the one an uninterrupted run would have had."""
    keys = {"tasks": 9, "batch": 16, "max_lag": 9}
    whole = [t.id for t in Bench(tmp_path / "a.sqlite", StoreConfig(**keys)).lease(40)]
    b = Bench(tmp_path / "b.sqlite", StoreConfig(**keys))
    parts = []
    for count in (5, 4, 13, 18):
        parts += [t.id for t in b.lease(count)]
        b.restart()
    assert parts == whole


def test_a_configuration_that_would_move_the_cursor_is_refused(tmp_path: Path) -> None:
    """Case H1: says which key; the others may change, and none need be given again."""
    b = bench(tmp_path, seed=3)
    b.ledger.close()
    with pytest.raises(StoreFault, match="seed=4"):
        bench(tmp_path, seed=4)
    b.config = None
    b.open()
    assert b.ledger.config.seed == 3
    b.ledger.close()
    assert bench(tmp_path, seed=3, max_lag=5).ledger.config.max_lag == 5


def test_a_new_file_needs_a_configuration(tmp_path: Path) -> None:
    with pytest.raises(StoreFault, match="tasks"):
        Bench(tmp_path / "episodes.sqlite", None)


def test_lag_counts_the_time_in_the_queue(tmp_path: Path) -> None:
    """Case D4: the lag is of the oldest token, against the version at the claim."""
    b = bench(tmp_path)
    for version, ticket in enumerate(b.lease(4)):
        b.put(ticket, version)
    claim = b.claim("a", 4, version=5)
    assert claim is not None
    assert [facts["lag"] for facts in claim.facts] == [5, 4, 3, 2]


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


def test_evaluation_never_enters_the_training_queue(tmp_path: Path) -> None:
    """Case D7: leased first, outside the budget, in no claim; its episodes come back together."""
    b = bench(tmp_path, max_lag=0)
    for ticket in b.lease(4):
        b.put(ticket)
    name = b.do(lambda: b.ledger.start_evaluation(3, [7, 8], 2))
    tickets = b.lease(100)
    assert [(t.kind, t.task_index, t.pinned_version) for t in tickets] == [
        ("evaluate", 7, 3),
        ("evaluate", 7, 3),
        ("evaluate", 8, 3),
        ("evaluate", 8, 3),
    ]
    assert len({t.seed for t in tickets}) == 4
    for ticket in tickets:
        assert b.put(ticket, 3).outcome == "accepted"
    trained = ids(b.claim("a", 4))
    assert not set(trained) & {t.id for t in tickets}
    assert b.claim("b", 4) is None
    status = b.ledger.evaluation(name)
    assert (status.requested, status.finished, status.failed) == (4, 4, 0)
    assert [decode(data).id for data in status.episodes] == [t.id for t in tickets]


def test_evaluation_refuses_tokens_of_another_version(tmp_path: Path) -> None:
    """Case D7: pinned means pinned; the ticket is retried, then counted as failed, and the evaluation ends."""
    b = bench(tmp_path, max_attempts=2)
    name = b.do(lambda: b.ledger.start_evaluation(3, [7], 1))
    [ticket] = b.lease(1)
    assert b.put(ticket, 4).outcome == "retry"
    assert b.ledger.evaluation(name).finished == 0
    [again] = b.lease(1)
    assert (again.id, again.attempt) == (ticket.id, 1)
    ending = b.put(again, 4)
    assert ending.outcome == "given_up"
    assert "pinned to 3" in ending.reason
    status = b.ledger.evaluation(name)
    assert (status.requested, status.finished, status.failed, status.episodes) == (1, 1, 1, [])


def test_the_same_evaluation_is_not_run_twice(tmp_path: Path) -> None:
    """Cases D3 and D7: a learner that resumes finds the evaluation it had begun."""
    b = bench(tmp_path)
    name = b.do(lambda: b.ledger.start_evaluation(3, [7], 1))
    b.put(b.lease(1)[0], 3)
    b.restart()
    assert b.do(lambda: b.ledger.start_evaluation(3, [7], 1)) == name
    assert b.ledger.evaluation(name).finished == 1
    assert b.do(lambda: b.ledger.start_evaluation(3, [7], 1, "again")) != name


def test_a_cancelled_evaluation_ends(tmp_path: Path) -> None:
    b = bench(tmp_path, tasks=0)
    name = b.do(lambda: b.ledger.start_evaluation(3, [7, 8], 1))
    [ticket] = b.lease(1)
    b.do(lambda: b.ledger.cancel_evaluation(name))
    assert b.lease(1) == []
    b.put(ticket, 3)
    status = b.ledger.evaluation(name)
    assert (status.finished, status.failed, len(status.episodes)) == (2, 1, 1)


def test_no_task_twice_before_the_epoch_wraps(tmp_path: Path) -> None:
    """Case D10: every index once an epoch, in an order that depends on seed and epoch only."""
    b = bench(tmp_path, tasks=7, batch=21)
    dealt = [(t.epoch, t.task_index) for t in b.lease(21)]
    assert [epoch for epoch, _ in dealt] == [0] * 7 + [1] * 7 + [2] * 7
    orders = [tuple(index for e, index in dealt if e == epoch) for epoch in range(3)]
    assert all(sorted(order) == list(range(7)) for order in orders)
    assert len(set(orders)) > 1
    assert orders[1] == rules.epoch_order(0, 1, 7)


def test_group_is_released_only_whole(tmp_path: Path) -> None:
    """Cases A21 and D10: 8 members of one task, claimed together or not at all; once a group in an epoch."""
    b = bench(tmp_path, batch=16, group_size=8, max_lag=1)
    tickets = b.lease(32)
    assert Counter(t.group_id for t in tickets).most_common()[-1][1] == 8
    assert len({t.seed for t in tickets[:8]}) == 8
    assert len({t.task_index for t in tickets}) == 4
    late = tickets[3]
    for ticket in tickets[:24]:
        if ticket is not late:
            b.put(ticket)
    assert ids(b.claim("a", 16)) == [t.id for t in tickets[8:24]]  # 23 were ready, one group is not whole
    b.put(late)
    assert set(ids(b.claim("b", 8))) == {t.id for t in tickets[:8]}
    with pytest.raises(StoreFault, match="whole groups"):
        b.claim("c", 12)


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


def test_what_is_too_old_is_dropped_at_the_claim_and_counted(tmp_path: Path) -> None:
    """Cases D2, D3: stale_policy drop; the slot is free again and the event says why."""
    b = bench(tmp_path, max_lag=0, stale_policy="drop", max_lag_at_claim=1)
    tickets = b.lease(4)
    b.put(tickets[0], 0)
    for ticket in tickets[1:]:
        b.put(ticket, 1)
    assert b.claim("a", 4, version=2) is None
    assert b.statuses()[tickets[0].id] == "stale"
    assert b.counters()["stale"] == 1
    [fresh] = b.lease(4)
    b.put(fresh, 2)
    assert ids(b.claim("a", 4, version=2)) == [*[t.id for t in tickets[1:]], fresh.id]


def test_quick_episodes_do_not_overtake_beyond_the_window(tmp_path: Path) -> None:
    """Case D9, order window: a slow episode holds up those issued a window later, and is then taken."""
    b = bench(tmp_path, max_lag=3, order="window", window=6)
    tickets = b.lease(16)
    for ticket in tickets[1:]:
        b.put(ticket)
    assert ids(b.claim("a", 4)) == [t.id for t in tickets[1:5]]
    assert b.claim("b", 4) is None  # eleven are ready, but only one of them was issued within the window
    b.put(tickets[0])
    assert tickets[0].id in ids(b.claim("b", 4))


def test_quick_episodes_do_not_fill_the_batch_under_a_quota(tmp_path: Path) -> None:
    """Case D9, order quota: while slow ones run, quick ones get their share only; once nothing runs, all go."""
    b = bench(tmp_path, batch=8, max_lag=1, order="quota", quota_strata=2)
    tickets = b.lease(16)
    quick, slow = tickets[:8], tickets[8:]
    for place, ticket in enumerate(quick):
        b.now += 0.1 + 0.01 * place
        b.put(ticket)
    b.now += 100
    assert b.claim("a", 8) is None  # in order of completion these eight would have been a batch
    for ticket in slow[:4]:
        b.now += 1
        b.put(ticket)
    taken = ids(b.claim("a", 8))
    assert len(set(taken) & {t.id for t in slow}) == 4


def test_issued_and_consumed_lengths_are_reported(tmp_path: Path) -> None:
    """Case D9: the bias towards quick episodes can be seen."""
    b = bench(tmp_path, max_lag=1)
    for length, ticket in enumerate(b.lease(8), start=1):
        b.now += 1
        b.put(ticket, tokens=length)
    b.claim("a", 4)
    metrics = b.ledger.status().metrics
    assert metrics["issued_tokens"]["mean"] == 4.5
    assert metrics["consumed_tokens"]["mean"] == 2.5
    assert metrics["consumed_latency_s"]["max"] == 4
    assert metrics["issued_latency_s"]["max"] == 8
    assert metrics["queue_wait_s"]["max"] == 7


def test_delivering_twice_is_harmless(tmp_path: Path) -> None:
    """Case D3: the first delivery counts, also when the ticket has been dealt to another worker meanwhile."""
    b = bench(tmp_path)
    [ticket] = b.lease(1, "presumed dead")
    b.do(lambda: b.ledger.release_worker("presumed dead"))
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
    b.do(lambda: b.ledger.release_worker("presumed dead"))
    assert [t.id for t in b.lease(1, "other")] == [ticket.id]
    if stop is None:
        late = b.do(lambda: b.ledger.fail(ticket.id, "too late", retry=True, worker="presumed dead"))
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
    b.do(lambda: b.ledger.heard_of("alive"))
    b.now += 2
    assert b.do(b.ledger.reap) == 2
    assert [t.id for t in b.lease(9, "new")] == [t.id for t in dead]
    b.restart()
    b.now += 14
    assert b.do(b.ledger.reap) == 0  # a runtime outlives the store's restart
    b.do(lambda: b.ledger.heard_of("alive"))
    b.now += 2
    assert b.do(b.ledger.reap) == 2
    assert {t.id for t in b.lease(9)} == {t.id for t in dead}
    assert len(alive) == 2


def test_a_bad_episode_is_a_counted_rejection(tmp_path: Path) -> None:
    """Case C: it is logged with its reason, retried up to the cap, and its capacity comes back."""
    b = bench(tmp_path, max_attempts=1, max_lag=0)
    [ticket, *_] = b.lease(4)
    ending = b.do(lambda: b.ledger.reject(ticket.id, "no action token"))
    assert ending.outcome == "given_up"
    assert b.counters()["rejected"] == 1
    assert b.ledger.one("SELECT reason FROM events WHERE ticket = ?", ticket.id) == "no action token"
    assert len(b.lease(4)) == 1


def test_an_episode_under_a_wrong_id_is_rejected(tmp_path: Path) -> None:
    b = bench(tmp_path)
    [ticket] = b.lease(1)
    episode = make_episode("somebody-else")
    assert b.do(lambda: b.ledger.deliver(ticket.id, episode, encode(episode))).outcome == "retry"
    assert b.ledger.status().ready == 0


def test_a_full_disk_loses_nothing_and_is_named(tmp_path: Path) -> None:
    """A full disk: a typed error, what was acknowledged stays, and the call can be repeated when there is room."""
    b = bench(tmp_path, batch=64, max_bytes=400_000)
    acknowledged, refused = [], None
    for ticket in b.lease(64):
        try:
            b.put(ticket, tokens=2000)
        except StoreFull as error:
            refused = (ticket, str(error))
            break
        acknowledged.append(ticket.id)
    assert refused is not None
    assert acknowledged
    assert "make room" in refused[1]
    assert set(b.statuses()) == set(acknowledged)
    b.config = StoreConfig(tasks=100, batch=64, max_bytes=4_000_000)
    b.restart()
    assert set(b.statuses()) == set(acknowledged)
    assert b.put(refused[0], tokens=2000).outcome == "accepted"


def test_one_that_does_not_fit_does_not_spoil_the_commit_of_others(tmp_path: Path) -> None:
    """Grouped commits: a full disk undoes the whole transaction; those that fit are repeated alone."""
    b = bench(tmp_path, max_bytes=300_000)
    small, huge, other = b.lease(3)
    episodes = [make_episode(small.id), make_episode(huge.id, tokens=100_000), make_episode(other.id)]
    answers = b.ledger.apply([lambda e=e: b.ledger.deliver(e.id, e, encode(e)) for e in episodes])
    assert [type(a).__name__ for a in answers] == ["Ending", "StoreFull", "Ending"]
    assert set(b.statuses()) == {small.id, other.id}


def test_a_claim_that_could_never_be_complete_is_refused(tmp_path: Path) -> None:
    """Case D2: waiting for ever is an error that names the keys."""
    b = bench(tmp_path, max_lag=0)
    with pytest.raises(StoreFault, match="max_lag=0"):
        b.claim("a", 5)


@pytest.mark.parametrize(
    ("keys", "named"),
    [
        ({"batch": 12, "group_size": 8}, "group_size"),
        ({"batch": 12, "max_ready": 8}, "max_ready"),
        ({"orders": "window"}, "orders"),
    ],
)
def test_an_impossible_configuration_names_its_key(keys: dict[str, object], named: str) -> None:
    with pytest.raises(pydantic.ValidationError, match=named):
        StoreConfig(**keys)
