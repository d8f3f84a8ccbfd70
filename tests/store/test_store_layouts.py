"""Where an episode's bytes lie in the file, and files of the layout before."""

from __future__ import annotations

import sqlite3
from pathlib import Path

import pytest
from store_tools import Bench, bench, ids, make_episode

from agent.episode import decode, encode
from agent.store.config import StoreConfig
from agent.store.protocol import StoreFault
from agent.store.reading import EpisodeFilter, EpisodeReader

# The table of episodes of schema 1: figures and bytes in one row.
VERSION_1 = """
BEGIN;
DROP VIEW episodes;
CREATE TABLE episodes (
    number INTEGER PRIMARY KEY AUTOINCREMENT, id TEXT NOT NULL UNIQUE, kind TEXT NOT NULL,
    status TEXT NOT NULL CHECK (status IN ('ready', 'claimed', 'trained', 'stale', 'dropped', 'evaluation')),
    unit INTEGER NOT NULL, task_index INTEGER NOT NULL, epoch INTEGER NOT NULL, group_id TEXT, env_id TEXT NOT NULL,
    task_id TEXT NOT NULL, reward REAL NOT NULL, tokens INTEGER NOT NULL, turns INTEGER NOT NULL,
    oldest_version INTEGER NOT NULL, newest_version INTEGER NOT NULL, stop_reason TEXT NOT NULL, worker TEXT NOT NULL,
    attempt INTEGER NOT NULL, issued_at REAL NOT NULL, issued_version INTEGER NOT NULL, finished_at REAL NOT NULL,
    claimed_at REAL, claim TEXT, evaluation TEXT, data BLOB NOT NULL);
INSERT INTO episodes SELECT number, id, kind, status, unit, task_index, epoch, group_id, env_id, task_id, reward,
    tokens, turns, oldest_version, newest_version, stop_reason, worker, attempt, issued_at, issued_version, finished_at,
    claimed_at, claim, evaluation, coalesce(data, x'') FROM episode_rows LEFT JOIN episode_data USING (number);
DROP TABLE episode_rows;
DROP TABLE episode_data;
DROP TABLE texts;
CREATE INDEX episodes_live ON episodes (status, unit);
CREATE INDEX episodes_claim ON episodes (claim) WHERE claim IS NOT NULL;
CREATE INDEX episodes_evaluation ON episodes (evaluation) WHERE evaluation IS NOT NULL;
UPDATE meta SET value = '1' WHERE key = 'schema';
COMMIT;
"""


# What schema 2 did not have: judges, and a state for what a rollback sets aside.
VERSION_2 = """
BEGIN;
DROP VIEW episodes;
CREATE TABLE before AS SELECT number, id, kind, status, unit, task_index, epoch, group_id, env_id, task_id, reward,
    tokens, turns, oldest_version, newest_version, stop_reason, worker, attempt, issued_at, issued_version, finished_at,
    claimed_at, claim, evaluation, gone FROM episode_rows;
DROP TABLE episode_rows;
ALTER TABLE before RENAME TO episode_rows;
CREATE INDEX episodes_live ON episode_rows (status, unit);
CREATE VIEW episodes AS
    SELECT r.*, coalesce(d.data, x'') AS data FROM episode_rows r LEFT JOIN episode_data d ON d.number = r.number;
UPDATE meta SET value = '2' WHERE key = 'schema';
COMMIT;
"""


def with_episodes(path: Path, count: int = 12) -> Bench:
    b = Bench(path, StoreConfig(tasks=100, batch=4, max_lag=9), durable=False)
    for ticket in b.lease(count):
        b.put(ticket, tokens=500)
    return b


def as_version_1(b: Bench) -> None:
    """Close the store, and bring its file into the layout of schema 1."""
    b.ledger.close()
    sql = sqlite3.connect(b.path)
    sql.executescript(VERSION_1)
    sql.close()


def test_a_claim_and_its_commit_write_no_bytes_of_episodes(tmp_path: Path) -> None:
    """Case P2: status and bytes are different rows, so that taking 4 MB writes some pages."""
    b = bench(tmp_path, max_lag=9)
    for ticket in b.lease(4):
        b.put(ticket, tokens=100_000)
    b.ledger.sql.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()
    claim = b.claim("a", 4)
    assert claim is not None
    assert sum(map(len, claim.episodes)) > 3_000_000
    b.commit("a")
    written = b.path.with_name("episodes.sqlite-wal").stat().st_size
    assert written < 300_000


def test_a_file_of_the_layout_before_goes_on_where_it_was(tmp_path: Path) -> None:
    b = with_episodes(tmp_path / "e.sqlite", 16)
    trained = ids(b.claim("a", 4))
    b.commit("a")
    taken = ids(b.claim("b", 4))
    before = b.statuses()
    data = {row.id: EpisodeReader(b.path).get(row.id) for row in EpisodeReader(b.path).list()}
    as_version_1(b)
    with EpisodeReader(b.path) as reader:
        assert {row.id: reader.get(row.id) for row in reader.list()} == data, "displays read it before it is moved"
    b.config = None
    b.open()
    assert b.statuses() == before
    with EpisodeReader(b.path) as reader:
        assert {row.id: reader.get(row.id) for row in reader.list()} == data
        assert {row.id for row in reader.list(EpisodeFilter(claim="a"))} == set(trained)
    assert ids(b.claim("b", 4)) == taken
    b.do(lambda: b.ledger.claims.release("b"))
    assert ids(b.claim("c", 4)) == taken
    [ticket] = b.lease(1)
    assert b.put(ticket).outcome == "accepted"
    numbers = [row["number"] for row in b.ledger.all("SELECT number FROM episode_rows ORDER BY number")]
    assert numbers == list(range(1, 18)), "the order of completion goes on"


def test_a_file_that_knew_no_judges_goes_on_where_it_was(tmp_path: Path) -> None:
    b = with_episodes(tmp_path / "e.sqlite", 8)
    b.claim("a", 4)
    b.commit("a")
    before = b.statuses()
    b.ledger.close()
    sql = sqlite3.connect(b.path)
    sql.executescript(VERSION_2)
    sql.close()
    with EpisodeReader(b.path) as reader:
        assert {row.judge for row in reader.list()} == {None}, "displays read it before it is moved"
    b.open()
    assert b.statuses() == before
    assert len(ids(b.claim("b", 4))) == 4
    assert {row["judge"] for row in b.ledger.all("SELECT judge FROM episodes")} == {""}


def test_a_store_killed_while_it_moves_a_file_goes_on_at_its_next_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some episodes are moved and some are not: no store of either version takes it for empty, and nothing is lost."""
    b = with_episodes(tmp_path / "e.sqlite", 40)
    before = b.statuses()
    as_version_1(b)
    monkeypatch.setattr("agent.store.migration._STEP", 8)
    # A table that is in the way at the third step stands for a kill there: the first two are on the disk.
    sql = sqlite3.connect(b.path)
    sql.executescript(
        "CREATE TRIGGER stop BEFORE DELETE ON episodes WHEN old.number > 20 BEGIN SELECT raise(ABORT, 'killed'); END"
    )
    sql.close()
    with pytest.raises(StoreFault, match="killed"):
        b.open()
    sql = sqlite3.connect(b.path)
    assert sql.execute("SELECT value FROM meta WHERE key = 'schema'").fetchone() == ("3",)
    assert sql.execute("SELECT count(*) FROM episode_rows").fetchone() == (16,)
    sql.execute("DROP TRIGGER stop")
    sql.commit()
    sql.close()
    b.open()
    assert b.statuses() == before
    assert len(ids(b.claim("a", 40))) == 40


def test_a_full_file_of_the_layout_before_is_moved_all_the_same(tmp_path: Path) -> None:
    """It is at `max_bytes`: moving goes row by row, in the room that there is."""
    b = with_episodes(tmp_path / "e.sqlite", 40)
    as_version_1(b)
    size = b.path.stat().st_size
    b.config = StoreConfig(tasks=100, batch=4, max_lag=9, max_bytes=size)
    b.open()
    assert len(b.statuses()) == 40
    b.ledger.close()
    assert b.path.stat().st_size < 2 * size + 500_000


def test_a_file_without_a_table_of_texts_goes_on_where_it_was(tmp_path: Path) -> None:
    """Schema 2: offered episodes lay beside the others. They are read, and forgotten, where they are."""
    b = bench(tmp_path)
    offered = make_episode("offered")
    b.do(lambda: b.ledger.offers.take(offered, encode(offered)))
    b.ledger.close()
    sql = sqlite3.connect(b.path)
    sql.executescript(
        "BEGIN; DROP VIEW episodes; INSERT INTO episode_data SELECT number, data FROM texts; DROP TABLE texts; "
        "UPDATE meta SET value = '2' WHERE key = 'schema'; COMMIT;"
    )
    sql.close()
    b.open()
    assert b.ledger.one("SELECT data FROM episodes WHERE id = 'offered'") == encode(offered)
    assert b.do(lambda: b.ledger.offers.forget("offered"))
    assert b.ledger.one("SELECT data FROM episodes WHERE id = 'offered'") == b""


def test_a_file_of_a_later_schema_is_refused_with_what_to_do(tmp_path: Path) -> None:
    b = bench(tmp_path)
    b.do(lambda: b.ledger.set_meta("schema", "4"))
    b.ledger.close()
    with pytest.raises(StoreFault, match="schema 4, this program reads 3"):
        b.open()


def test_displays_that_read_the_file_find_bytes_beside_figures(tmp_path: Path) -> None:
    """The view `episodes` is what other programs select from, as they did when it was a table."""
    b = with_episodes(tmp_path / "e.sqlite", 2)
    sql = sqlite3.connect(b.path)
    rows = sql.execute("SELECT id, data FROM episodes WHERE status = 'ready'").fetchall()
    assert [decode(data).id for _, data in rows] == [name for name, _ in rows]
    assert len(rows) == 2
