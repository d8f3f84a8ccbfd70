"""Episodes that nobody leased a ticket for."""

from __future__ import annotations

import contextlib
import random
from pathlib import Path

import msgspec
import pytest
from store_tools import Bench, make_episode, running_store

from agent.episode import StopReason, decode, encode
from agent.store.client import StoreClient
from agent.store.config import StoreConfig
from agent.store.protocol import Ending, StoreFault, StoreFull
from agent.store.reading import EpisodeFilter


def bench(path: Path, **keys: object) -> Bench:
    return Bench(path / "episodes.sqlite", StoreConfig(**{"batch": 2, "max_lag": 1, **keys}))  # type: ignore[arg-type]


def offer(store: Bench, name: str, version: int = 0, stop: StopReason = StopReason.TERMINATED) -> Ending:
    episode = make_episode(name, version, stop=stop)
    return store.do(lambda: store.ledger.offers.take(episode, encode(episode)))


def forget(store: Bench, name: str) -> bool:
    return bool(store.do(lambda: store.ledger.offers.forget(name)))


def replace(store: Bench, name: str, reward: float) -> Ending:
    episode = msgspec.structs.replace(make_episode(name), turn_rewards=(reward,))
    return store.do(lambda: store.ledger.offers.replace(episode, encode(episode)))


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
    assert not forget(store, "b"), "the learner has it in memory"
    assert store.ledger.one("SELECT length(data) FROM episodes WHERE id = 'b'") == 0, "and the file has not"
    store.commit("c", 1)
    assert forget(store, "b")
    assert store.statuses() == {"a": "dropped", "b": "trained", "c": "trained"}


def test_what_was_deleted_while_a_dead_learner_held_it_is_not_claimed_again(tmp_path: Path) -> None:
    """Its claim is released without it; a batch with nothing to train on would end the next learner too."""
    store = bench(tmp_path)
    for name in "ab":
        offer(store, name)
    store.claim("c", 2)
    forget(store, "a")
    with pytest.raises(StoreFault, match="deleted"):
        store.claim("c", 2)
    store.do(lambda: store.ledger.claims.recover([]))
    assert store.statuses() == {"a": "dropped", "b": "ready"}


def test_a_verdict_changes_until_the_learner_has_it(tmp_path: Path) -> None:
    store = bench(tmp_path)
    for name in "ab":
        offer(store, name)
    assert replace(store, "a", 0.25).outcome == "accepted"
    assert replace(store, "new", 1.0).outcome == "accepted"
    claim = store.claim("c", 2)
    assert claim is not None
    assert [decode(data).reward for data in claim.episodes] == [0.25, make_episode("b").reward], "in its old place"
    assert replace(store, "a", 1.0) == Ending(
        "superseded", "its episode is claimed: only one that waits for the learner can change"
    )
    forget(store, "new")
    assert "deleted" in replace(store, "new", 1.0).reason


def files_of(store: Bench) -> bytes:
    return b"".join(path.read_bytes() for path in store.path.parent.iterdir())


def test_deleted_words_are_in_no_file_while_the_store_runs(tmp_path: Path) -> None:
    """Rows that had moved when the tree was balanced left copies in unused parts of pages, secure_delete or not."""
    store, rng = bench(tmp_path, max_lag=10_000), random.Random(0)
    words = {f"e{i}": b"secret-%05d-" % i for i in range(400)}
    for name, word in words.items():
        text = (word * rng.choice((1, 20, 90, 400))).decode()
        episode = make_episode(name)
        prompt = msgspec.structs.replace(episode.segments[0], text=text)
        said = msgspec.structs.replace(episode, segments=(prompt, *episode.segments[1:]))
        store.do(lambda said=said: store.ledger.offers.take(said, encode(said)))
    gone = rng.sample(sorted(words), 200)
    for name in gone:
        forget(store, name)
    assert store.ledger.settle()
    kept = files_of(store)
    assert not [name for name in gone if words[name] in kept]
    assert all(words[name] in kept for name in words.keys() - set(gone))


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
        assert await store.forget("a")
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
