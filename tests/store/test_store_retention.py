"""Room in the file: what goes, what stays, and who may ask."""

from __future__ import annotations

import asyncio
import sqlite3
import subprocess
import sys
from pathlib import Path

import pytest
from store_tools import Bench, bench, ids, make_episode, running_store
from test_store_layouts import as_version_1

from agent.episode import encode
from agent.store import pruning
from agent.store.__main__ import main
from agent.store.config import StoreConfig
from agent.store.protocol import StoreFault, StoreFull
from agent.store.reading import EpisodeFilter, EpisodeReader

TOKENS = 20_000
"""Of one episode: 160 kB."""


def trained(b: Bench, batches: int, tokens: int = 200) -> list[str]:
    """Train so many batches of four; their episodes, in the order of completion."""
    names = []
    for _ in range(batches):
        for ticket in b.lease(4):
            b.put(ticket, tokens=tokens)
        name = f"claim of {ticket.id}"
        names += ids(b.claim(name, 4))
        b.commit(name)
    return names


def kept(path: Path) -> list[str]:
    """The trained episodes whose tokens are there."""
    with EpisodeReader(path) as reader:
        return [row.id for row in reader.list(EpisodeFilter(status="trained", limit=10_000)) if row.gone is None]


def test_the_newest_trained_episodes_stay_and_the_figures_of_all(tmp_path: Path) -> None:
    """Case M7: `keep_trained` bounds the file; what is ready, claimed or an evaluation's never goes."""
    b = bench(tmp_path, keep_trained=5)
    names = trained(b, 3)
    evaluation = b.do(lambda: b.ledger.evaluations.start(0, [1, 2], 1))
    for ticket in b.lease(2):
        assert ticket.kind == "evaluate"
        b.put(ticket)
    ready = b.lease(4)
    for ticket in ready:
        b.put(ticket)
    before = b.statuses()
    while b.do(b.ledger.prune).episodes:
        pass
    assert kept(b.path) == names[-5:]
    assert b.statuses() == before
    assert b.counters()["pruned"] == 7
    assert len(b.do(lambda: b.ledger.evaluations.read(evaluation)).episodes) == 2
    assert ids(b.claim("next", 4)) == [t.id for t in ready]
    with EpisodeReader(b.path) as reader:
        rows = {row.id: row for row in reader.list()}
        assert (rows[names[0]].gone, rows[names[0]].tokens, rows[names[0]].reward) == ("pruned", 200, 1.0)
        with pytest.raises(StoreFault, match="pruned"):
            reader.get(names[0])
        assert reader.get(names[-1])


def test_nothing_goes_unless_it_is_asked_for(tmp_path: Path) -> None:
    b = bench(tmp_path)
    names = trained(b, 3)
    assert b.do(b.ledger.prune).episodes == 0
    assert kept(b.path) == names


def test_a_pruned_episode_is_not_taken_a_second_time(tmp_path: Path) -> None:
    b = bench(tmp_path, keep_trained=0)
    [name, *_] = trained(b, 1)
    b.do(b.ledger.prune)
    assert b.put(name).outcome == "duplicate"
    assert b.do(lambda: b.ledger.offers.take(make_episode(name), encode(make_episode(name)))).outcome == "duplicate"


def test_trained_episodes_make_room_before_a_delivery_is_refused(tmp_path: Path) -> None:
    """Case M7: a file at `max_bytes` does not end the runtime while it holds what nobody will claim again."""
    b = bench(tmp_path, max_bytes=2_000_000)
    names = trained(b, 12, tokens=TOKENS)
    assert len(names) == 48, "four times what fits"
    assert b.counters()["pruned"] > 30
    assert kept(b.path) == names[-len(kept(b.path)) :], "the oldest went first"
    b.ledger.close()
    assert b.path.stat().st_size <= 2_000_000


def test_what_must_be_kept_makes_no_room(tmp_path: Path) -> None:
    """`keep_trained` holds at a full file too: the delivery is refused, and what to do is said."""
    b = bench(tmp_path, max_bytes=2_000_000, keep_trained=8)
    with pytest.raises(StoreFull, match="make room"):
        trained(b, 12, tokens=TOKENS)
    assert len(kept(b.path)) == 8
    assert "claimed" not in b.statuses().values()


def test_one_delivery_that_finds_no_room_does_not_prune_what_is_not_trained(tmp_path: Path) -> None:
    b = bench(tmp_path, max_bytes=2_000_000, max_lag=9)
    endings = []
    for ticket in b.lease(20):
        episode = make_episode(ticket.id, tokens=TOKENS)
        endings += b.ledger.apply([lambda e=episode: b.ledger.tickets.deliver(e.id, e, encode(e))])
    assert {type(ending).__name__ for ending in endings} == {"Ending", "StoreFull"}
    assert len(set(b.statuses().values())) == 1
    assert b.counters().get("pruned", 0) == 0


async def test_a_running_store_prunes_by_itself_and_says_what_became_of_an_episode(tmp_path: Path) -> None:
    path = tmp_path / "e.sqlite"
    async with running_store(path, "tasks=100", "batch=4", "max_lag=4", "keep_trained=2") as (store, _):
        for number in range(3):
            for ticket in await store.lease(4, "w"):
                await store.put(ticket.id, make_episode(ticket.id))
            claim = await store.claim(4, number)
            assert claim is not None
            await store.commit(claim.id, number + 1)
            await store.set_version(number + 1)
        async with asyncio.timeout(60):
            while len(left := [row for row in await store.episodes() if row.gone is None]) > 2:  # noqa: ASYNC110
                await asyncio.sleep(0.05)
        assert len(left) == 2
        assert (await store.episode(left[-1].id)).action_tokens == 2
        [first, *_] = await store.episodes()
        with pytest.raises(StoreFault, match="pruned"):
            await store.episode(first.id)


# -- the command


def filled(tmp_path: Path) -> tuple[Bench, list[str]]:
    b = Bench(tmp_path / "episodes.sqlite", StoreConfig(tasks=100, batch=4), durable=False)
    return b, trained(b, 6, tokens=TOKENS)


def test_the_command_prunes_a_file_at_rest_and_gives_the_room_back(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def command(*words: str) -> str:
        assert main(["prune", *words]) == 0
        return capsys.readouterr().out

    b, names = filled(tmp_path)
    b.ledger.close()
    before = b.path.stat().st_size
    said = command(str(tmp_path), "--keep", "6", "--dry-run")
    assert "18 finished episodes would go" in said
    assert b.path.stat().st_size == before
    assert kept(b.path) == names
    said = command(str(tmp_path), "--keep", "6")
    assert "pruned 18 finished episodes" in said
    assert kept(b.path) == names[-6:]
    assert b.path.stat().st_size < before / 2
    command(str(b.path))
    assert kept(b.path) == []
    assert b.path.stat().st_size < 200_000
    b.open()
    assert trained(b, 1)


def test_the_command_works_beside_the_store_that_owns_the_file(tmp_path: Path) -> None:
    """A whole other process deletes and moves pages, while this store delivers and claims."""
    b, names = filled(tmp_path)
    before = b.path.stat().st_size
    with subprocess.Popen(
        [sys.executable, "-m", "agent.store", "prune", str(tmp_path), "--keep", "2"], stdout=subprocess.PIPE
    ) as running:
        rounds = 0
        while (running.poll() is None or not rounds) and rounds < 500:  # a list of episodes has 10,000 at most
            names += trained(b, 1)
            rounds += 1
        assert running.wait(60) == 0
    assert b.ledger.one("PRAGMA integrity_check") == "ok"
    assert kept(b.path) == names[-len(kept(b.path)) :]
    assert b.counters()["pruned"] >= 22
    assert b.ledger.one("PRAGMA freelist_count") * 4096 < before / 2, "what was freed was given back, or used again"


def test_the_command_brings_an_older_file_up_to_date_and_shrinks_it(tmp_path: Path) -> None:
    b, names = filled(tmp_path)
    as_version_1(b)
    sql = sqlite3.connect(b.path)
    sql.execute("PRAGMA auto_vacuum=NONE")
    sql.execute("VACUUM")
    sql.close()
    before = b.path.stat().st_size
    assert [*pruning.prune(b.path, 4, dry_run=False)]
    assert kept(b.path) == names[-4:]
    assert b.path.stat().st_size < before / 2


def test_the_run_says_how_many_to_keep_where_the_command_does_not(tmp_path: Path) -> None:
    b = bench(tmp_path, keep_trained=3)
    names = trained(b, 2)
    b.ledger.close()
    assert pruning.main([str(tmp_path)]) == 0
    assert kept(b.path) == names[-3:]


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["nowhere"], "no episode store at nowhere"),
        (["other.sqlite"], "other.sqlite"),
        ([".", "--keep", "-1"], "--keep"),
    ],
    ids=["no file", "another file", "fewer than none"],
)
def test_the_command_says_in_one_line_what_is_wrong(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], words: list[str], named: str
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("other.sqlite").write_bytes(b"no database at all, " * 1000)
    assert pruning.main(words) == 2
    said = capsys.readouterr().err
    assert named in said
    assert said.count("\n") == 1


@pytest.mark.parametrize("words", [["prune", "--help"], ["--help"]], ids=["prune", "store"])
def test_the_command_explains_itself_with_an_example(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        main(words)
    assert "python -m agent.store prune " in capsys.readouterr().out
