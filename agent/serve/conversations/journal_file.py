"""The layout of the server's journal, and files of an older layout.

Ids, times, rewards and states are columns; words, tokens and people's names are in `texts` (`agent.store.texts`), which
leave nothing behind when they are deleted. Users and sessions are found by digests of their names, salted per journal.
"""

from __future__ import annotations

import hashlib
import secrets
import sqlite3
from typing import Any

import msgspec

from agent.episode import Segment, decode_segment
from agent.store import texts

VERSION = 3
SCHEMA = f"""
CREATE TABLE IF NOT EXISTS meta (key TEXT PRIMARY KEY, value TEXT NOT NULL) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS counters (name TEXT PRIMARY KEY, value INTEGER NOT NULL) WITHOUT ROWID;
{texts.SCHEMA}
CREATE TABLE IF NOT EXISTS conversations (
    id TEXT PRIMARY KEY, key TEXT NOT NULL, user TEXT NOT NULL, session TEXT NOT NULL,
    status TEXT NOT NULL CHECK (status IN
        ('open', 'answered', 'delivered', 'unlearned', 'expired', 'wiping', 'wiped')),
    trainable INTEGER NOT NULL, judged INTEGER NOT NULL DEFAULT 0, words INTEGER, sampling BLOB NOT NULL,
    created_at REAL NOT NULL, updated_at REAL NOT NULL) WITHOUT ROWID;
CREATE INDEX IF NOT EXISTS conversations_owner ON conversations (key, user, session, updated_at);
CREATE INDEX IF NOT EXISTS conversations_state ON conversations (status, judged, updated_at);
CREATE TABLE IF NOT EXISTS responses (
    id TEXT PRIMARY KEY, conversation TEXT NOT NULL, turn INTEGER NOT NULL, version INTEGER NOT NULL, words INTEGER,
    created_at REAL NOT NULL, generate_s REAL NOT NULL, reward REAL, explicit INTEGER NOT NULL DEFAULT 1,
    final INTEGER NOT NULL DEFAULT 0, answered_at REAL NOT NULL DEFAULT 0) WITHOUT ROWID;
CREATE UNIQUE INDEX IF NOT EXISTS responses_turn ON responses (conversation, turn);
CREATE INDEX IF NOT EXISTS responses_judged ON responses (version, reward) WHERE reward IS NOT NULL;
CREATE TABLE IF NOT EXISTS verdicts (
    number INTEGER PRIMARY KEY, response TEXT NOT NULL, at REAL NOT NULL, reward REAL, signal TEXT NOT NULL,
    counts INTEGER NOT NULL, final INTEGER NOT NULL, other TEXT NOT NULL, words INTEGER);
CREATE TABLE IF NOT EXISTS judges (response TEXT PRIMARY KEY, judge TEXT NOT NULL) WITHOUT ROWID;
CREATE INDEX IF NOT EXISTS verdicts_response ON verdicts (response);
CREATE TABLE IF NOT EXISTS deletions (key TEXT NOT NULL, user TEXT NOT NULL, session TEXT NOT NULL, at REAL NOT NULL);
CREATE TABLE IF NOT EXISTS versions (
    number INTEGER PRIMARY KEY, path TEXT NOT NULL, source TEXT NOT NULL, origin INTEGER, at REAL NOT NULL,
    status TEXT NOT NULL CHECK (status IN ('publishing', 'served', 'held', 'failed')),
    note TEXT NOT NULL DEFAULT '');
"""
_pack = msgspec.msgpack.encode


class ConversationWords(msgspec.Struct, array_like=True):
    """The words of a conversation. `user` and `session` are names, "" for none."""

    user: str = ""
    session: str = ""
    messages: list[dict[str, Any]] = []
    tools: list[dict[str, Any]] = []
    prompt: bytes = b""


class ResponseWords(msgspec.Struct, array_like=True):
    """The words of a response, and the last ones about it. Segments are encoded; `observation` None: there is none."""

    action: bytes = b""
    observation: bytes | None = None
    metadata: dict[str, Any] = {}
    comment: str = ""
    correction: str = ""


class VerdictWords(msgspec.Struct, array_like=True):
    """The words of one verdict, as it was given."""

    comment: str = ""
    correction: str = ""
    metadata: dict[str, Any] = {}


def segment(data: bytes) -> Segment:
    """A segment that was written alone; an empty one where it is gone."""
    return decode_segment(data) if data else Segment("prompt", ())


def digest(salt: str, key: str, name: str) -> str:
    """Under what a user's or session's `name` is found; "" for none."""
    if not name:
        return ""
    return hashlib.blake2b(f"{salt}\0{key}\0{name}".encode("utf-8", "surrogatepass"), digest_size=16).hexdigest()


def salt_of(sql: sqlite3.Connection) -> str:
    """The journal's salt, made the first time."""
    row = sql.execute("SELECT value FROM meta WHERE key = 'salt'").fetchone()
    if row is None:
        sql.execute("INSERT INTO meta VALUES ('salt', ?)", (secrets.token_hex(16),))
        return salt_of(sql)
    return str(row[0])


def migrate(sql: sqlite3.Connection, written: int) -> None:
    """Bring a journal of version 1 or 2, which had words in columns, into this layout; one transaction.

    (Version 1 had segments with lists of numbers, which are read as they are.)
    """
    sql.executescript(
        "BEGIN IMMEDIATE; DROP INDEX IF EXISTS conversations_session; DROP INDEX IF EXISTS conversations_status; "
        "DROP INDEX IF EXISTS responses_turn; ALTER TABLE conversations RENAME TO conversations_before; "
        "ALTER TABLE responses RENAME TO responses_before;" + SCHEMA
    )
    salt = salt_of(sql)
    for (name,) in sql.execute("SELECT id FROM conversations_before").fetchall():
        row = sql.execute("SELECT * FROM conversations_before WHERE id = ?", (name,)).fetchone()
        kept = ConversationWords(
            row["user"],
            row["session"],
            msgspec.msgpack.decode(row["messages"]),
            msgspec.msgpack.decode(row["tools"]),
            row["prompt"],
        )
        gone = row["status"] in ("wiping", "wiped")
        answered = "SELECT count(*) FROM responses_before WHERE conversation = ? AND reward IS NOT NULL"
        judged = sql.execute(answered, (row["id"],)).fetchone()[0]
        sql.execute(
            "INSERT INTO conversations VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
            (
                *(row["id"], row["key"], digest(salt, row["key"], row["user"])),
                *(digest(salt, row["key"], row["session"]), row["status"], row["trainable"], int(judged > 0)),
                *(None if gone else texts.put(sql, _pack(kept)), row["sampling"], row["created_at"], row["updated_at"]),
            ),
        )
        for turn in sql.execute("SELECT * FROM responses_before WHERE conversation = ?", (row["id"],)).fetchall():
            metadata = msgspec.msgpack.decode(turn["metadata"]) if turn["metadata"] else {}
            said = ResponseWords(turn["action"], turn["observation"], metadata)
            sql.execute(
                "INSERT INTO responses VALUES (?, ?, ?, ?, ?, ?, ?, ?, 1, ?, ?)",
                (
                    *(turn["id"], turn["conversation"], turn["turn"], turn["version"]),
                    *(None if gone else texts.put(sql, _pack(said)), turn["created_at"], turn["generate_s"]),
                    *(turn["reward"], turn["final"], turn["answered_at"]),
                ),
            )
    for statement in (
        "DROP TABLE conversations_before",
        "DROP TABLE responses_before",
        f"UPDATE meta SET value = '{VERSION}' WHERE key = 'schema'",
        "COMMIT",
        "VACUUM",  # what had been deleted before may still be in unused parts of pages
    ):
        sql.execute(statement)
