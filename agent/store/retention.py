"""Retention: episodes that no claim will take again lose their tokens, oldest first; their figures stay.

Everything here works on a connection to the file, in small steps, so that the store's own thread and a command beside
it do the same, and neither holds the file for long.
"""

from __future__ import annotations

import sqlite3
from dataclasses import dataclass

FINISHED = "status IN ('trained', 'stale', 'dropped', 'set_aside') AND gone IS NULL"
"""Which rows may be pruned: what no claim takes again, and still has its tokens. Evaluations are read on resume."""

_BYTES = "SELECT number, data FROM episode_data UNION ALL SELECT number, data FROM texts"

STEP_EPISODES, STEP_BYTES, STEP_PAGES = 64, 16 * 2**20, 1024
"""What one step does at most (some milliseconds of disk); one episode is pruned in any case."""


@dataclass(frozen=True, slots=True)
class Pruned:
    """How many episodes, and how many bytes of tokens and text they had."""

    episodes: int
    bytes: int

    def __add__(self, other: Pruned) -> Pruned:
        return Pruned(self.episodes + other.episodes, self.bytes + other.bytes)


NOTHING = Pruned(0, 0)


def excess(sql: sqlite3.Connection, keep: int) -> int:
    """How many finished episodes there are beyond the newest `keep`."""
    return max(0, int(sql.execute(f"SELECT count(*) FROM episode_rows WHERE {FINISHED}").fetchone()[0]) - keep)


def prunable(sql: sqlite3.Connection, keep: int) -> Pruned:
    """What pruning to the newest `keep` would take away."""
    count, size = sql.execute(
        f"SELECT count(*), coalesce(sum(length(data)), 0) FROM ({_BYTES}) JOIN (SELECT number FROM episode_rows "
        f"WHERE {FINISHED} ORDER BY number LIMIT ?) USING (number)",
        (excess(sql, keep),),
    ).fetchone()
    return Pruned(count, size)


def prune_step(sql: sqlite3.Connection, keep: int, most: int = STEP_EPISODES) -> Pruned:
    """Take the tokens of at most `most` of the oldest finished episodes, beyond the newest `keep`. To be called in a
    transaction.

    `NOTHING` when there is none left to prune.
    """
    most = min(most, STEP_EPISODES, excess(sql, keep))
    rows = sql.execute(
        f"SELECT number, coalesce(length(d.data), length(t.data), 0) FROM (SELECT number FROM episode_rows "
        f"WHERE {FINISHED} ORDER BY number LIMIT ?) LEFT JOIN episode_data d USING (number) "
        "LEFT JOIN texts t USING (number)",
        (most,),
    ).fetchall()
    taken: list[tuple[int]] = []
    size = 0
    for number, length in rows:
        if taken and size + length > STEP_BYTES:
            break
        taken.append((number,))
        size += length
    sql.executemany("DELETE FROM episode_data WHERE number = ?", taken)
    sql.executemany("DELETE FROM texts WHERE number = ?", taken)
    sql.executemany("UPDATE episode_rows SET gone = 'pruned' WHERE number = ?", taken)
    if taken:
        sql.execute(
            "INSERT INTO counters VALUES ('pruned', ?) ON CONFLICT DO UPDATE SET value = value + excluded.value",
            (len(taken),),
        )
    return Pruned(len(taken), size)


def shrinks_in_steps(sql: sqlite3.Connection) -> bool:
    """Whether the file can give pages back while others use it; one made by an older version must be rewritten."""
    return int(sql.execute("PRAGMA auto_vacuum").fetchone()[0]) == 2


def free_pages(sql: sqlite3.Connection) -> int:
    """How many pages of the file hold nothing."""
    return int(sql.execute("PRAGMA freelist_count").fetchone()[0])


def shrink_step(sql: sqlite3.Connection) -> None:
    """Give `STEP_PAGES` free pages back to the disk. Outside of a transaction."""
    # It works while its rows are read, which have no column: `execute` would stop after the first one.
    sql.executescript(f"PRAGMA incremental_vacuum({STEP_PAGES});")
