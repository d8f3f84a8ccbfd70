"""Several environments in one store: drawn by weight, each with a place of its own in its data."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError
from store_tools import Bench

from agent.store.config import StoreConfig
from agent.store.protocol import StoreFault
from agent.store.rules import draw_environment

SHARES = [{"name": "many", "tasks": 50, "weight": 3}, {"name": "few", "tasks": 7, "weight": 1}]


def mixed(path: Path, **keys: Any) -> Bench:
    config = StoreConfig(**{"environments": SHARES, "seed": 5, "batch": 100, "max_lag": 3, **keys})
    return Bench(path / "mixed.sqlite", config, durable=False)


def test_draws_follow_the_weights_and_each_environment_is_gone_through_whole(tmp_path: Path) -> None:
    tickets = mixed(tmp_path).lease(400)
    drawn = Counter(ticket.environment for ticket in tickets)
    assert sum(drawn.values()) == 400
    assert abs(drawn["many"] - 300) < 45  # five standard deviations of 400 draws
    assert len({ticket.id for ticket in tickets}) == 400
    for name, tasks in (("many", 50), ("few", 7)):
        indices = [ticket.task_index for ticket in tickets if ticket.environment == name]
        assert len(indices) > tasks
        for start in range(0, len(indices) - tasks, tasks):
            assert sorted(indices[start : start + tasks]) == list(range(tasks))


def test_a_restarted_store_draws_what_it_would_have_drawn(tmp_path: Path) -> None:
    """The place in the stream is on the disk, with each environment's place in its data; the seed decides the rest."""
    (tmp_path / "whole").mkdir()
    whole = [ticket.id for ticket in mixed(tmp_path / "whole").lease(120)]
    b, parts = mixed(tmp_path), list[str]()
    for count in (1, 37, 2, 60, 20):
        parts += [ticket.id for ticket in b.lease(count)]
        b.restart()
    assert parts == whole
    (tmp_path / "other").mkdir()
    assert [ticket.id for ticket in mixed(tmp_path / "other", seed=6).lease(120)] != whole


def test_the_members_of_a_group_are_of_one_environment(tmp_path: Path) -> None:
    tickets = mixed(tmp_path, group_size=4).lease(200)
    groups: dict[str, set[tuple[str, int]]] = {}
    for ticket in tickets:
        groups.setdefault(str(ticket.group_id), set()).add((ticket.environment, ticket.task_index))
    assert len(groups) == 50
    assert all(len(members) == 1 for members in groups.values())
    assert {environment for members in groups.values() for environment, _ in members} == {"many", "few"}


def test_a_ticket_that_is_dealt_again_keeps_its_environment(tmp_path: Path) -> None:
    b = mixed(tmp_path)
    first = {ticket.id: ticket.environment for ticket in b.lease(10)}
    b.restart()
    b.do(lambda: b.ledger.tickets.release_worker("*"))
    again = {ticket.id: ticket.environment for ticket in b.lease(10)}
    assert again == first


@pytest.mark.parametrize("weight", [0, -1, float("nan"), float("inf"), "much"])
def test_weights_that_make_no_sense_are_refused(weight: Any) -> None:
    with pytest.raises(ValidationError, match="weight"):
        StoreConfig(environments=[{"name": "a", "tasks": 1, "weight": weight}])


def test_names_that_do_not_tell_apart_or_do_not_fit_an_address_are_refused() -> None:
    with pytest.raises(ValidationError, match="same name"):
        StoreConfig(environments=[{"name": "a", "tasks": 1}, {"name": "a", "tasks": 2}])
    with pytest.raises(ValidationError, match="name"):
        StoreConfig(environments=[{"name": "a/b", "tasks": 1}])
    with pytest.raises(ValidationError, match="leave it out"):
        StoreConfig(tasks=3, environments=[{"name": "a", "tasks": 1}])


def test_a_session_may_change_weights_and_nothing_that_its_place_in_the_data_hangs_on(tmp_path: Path) -> None:
    b = mixed(tmp_path)
    b.lease(10)
    b.config = StoreConfig(environments=[SHARES[0], {**SHARES[1], "tasks": 8}], seed=5, batch=100, max_lag=3)
    with pytest.raises(StoreFault, match="environments="):
        b.restart()
    b.config = StoreConfig(environments=[SHARES[0], {**SHARES[1], "weight": 1e6}], seed=5, batch=100, max_lag=3)
    b.open()
    assert {ticket.environment for ticket in b.lease(30)} == {"few"}


def test_draws_are_of_seed_and_number_alone() -> None:
    assert [draw_environment(1, n, [1, 1, 2]) for n in range(50)] == [
        draw_environment(1, n, [1, 1, 2]) for n in range(50)
    ]
    assert {draw_environment(1, n, [1, 1, 2]) for n in range(50)} == {0, 1, 2}


def test_evaluations_take_no_more_than_their_share_of_the_leases(tmp_path: Path) -> None:
    """`evaluations_at_once`: beside them training goes on, and the next one follows an end."""
    b = mixed(tmp_path, evaluations_at_once=2)
    b.do(lambda: b.ledger.evaluations.start(1, [0, 1, 2], 2, environment="held", pinned=False))
    tickets = b.lease(10)
    evaluated = [ticket for ticket in tickets if ticket.kind == "evaluate"]
    assert [(t.environment, t.pinned_version) for t in evaluated] == [("held", None)] * 2
    assert len(tickets) == 10
    assert not [ticket for ticket in b.lease(10) if ticket.kind == "evaluate"]
    b.put(evaluated[0], 5)
    assert sum(ticket.kind == "evaluate" for ticket in b.lease(10)) == 1


def test_a_worker_of_one_kind_is_given_no_ticket_of_the_other(tmp_path: Path) -> None:
    b = mixed(tmp_path)
    b.do(lambda: b.ledger.evaluations.start(1, [0, 1], 1))
    assert {t.kind for t in b.do(lambda: b.ledger.tickets.lease(9, "w", kind="train"))} == {"train"}
    assert [t.kind for t in b.do(lambda: b.ledger.tickets.lease(9, "w", kind="evaluate"))] == ["evaluate"] * 2
    assert b.do(lambda: b.ledger.tickets.lease(9, "w", kind="evaluate")) == []
