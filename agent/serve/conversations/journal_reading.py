"""Conversations out of a journal's rows; also beside a server that is using the file."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from agent.episode import SamplingParams
from agent.serve.conversations import journal_file as layout
from agent.serve.conversations.conversation import Conversation, Turn
from agent.serve.conversations.journal_file import ConversationWords, ResponseWords, VerdictWords
from agent.store import texts
from agent.store.protocol import StoreFault

W = TypeVar("W")


def words(sql: sqlite3.Connection, number: int | None, kind: type[W]) -> W:
    """A row of words; empty ones where they are gone."""
    data = texts.read(sql, number)
    return msgspec.msgpack.decode(data, type=kind) if data else kind()


def conversation(sql: sqlite3.Connection, row: sqlite3.Row) -> Conversation:
    """A row of `conversations` with its words and turns."""
    said = words(sql, row["words"], ConversationWords)
    turns = sql.execute("SELECT * FROM responses WHERE conversation = ? ORDER BY turn", (row["id"],)).fetchall()
    return Conversation(
        id=row["id"],
        key=row["key"],
        user=said.user,
        session=said.session,
        status=row["status"],
        trainable=bool(row["trainable"]),
        messages=said.messages,
        tools=said.tools,
        prompt=layout.segment(said.prompt),
        sampling=msgspec.msgpack.decode(row["sampling"], type=SamplingParams),
        created_at=row["created_at"],
        updated_at=row["updated_at"],
        turns=[_turn(sql, turn) for turn in turns],
    )


def _turn(sql: sqlite3.Connection, row: sqlite3.Row) -> Turn:
    said = words(sql, row["words"], ResponseWords)
    return Turn(
        response_id=row["id"],
        action=layout.segment(said.action),
        observation=None if said.observation is None else layout.segment(said.observation),
        version=row["version"],
        created_at=row["created_at"],
        generate_s=row["generate_s"],
        reward=row["reward"],
        final=bool(row["final"]),
        metadata=said.metadata,
        answered_at=row["answered_at"],
        explicit=bool(row["explicit"]),
        comment=said.comment,
        correction=said.correction,
    )


def history(sql: sqlite3.Connection, response_id: str) -> list[dict[str, Any]]:
    """Everything that was ever said about a response, in its order."""
    rows = sql.execute("SELECT * FROM verdicts WHERE response = ? ORDER BY number", (response_id,)).fetchall()
    told = []
    for row in rows:
        said = words(sql, row["words"], VerdictWords)
        told.append(
            {
                "at": row["at"],
                "reward": row["reward"],
                "signal": row["signal"] or None,
                "counted": bool(row["counts"]),
                "final": bool(row["final"]),
                "compared_with": row["other"] or None,
                "comment": said.comment or None,
                "correction": said.correction or None,
                "metadata": said.metadata,
            }
        )
    return told


class JournalReader:
    """Read-only access to a journal, whether or not a server is running on it. Raises `StoreFault`."""

    def __init__(self, path: Path) -> None:
        if not path.is_file():
            raise StoreFault(f"no journal at {path}: check the name of the run")
        try:
            self.sql = sqlite3.connect(f"{path.resolve().as_uri()}?mode=ro", uri=True)
            self.sql.row_factory = sqlite3.Row
            written = self.sql.execute("SELECT value FROM meta WHERE key = 'schema'").fetchone()
        except sqlite3.DatabaseError as error:
            raise StoreFault(f"{path} is no readable journal: {error}") from error
        if written is None or int(written[0]) != layout.VERSION:
            self.sql.close()
            raise StoreFault(
                f"{path} has schema {written and written[0]}, this program reads {layout.VERSION}: "
                "start the server of this version on it once"
            )

    def conversations(self, *, key: str | None = None, user: str | None = None) -> Iterator[Conversation]:
        """All that are not deleted, oldest first; of one key, of one user (of every key, if none is given)."""
        condition = "status NOT IN ('wiping', 'wiped')" + (" AND key = ?" if key is not None else "")
        query = f"SELECT id FROM conversations WHERE {condition} ORDER BY created_at, id"
        ids = [row[0] for row in self.sql.execute(query, () if key is None else (key,))]
        salt = self.sql.execute("SELECT value FROM meta WHERE key = 'salt'").fetchone()
        for name in ids:
            row = self.sql.execute("SELECT * FROM conversations WHERE id = ?", (name,)).fetchone()
            if row["status"] in ("wiping", "wiped"):  # meanwhile
                continue
            if user is not None and row["user"] != layout.digest(salt[0] if salt else "", row["key"], user):
                continue
            yield conversation(self.sql, row)

    def close(self) -> None:
        """Close the file."""
        self.sql.close()
