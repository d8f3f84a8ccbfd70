"""The ledger's file: what survives a restart, which configuration it takes, what a full disk does."""

from __future__ import annotations

from pathlib import Path

import pydantic
import pytest
from store_tools import Bench, bench, make_episode

from agent.episode import encode
from agent.store.config import StoreConfig
from agent.store.protocol import StoreFault, StoreFull


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
    assert b.do(lambda: b.ledger.tickets.release_worker("w")) == 2
    assert {t.id for t in b.lease(100)} == {t.id for t in tickets[6:]}


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
    answers = b.ledger.apply([lambda e=e: b.ledger.tickets.deliver(e.id, e, encode(e)) for e in episodes])
    assert [type(a).__name__ for a in answers] == ["Ending", "StoreFull", "Ending"]
    assert set(b.statuses()) == {small.id, other.id}


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
