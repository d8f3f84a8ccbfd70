"""Claims: what one takes, in which order, and what a commit, a release and a recovery make of it."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from store_tools import bench, ids

from agent.store.config import StoreConfig
from agent.store.protocol import StoreFault


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


def test_lag_counts_the_time_in_the_queue(tmp_path: Path) -> None:
    """Case D4: the lag is of the oldest token, against the version at the claim."""
    b = bench(tmp_path)
    for version, ticket in enumerate(b.lease(4)):
        b.put(ticket, version)
    claim = b.claim("a", 4, version=5)
    assert claim is not None
    assert [facts["lag"] for facts in claim.facts] == [5, 4, 3, 2]


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


def test_a_claim_that_could_never_be_complete_is_refused(tmp_path: Path) -> None:
    """Case D2: waiting for ever is an error that names the keys."""
    b = bench(tmp_path, max_lag=0)
    with pytest.raises(StoreFault, match="max_lag=0"):
        b.claim("a", 5)


def test_a_forced_lag_is_the_lag_of_every_claim_once_the_queue_has_gone_round(tmp_path: Path) -> None:
    b = bench(tmp_path, max_lag=3, forced_lag=3)
    lags, version = [], 0
    for step in range(10):
        for ticket in b.lease(99):
            b.put(ticket, version)
        claim = b.claim(str(step), 4, version)
        assert claim is not None
        lags += {int(facts["lag"]) for facts in claim.facts}
        b.commit(str(step), version := version + 1)
        b.do(lambda v=version: b.ledger.set_version(v))
    assert lags == [0, 1, 2, 3, 3, 3, 3, 3, 3, 3]


@pytest.mark.parametrize(
    ("keys", "says"),
    [
        (dict(max_lag=3), "raise max_lag"),
        (dict(max_lag=4, max_ready=16), "max_ready=16 is below the 20 episodes"),
        (dict(max_lag=4, stale_policy="drop"), "use train"),
        (dict(max_lag=4, order="window"), "what waits longest"),
    ],
)
def test_a_forced_lag_that_would_never_be_reached_is_refused(keys: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        StoreConfig(tasks=9, batch=4, forced_lag=4, **keys)
