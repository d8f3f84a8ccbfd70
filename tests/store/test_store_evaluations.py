"""Evaluations: pinned to a version, outside the budget, in no claim."""

from __future__ import annotations

from pathlib import Path

from store_tools import bench, ids

from agent.episode import decode


def test_evaluation_never_enters_the_training_queue(tmp_path: Path) -> None:
    """Case D7: leased first, outside the budget, in no claim; its episodes come back together."""
    b = bench(tmp_path, max_lag=0)
    for ticket in b.lease(4):
        b.put(ticket)
    name = b.do(lambda: b.ledger.evaluations.start(3, [7, 8], 2))
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
    status = b.ledger.evaluations.read(name)
    assert (status.requested, status.finished, status.failed) == (4, 4, 0)
    assert [decode(data).id for data in status.episodes] == [t.id for t in tickets]


def test_evaluation_refuses_tokens_of_another_version(tmp_path: Path) -> None:
    """Case D7: pinned means pinned; the ticket is retried, then counted as failed, and the evaluation ends."""
    b = bench(tmp_path, max_attempts=2)
    name = b.do(lambda: b.ledger.evaluations.start(3, [7], 1))
    [ticket] = b.lease(1)
    assert b.put(ticket, 4).outcome == "retry"
    assert b.ledger.evaluations.read(name).finished == 0
    [again] = b.lease(1)
    assert (again.id, again.attempt) == (ticket.id, 1)
    ending = b.put(again, 4)
    assert ending.outcome == "given_up"
    assert "pinned to 3" in ending.reason
    status = b.ledger.evaluations.read(name)
    assert (status.requested, status.finished, status.failed, status.episodes) == (1, 1, 1, [])


def test_the_same_evaluation_is_not_run_twice(tmp_path: Path) -> None:
    """Cases D3 and D7: a learner that resumes finds the evaluation it had begun."""
    b = bench(tmp_path)
    name = b.do(lambda: b.ledger.evaluations.start(3, [7], 1))
    b.put(b.lease(1)[0], 3)
    b.restart()
    assert b.do(lambda: b.ledger.evaluations.start(3, [7], 1)) == name
    assert b.ledger.evaluations.read(name).finished == 1
    assert b.do(lambda: b.ledger.evaluations.start(3, [7], 1, "again")) != name


def test_a_cancelled_evaluation_ends(tmp_path: Path) -> None:
    b = bench(tmp_path, tasks=0)
    name = b.do(lambda: b.ledger.evaluations.start(3, [7, 8], 1))
    [ticket] = b.lease(1)
    b.do(lambda: b.ledger.evaluations.cancel(name))
    assert b.lease(1) == []
    b.put(ticket, 3)
    status = b.ledger.evaluations.read(name)
    assert (status.finished, status.failed, len(status.episodes)) == (2, 1, 1)
