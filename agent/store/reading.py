"""Reading episodes back: for displays, from a running store or straight from the file of a finished run."""

from __future__ import annotations

import sqlite3
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from agent.store.protocol import EpisodeRow, StoreFault


class EpisodeFilter(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What to list. None means any; `limit` and `offset` page through, `newest_first` turns the order of completion."""

    kind: str | None = None
    status: str | None = None
    stop_reason: str | None = None
    env_id: str | None = None
    task_index: int | None = None
    task_id: str | None = None
    group_id: str | None = None
    claim: str | None = None
    evaluation: str | None = None
    worker: str | None = None
    judge: str | None = None
    epoch: int | None = None
    min_reward: float | None = None
    max_reward: float | None = None
    limit: int = 100
    offset: int = 0
    newest_first: bool = False


def list_episodes(sql: sqlite3.Connection, wanted: EpisodeFilter) -> list[EpisodeRow]:
    """The rows that match `wanted`, in order of completion, at most 10,000 at a time."""
    clauses, values = [], []
    bounds = {"min_reward": "reward >= ?", "max_reward": "reward <= ?"}
    for name in EpisodeFilter.__struct_fields__:
        value = getattr(wanted, name)
        if value is not None and name not in ("limit", "offset", "newest_first"):
            clauses.append(bounds.get(name, f"{name} = ?"))
            values.append(value)
    condition = f"WHERE {' AND '.join(clauses)}" if clauses else ""
    direction = "DESC" if wanted.newest_first else "ASC"
    columns = _columns(sql, EpisodeRow.__struct_fields__)
    query = f"SELECT {columns} FROM episodes {condition} ORDER BY number {direction} LIMIT ? OFFSET ?"
    rows = sql.execute(query, [*values, max(0, min(wanted.limit, 10_000)), max(0, wanted.offset)])
    return [EpisodeRow(*row) for row in rows]


GONE = {
    "pruned": "pruned: it is finished, and the run keeps no more of those (`keep_trained`, or `agent.store prune`)",
    "wiped": "wiped at its user's wish",
}
"""What became of an episode's tokens, by `EpisodeRow.gone`."""


def read_episode(sql: sqlite3.Connection, episode_id: str) -> bytes | str:
    """One encoded episode, or why there is nothing to read: no such episode, or its tokens are gone."""
    found = sql.execute(f"SELECT data, {_columns(sql, ('gone',))} FROM episodes WHERE id = ?", (episode_id,)).fetchone()
    if found is None:
        return f"no episode {episode_id}: list the episodes for their ids"
    data, gone = found
    return data or f"no episode {episode_id} to read: its tokens were {GONE[gone or 'wiped']}"


def _columns(sql: sqlite3.Connection, names: Sequence[str]) -> str:
    """`names` as columns of a query; one that a file of an older version does not have is NULL."""
    known = {row[1] for row in sql.execute("PRAGMA table_info(episodes)")}
    return ", ".join(name if name in known else f"NULL AS {name}" for name in names)


class EpisodeReader:
    """Read-only access to a store's file, whether or not a store is running on it.

    with EpisodeReader("runs/x/episodes.sqlite") as reader:
        for row in reader.list(EpisodeFilter(status="trained")):
            episode = agent.episode.decode(reader.get(row.id))
    """

    def __init__(self, path: Path | str) -> None:
        self.path = Path(path)
        if not self.path.is_file():
            raise StoreFault(f"no episode store at {self.path}: check the name of the run")
        try:
            self._sql = sqlite3.connect(f"{self.path.resolve().as_uri()}?mode=ro", uri=True)
            self._sql.execute("SELECT 1 FROM episodes LIMIT 1")
        except sqlite3.DatabaseError as error:
            raise StoreFault(f"{self.path} is no readable episode store: {error}") from error

    def list(self, wanted: EpisodeFilter | None = None) -> list[EpisodeRow]:
        """The rows that match `wanted`."""
        return list_episodes(self._sql, wanted or EpisodeFilter())

    def get(self, episode_id: str) -> bytes:
        """One encoded episode; `StoreFault` if there is none of that id, or its tokens are gone: it says how."""
        data = read_episode(self._sql, episode_id)
        if isinstance(data, str):
            raise StoreFault(f"{self.path}: {data}")
        return data

    def events(self, limit: int = 100) -> Sequence[dict[str, Any]]:
        """The latest rejections, failures and drops, newest first: at, ticket, what, reason."""
        query = "SELECT at, ticket, what, reason FROM events ORDER BY number DESC LIMIT ?"
        return [
            dict(zip(("at", "ticket", "what", "reason"), row, strict=True))
            for row in self._sql.execute(query, (limit,))
        ]

    def close(self) -> None:
        """Close the file."""
        self._sql.close()

    def __enter__(self) -> EpisodeReader:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
