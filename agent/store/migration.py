"""Files that an older version of the store has written, brought into today's layout when they are opened."""

from __future__ import annotations

import logging
import sqlite3
from pathlib import Path

from agent.store.protocol import StoreFault

log = logging.getLogger(__name__)

OLDEST, WITHOUT_TEXTS = 1, 2
_LEFT, _STEP = "episodes_v1", 64
_FIGURES = "episode_rows_v2"


def begin(sql: sqlite3.Connection, written: int) -> None:
    """Put the table of episodes of an older schema aside; `finish` moves its rows.

    Schema 1 held figures and tokens in one row. Schema 2 knew no texts, no judges, and no episodes that are set aside.
    One transaction, in which the file becomes one of today's schema: a crash leaves either layout whole.
    """
    if written == WITHOUT_TEXTS:
        sql.executescript(f"""
            BEGIN IMMEDIATE;
            DROP VIEW IF EXISTS episodes;
            DROP INDEX IF EXISTS episodes_live;
            DROP INDEX IF EXISTS episodes_claim;
            DROP INDEX IF EXISTS episodes_evaluation;
            DROP INDEX IF EXISTS episodes_finished;
            ALTER TABLE episode_rows RENAME TO {_FIGURES};
            UPDATE meta SET value = '3' WHERE key = 'schema';
            COMMIT;
        """)
        return
    if written != OLDEST:
        raise StoreFault(f"schema {written} is not known to this program")
    sql.executescript(f"""
        BEGIN IMMEDIATE;
        DROP INDEX IF EXISTS episodes_live;
        DROP INDEX IF EXISTS episodes_claim;
        DROP INDEX IF EXISTS episodes_evaluation;
        ALTER TABLE episodes RENAME TO {_LEFT};
        UPDATE meta SET value = '3' WHERE key = 'schema';
        COMMIT;
    """)


def finish(sql: sqlite3.Connection, path: Path) -> None:
    """Move what `begin` put aside, some rows at a time: that takes no more room on the disk, and survives a crash."""
    if _there(sql, _FIGURES):
        _move_figures(sql, path)
    if not _there(sql, _LEFT):
        return
    left = sql.execute(f"SELECT count(*) FROM {_LEFT}").fetchone()[0]
    log.info("%s has the layout of an older version: moving %d episodes, once", path, left)
    try:
        while _move_some(sql):
            pass
        sql.execute(f"DROP TABLE {_LEFT}")
    except sqlite3.Error as error:
        raise StoreFault(
            f"{path} could not be brought into the layout of this version: {error}. Nothing is lost: what is moved "
            "stays moved, and the next start goes on with the rest"
        ) from error
    log.info("%s: moved", path)


def _there(sql: sqlite3.Connection, table: str) -> bool:
    return sql.execute("SELECT 1 FROM sqlite_master WHERE name = ?", (table,)).fetchone() is not None


def _move_figures(sql: sqlite3.Connection, path: Path) -> None:
    """Move the figures of schema 2 at once: they are small, and the tokens stay where they are."""
    columns = ", ".join(row[1] for row in sql.execute(f"PRAGMA table_info({_FIGURES})"))
    try:
        sql.execute("BEGIN IMMEDIATE")
        sql.execute(f"INSERT INTO episode_rows ({columns}) SELECT {columns} FROM {_FIGURES} ORDER BY number")
        sql.execute(f"DROP TABLE {_FIGURES}")
        sql.execute("COMMIT")
    except sqlite3.Error as error:
        if sql.in_transaction:
            sql.execute("ROLLBACK")
        raise StoreFault(
            f"{path} could not be brought into the layout of this version: {error}. Nothing is lost: the next start "
            "tries again"
        ) from error


def _move_some(sql: sqlite3.Connection) -> bool:
    found = sql.execute(f"SELECT max(number) FROM (SELECT number FROM {_LEFT} ORDER BY number LIMIT {_STEP})")
    (last,) = found.fetchone()
    if last is None:
        return False
    columns = ", ".join(row[1] for row in sql.execute(f"PRAGMA table_info({_LEFT})") if row[1] != "data")
    some, wiped = f"FROM {_LEFT} WHERE number <= ?", "CASE length(data) WHEN 0 THEN 'wiped' END"
    sql.execute("BEGIN IMMEDIATE")
    sql.execute(f"INSERT INTO episode_rows ({columns}, gone) SELECT {columns}, {wiped} {some}", (last,))
    sql.execute(f"INSERT INTO episode_data SELECT number, data {some} AND length(data) > 0", (last,))
    sql.execute(f"DELETE {some}", (last,))
    sql.execute("COMMIT")
    return True
