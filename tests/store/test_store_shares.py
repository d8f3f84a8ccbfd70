"""One user's verdicts are never a whole batch while others judge, and a server with one user learns all the same."""

from __future__ import annotations

from collections import Counter
from functools import partial
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError
from store_tools import Bench, make_episode

from agent.episode import encode
from agent.store.config import StoreConfig
from agent.store.shares import within_share

BATCH, WINDOW_S = 32, 600.0


def bench(path: Path, **keys: object) -> Bench:
    shares = {"batch": BATCH, "max_lag": 4, "max_share_per_user": 0.125, "user_window_s": WINDOW_S}
    return Bench(path / "episodes.sqlite", StoreConfig(**{**shares, **keys}), durable=False)  # type: ignore[arg-type]


def offer(store: Bench, judge: str, count: int) -> None:
    have = store.ledger.one("SELECT count(*) FROM episode_rows")
    made = [make_episode(f"{judge}-{have + i}") for i in range(count)]
    for answer in store.ledger.apply([partial(store.ledger.offers.take, e, encode(e), judge) for e in made]):
        assert not isinstance(answer, Exception), answer


def versions_in(store: Bench, seconds: int) -> list[Counter[str]]:
    """Who is in the batches that a learner makes which asks once a second."""
    batches: list[Counter[str]] = []
    for _ in range(seconds):
        while (claim := store.claim(f"c{store.ledger.one('SELECT count(*) FROM claims')}", BATCH)) is not None:
            rows = store.ledger.all("SELECT judge FROM episode_rows WHERE claim = ?", claim.id)
            batches.append(Counter(row["judge"] for row in rows))
            store.commit(claim.id, len(batches))
        store.now += 1
    return batches


def test_1920_verdicts_of_one_address_make_no_60_versions_while_others_judge(tmp_path: Path) -> None:
    store = bench(tmp_path)
    offer(store, "poisoner", 1920)
    for user in range(49):
        offer(store, f"u{user}", 1)
    batches = versions_in(store, 25)
    assert len(batches) == 1
    assert batches[0]["poisoner"] == BATCH // 8
    assert store.ledger.status().metrics["takeable"] == 49 - (BATCH - BATCH // 8) + BATCH // 8
    for user in range(49):
        offer(store, f"u{user}", 1)
    more = versions_in(store, 25)
    assert [batch["poisoner"] for batch in more] == [4, 4], "what is over waits, and is taken within the share"


def test_without_the_key_a_prolific_user_is_every_batch(tmp_path: Path) -> None:
    """What it is for: the same store as before it."""
    store = bench(tmp_path, max_share_per_user=None)
    offer(store, "poisoner", 1920)
    assert len(versions_in(store, 1)) == 60


def test_a_server_with_one_user_learns_at_once(tmp_path: Path) -> None:
    store = bench(tmp_path)
    offer(store, "me", 64)
    assert [dict(batch) for batch in versions_in(store, 1)] == [{"me": 32}, {"me": 32}]


def test_two_users_share_a_batch_equally(tmp_path: Path) -> None:
    store = bench(tmp_path)
    offer(store, "ann", 40)
    offer(store, "bob", 16)
    assert [dict(batch) for batch in versions_in(store, 5)] == [{"ann": 16, "bob": 16}]


def test_one_who_is_nearly_alone_gets_a_batch_a_window_and_everybody_else_is_in_it(tmp_path: Path) -> None:
    store = bench(tmp_path)
    offer(store, "ann", 3)
    offer(store, "bob", 500)
    assert not versions_in(store, int(WINDOW_S) - 1)
    offer(store, "ann", 1)  # who is still there
    assert [dict(batch) for batch in versions_in(store, 60)] == [{"ann": 4, "bob": 28}]
    store.restart()
    assert not versions_in(store, 60), "the window is counted from the disk"


def test_one_who_stays_alone_is_not_held_for_ever(tmp_path: Path) -> None:
    store = bench(tmp_path)
    offer(store, "ann", 1)
    offer(store, "bob", 95)
    store.now += WINDOW_S + 1
    offer(store, "bob", 1)
    first = versions_in(store, int(WINDOW_S) + 2)
    assert [dict(batch) for batch in first] == [{"ann": 1, "bob": 31}, {"bob": 32}, {"bob": 32}]


def test_what_is_over_goes_stale_like_everything_else(tmp_path: Path) -> None:
    store = bench(tmp_path, stale_policy="drop", max_lag_at_claim=2)
    for user in range(40):
        offer(store, f"u{user}", 1)
    offer(store, "poisoner", 100)
    assert store.claim("a", BATCH, 0) is not None
    assert store.claim("b", BATCH, 3) is None
    assert store.ledger.one("SELECT count(*) FROM episode_rows WHERE status = 'ready'") == 0
    assert store.counters()["stale"] == 108


def test_tickets_have_no_user_and_no_bound(tmp_path: Path) -> None:
    store = bench(tmp_path, tasks=100)
    for ticket in store.lease(BATCH):
        store.put(ticket)
    assert store.claim("a", BATCH) is not None


@given(
    waiting=st.lists(st.sampled_from(["", "a", "b", "c", "d", "e", "f", "g", "h", "i", "j"]), max_size=60),
    count=st.integers(1, 32),
    share=st.floats(0.01, 1.0),
    active=st.integers(0, 50),
    relaxed=st.booleans(),
)
def test_a_bound_never_leaves_more_to_one_than_it_must(
    waiting: list[str], count: int, share: float, active: int, relaxed: bool
) -> None:
    allowed = within_share(waiting, count, share=share, active=active, relaxed=relaxed)
    taken = Counter(judge for judge, yes in zip(waiting, allowed, strict=True) if yes and judge)
    assert sum(allowed) >= sum(not judge for judge in waiting), "what an environment graded is nobody's"
    if relaxed:
        assert sum(allowed) >= min(count, len(waiting)) or len(waiting) < count
    if not taken:
        return
    bound = max(taken.values())
    left = {judge for judge, yes in zip(waiting, allowed, strict=True) if not yes}
    assert all(taken[judge] == bound for judge in left), "whoever waits has as many in as anybody"
    if not relaxed:
        assert bound <= max(1, int(share * count), -(-count // max(1, active, len(set(waiting) - {""}))))


def test_a_share_of_nothing_is_refused() -> None:
    with pytest.raises(ValidationError, match="max_share_per_user"):
        StoreConfig(max_share_per_user=0)
