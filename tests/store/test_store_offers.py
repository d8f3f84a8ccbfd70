"""Episodes that nobody leased a ticket for."""

from __future__ import annotations

import contextlib
from pathlib import Path

import pytest
from store_tools import Bench, make_episode, running_store

from agent.episode import StopReason, encode
from agent.store.client import StoreClient
from agent.store.config import StoreConfig
from agent.store.protocol import Ending, StoreFault, StoreFull
from agent.store.reading import EpisodeFilter


def bench(path: Path, **keys: object) -> Bench:
    return Bench(path / "episodes.sqlite", StoreConfig(**{"batch": 2, "max_lag": 1, **keys}))  # type: ignore[arg-type]


def offer(store: Bench, name: str, version: int = 0, stop: StopReason = StopReason.TERMINATED) -> Ending:
    episode = make_episode(name, version, stop=stop)
    return store.do(lambda: store.ledger.offers.take(episode, encode(episode)))


def forget(store: Bench, name: str) -> None:
    store.do(lambda: store.ledger.offers.forget(name))


def test_an_offer_is_taken_once_and_trained_once(tmp_path: Path) -> None:
    """Case G5 at the store: the episode's id makes a second delivery harmless, before and after training."""
    store = bench(tmp_path)
    assert offer(store, "a").outcome == "accepted"
    assert offer(store, "a").outcome == "duplicate"
    assert offer(store, "b").outcome == "accepted"
    claim = store.claim("c", 2)
    assert claim is not None
    assert len(claim.episodes) == 2
    store.commit("c", 1)
    store.restart()
    assert offer(store, "a").outcome == "duplicate"
    assert store.statuses() == {"a": "trained", "b": "trained"}
    assert store.claim("d", 2) is None


def test_offers_and_tickets_share_one_queue_and_budget(tmp_path: Path) -> None:
    store = bench(tmp_path, tasks=10)
    for name in "abc":
        offer(store, name)
    [ticket] = store.lease(8)  # capacity 4, three are taken by offers
    store.put(ticket)
    claim = store.claim("c", 2)
    assert claim is not None
    assert store.ledger.status().ready == 2
    assert [fact["task_index"] for fact in claim.facts] == [-1.0, -1.0]


def test_an_offer_is_never_refused_for_want_of_a_slot(tmp_path: Path) -> None:
    """Case D5: served conversations cannot be had again."""
    store = bench(tmp_path, max_ready=2)
    assert {offer(store, f"o{i}").outcome for i in range(50)} == {"accepted"}
    assert store.ledger.status().ready == 50


def test_an_offer_that_is_too_old_goes_stale_at_its_claim(tmp_path: Path) -> None:
    store = bench(tmp_path, stale_policy="drop", max_lag_at_claim=2)
    offer(store, "old", 0)
    offer(store, "new", 3)
    offer(store, "newer", 3)
    claim = store.claim("c", 2, version=3)
    assert claim is not None
    assert store.statuses() == {"old": "stale", "new": "claimed", "newer": "claimed"}


def test_what_could_never_be_trained_is_refused(tmp_path: Path) -> None:
    groups = bench(tmp_path / "groups", group_size=2)
    with pytest.raises(StoreFault, match="single-rollout"):
        offer(groups, "a")
    store = bench(tmp_path / "one", drop_truncated=True)
    with pytest.raises(StoreFault, match="aborted"):
        offer(store, "a", stop=StopReason.ABORTED)
    assert offer(store, "b", stop=StopReason.TRUNCATED_TURNS).outcome == "dropped"


def test_what_is_forgotten_is_not_trained_and_not_taken_again(tmp_path: Path) -> None:
    store = bench(tmp_path)
    for name in "abc":
        offer(store, name)
    forget(store, "a")
    forget(store, "a")
    forget(store, "never there")
    assert offer(store, "a").outcome == "duplicate"
    claim = store.claim("c", 2)
    assert claim is not None
    with pytest.raises(StoreFault, match="repeat"):
        forget(store, "b")
    store.commit("c", 1)
    forget(store, "b")
    assert store.statuses() == {"a": "dropped", "b": "trained", "c": "trained"}
    assert store.ledger.one("SELECT length(data) FROM episodes WHERE id = 'b'") == 0


def test_an_episode_with_a_ticket_is_not_forgotten(tmp_path: Path) -> None:
    store = bench(tmp_path, tasks=4)
    [ticket] = store.lease(1)
    store.put(ticket)
    with pytest.raises(StoreFault, match="ticket"):
        forget(store, ticket.id)


async def test_offers_over_http_survive_a_kill(tmp_path: Path) -> None:
    path = tmp_path / "episodes.sqlite"
    async with running_store(path, "batch=2", kill=True) as (store, _):
        assert (await store.offer(make_episode("a"))).outcome == "accepted"
    async with running_store(path) as (store, _):
        assert (await store.offer(make_episode("a"))).outcome == "duplicate"
        [row] = await store.episodes(EpisodeFilter(kind="served"))
        assert (row.id, row.status, row.task_id) == ("a", "ready", "task")
        await store.forget("a")
        with pytest.raises(StoreFault, match="no episode"):
            await store.episode("a")
        await _bad_offer(store)


async def _bad_offer(store: StoreClient) -> None:
    episode = make_episode("b")
    with pytest.raises(StoreFault, match="400"):
        await store._call("PUT", "/episodes/another", Ending, data=encode(episode))
    with pytest.raises(StoreFault, match="400"):
        await store._call("PUT", "/episodes/b", Ending, data=b"nothing")


async def test_a_full_disk_refuses_an_offer_and_keeps_the_others(tmp_path: Path) -> None:
    path = tmp_path / "episodes.sqlite"
    async with running_store(path, "batch=2", "max_bytes=200000") as (store, _):
        taken = 0
        with contextlib.suppress(StoreFull):
            for i in range(200):
                await store.offer(make_episode(f"o{i}", tokens=400))
                taken += 1
        assert 3 < taken < 200
        assert (await store.status()).ready == taken
