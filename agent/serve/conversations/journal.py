"""The server's journal: every served response and its feedback in one SQLite file, on the disk before it is answered.

What the episode store has acknowledged is the store's; until then this file is where feedback is safe.
"""

from __future__ import annotations

import sqlite3
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from agent.episode import SamplingParams, Segment, decode_segment
from agent.serve.conversations.conversation import Conversation, Plan, Turn
from agent.serve.conversations.feedback import Feedback, decide
from agent.store.database import Database
from agent.wire.errors import ApiError

VERSION = 2
SCHEMA = """
CREATE TABLE IF NOT EXISTS meta (key TEXT PRIMARY KEY, value TEXT NOT NULL) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS counters (name TEXT PRIMARY KEY, value INTEGER NOT NULL) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS conversations (
    id TEXT PRIMARY KEY, key TEXT NOT NULL, user TEXT NOT NULL, session TEXT NOT NULL,
    status TEXT NOT NULL CHECK (status IN
        ('open', 'answered', 'delivered', 'unlearned', 'expired', 'wiping', 'wiped')),
    trainable INTEGER NOT NULL, messages BLOB NOT NULL, tools BLOB NOT NULL, prompt BLOB NOT NULL,
    sampling BLOB NOT NULL, created_at REAL NOT NULL, updated_at REAL NOT NULL) WITHOUT ROWID;
CREATE INDEX IF NOT EXISTS conversations_session ON conversations (key, user, session, updated_at) WHERE session != '';
CREATE INDEX IF NOT EXISTS conversations_status ON conversations (status, updated_at);
CREATE TABLE IF NOT EXISTS responses (
    id TEXT PRIMARY KEY, conversation TEXT NOT NULL, turn INTEGER NOT NULL, version INTEGER NOT NULL,
    observation BLOB, action BLOB NOT NULL, created_at REAL NOT NULL, generate_s REAL NOT NULL,
    reward REAL, final INTEGER NOT NULL DEFAULT 0, metadata BLOB, answered_at REAL NOT NULL DEFAULT 0) WITHOUT ROWID;
CREATE UNIQUE INDEX IF NOT EXISTS responses_turn ON responses (conversation, turn);
CREATE INDEX IF NOT EXISTS responses_judged ON responses (version, reward) WHERE reward IS NOT NULL;
CREATE TABLE IF NOT EXISTS versions (
    number INTEGER PRIMARY KEY, path TEXT NOT NULL, source TEXT NOT NULL, origin INTEGER, at REAL NOT NULL,
    status TEXT NOT NULL CHECK (status IN ('publishing', 'served', 'held', 'failed')),
    note TEXT NOT NULL DEFAULT '');
"""
_CANDIDATES = 16
_WIPED = msgspec.msgpack.encode(Segment("prompt", ()))
_pack = msgspec.msgpack.encode


def _migrate(sql: sqlite3.Connection, written: int) -> None:
    """Version 1 had segments with lists of numbers: they are read as they are, and only an older program must not."""


class Answered(msgspec.Struct, frozen=True):
    """What became of feedback."""

    conversation: str
    duplicate: bool
    closed: bool
    trainable: bool
    version: int
    reward: float


class Journal(Database):
    """Conversations, responses, feedback and versions. Methods run inside `apply` and are durable when it returns.

    Synchronous, for one thread: use it through `agent.store.database_thread.DatabaseThread`.
    """

    def __init__(
        self, path: Path | str, *, max_bytes: int | None = None, clock: Callable[[], float] = time.time
    ) -> None:
        super().__init__(
            path, max_bytes=max_bytes, schema=SCHEMA, version=VERSION, what="online journal", migrate=_migrate
        )
        self.clock = clock
        self.sql.execute("PRAGMA secure_delete=ON")  # what is wiped must not be readable in a free page

    # -- conversations

    def candidates(self, key: str, user: str, session: str) -> list[Conversation]:
        """The latest conversations of one session of one user that may be gone on with."""
        rows = self.all(
            "SELECT * FROM conversations WHERE key = ? AND user = ? AND session = ? AND session != '' "
            "AND status NOT IN ('wiping', 'wiped') ORDER BY updated_at DESC LIMIT ?",
            *(key, user, session, _CANDIDATES),
        )
        return [self._conversation(row) for row in rows]

    def record(
        self,
        plan: Plan,
        response_id: str,
        action: Segment,
        *,
        key: str,
        user: str,
        session: str,
        messages: list[dict[str, Any]],
        tools: list[dict[str, Any]],
        sampling: SamplingParams,
        trainable: bool,
        version: int,
        started_at: float,
    ) -> str:
        """Add a response to the conversation that `plan` extends, or to a new one; the conversation's id.

        A new one also where the base has moved on meanwhile (another response, final feedback, deletion).
        """
        now = self.clock()
        row = self._row(plan.base) if plan.base else None
        turns = self.one("SELECT count(*) FROM responses WHERE conversation = ?", plan.base) if row else 0
        observation: Segment | None = None
        if row is not None and row["status"] == "open" and turns == plan.turn:
            conversation, turn, observation = plan.base, plan.turn, plan.added
            self.sql.execute(
                "UPDATE conversations SET messages = ?, updated_at = ?, trainable = min(trainable, ?) WHERE id = ?",
                (_pack(messages), now, int(trainable), conversation),
            )
        else:
            conversation, turn = f"served-{uuid.uuid4().hex}", 0
            self.sql.execute(
                "INSERT INTO conversations VALUES (?, ?, ?, ?, 'open', ?, ?, ?, ?, ?, ?, ?)",
                (
                    *(conversation, key, user, session, int(trainable), _pack(messages), _pack(tools)),
                    *(_pack(plan.as_prompt()), _pack(sampling), started_at, now),
                ),
            )
        self.sql.execute(
            "INSERT INTO responses (id, conversation, turn, version, observation, action, created_at, generate_s) "
            "VALUES (?, ?, ?, ?, ?, ?, ?, ?)",
            (
                *(response_id, conversation, turn, version, None if observation is None else _pack(observation)),
                *(_pack(action), now, now - started_at),
            ),
        )
        self.count("responses")
        return conversation

    def give(self, feedback: Feedback, key: str, ttl_s: float) -> Answered:
        """Write feedback; raises `ApiError` as `feedback.decide` does, and 404 for a response of nobody (or others)."""
        now = self.clock()
        name = self.one("SELECT conversation FROM responses WHERE id = ?", feedback.response_id)
        row = None if name is None else self._row(name)
        if row is None or row["key"] != key:
            raise ApiError(404, f"no response {feedback.response_id}", code="response_not_found", param="response_id")
        conversation = self._conversation(row)
        turn = next(t for t in conversation.turns if t.response_id == feedback.response_id)
        verdict = decide(feedback, conversation, turn, now=now, ttl_s=ttl_s)
        if not verdict.duplicate:
            if turn.reward is None:
                self.sql.execute(
                    "UPDATE responses SET reward = ?, metadata = ?, answered_at = ? WHERE id = ?",
                    (feedback.reward, _pack(feedback.metadata), now, turn.response_id),
                )
                self.count("feedback")
            self.sql.execute("UPDATE responses SET final = ? WHERE id = ?", (int(verdict.final), turn.response_id))
            if verdict.closes:
                self._close(conversation)
        return Answered(
            conversation.id,
            verdict.duplicate,
            verdict.closes or conversation.status != "open",
            conversation.trainable,
            turn.version,
            feedback.reward,
        )

    def _close(self, conversation: Conversation) -> None:
        status = "answered" if conversation.trainable else "unlearned"
        self.sql.execute("UPDATE conversations SET status = ? WHERE id = ?", (status, conversation.id))
        self.count(status)

    def conversation(self, conversation_id: str) -> Conversation | None:
        """One conversation with its turns."""
        row = self._row(conversation_id)
        return None if row is None else self._conversation(row)

    def status_of(self, conversation_id: str) -> str:
        """A conversation's state; "" if there is none of that id."""
        return str(self.one("SELECT status FROM conversations WHERE id = ?", conversation_id) or "")

    def _row(self, conversation_id: str) -> sqlite3.Row | None:
        rows = self.all("SELECT * FROM conversations WHERE id = ?", conversation_id)
        return rows[0] if rows else None

    def _conversation(self, row: sqlite3.Row) -> Conversation:
        turns = self.all("SELECT * FROM responses WHERE conversation = ? ORDER BY turn", row["id"])
        unpack = msgspec.msgpack.decode
        return Conversation(
            id=row["id"],
            key=row["key"],
            user=row["user"],
            session=row["session"],
            status=row["status"],
            trainable=bool(row["trainable"]),
            messages=unpack(row["messages"]),
            tools=unpack(row["tools"]),
            prompt=decode_segment(row["prompt"]),
            sampling=unpack(row["sampling"], type=SamplingParams),
            created_at=row["created_at"],
            updated_at=row["updated_at"],
            turns=[
                Turn(
                    response_id=turn["id"],
                    action=decode_segment(turn["action"]),
                    observation=None if turn["observation"] is None else decode_segment(turn["observation"]),
                    version=turn["version"],
                    created_at=turn["created_at"],
                    generate_s=turn["generate_s"],
                    reward=turn["reward"],
                    final=bool(turn["final"]),
                    metadata=unpack(turn["metadata"]) if turn["metadata"] else {},
                    answered_at=turn["answered_at"],
                )
                for turn in turns
            ],
        )

    # -- what is to be done

    def undelivered(self, limit: int = 64) -> list[str]:
        """Conversations that the store has not acknowledged, oldest first."""
        query = "SELECT id FROM conversations WHERE status = 'answered' ORDER BY updated_at LIMIT ?"
        return [row["id"] for row in self.all(query, limit)]

    def delivered(self, conversation_id: str, outcome: str) -> None:
        """The store has the conversation's episode."""
        changed = self.sql.execute(
            "UPDATE conversations SET status = 'delivered' WHERE id = ? AND status = 'answered'", (conversation_id,)
        )
        if changed.rowcount:
            self.count(f"delivered_{outcome}")

    def unlearned(self, conversation_id: str) -> None:
        """The conversation's episode is one that nobody may train on."""
        self.sql.execute("UPDATE conversations SET status = 'unlearned' WHERE id = ?", (conversation_id,))

    def expire(self, ttl_s: float) -> int:
        """End the conversations whose last response has waited too long; how many were closed for their feedback."""
        rows = self.all(
            "SELECT * FROM conversations WHERE status = 'open' AND updated_at < ? ORDER BY updated_at LIMIT 256",
            self.clock() - ttl_s,
        )
        closed = 0
        for row in rows:
            if self.one("SELECT count(*) FROM responses WHERE conversation = ? AND reward IS NOT NULL", row["id"]):
                self._close(self._conversation(row))
                closed += 1
            else:
                self.sql.execute("UPDATE conversations SET status = 'expired' WHERE id = ?", (row["id"],))
                self.count("expired")
        return closed

    def retire(self, retention_s: float) -> int:
        """Begin to wipe what is past its retention; how many conversations."""
        changed = self.sql.execute(
            "UPDATE conversations SET status = 'wiping' WHERE status IN ('delivered', 'unlearned', 'expired') "
            "AND updated_at < ?",
            (self.clock() - retention_s,),
        )
        return changed.rowcount

    def delete(self, conversation_id: str, key: str) -> None:
        """Begin to wipe a conversation at its owner's wish; raises `ApiError` 404. Twice is harmless."""
        row = self._row(conversation_id)
        if row is None or row["key"] != key:
            raise ApiError(404, f"no conversation {conversation_id}", code="conversation_not_found")
        if row["status"] not in ("wiping", "wiped"):
            self._wipe(conversation_id, "wiping")
            self.count("deleted")

    def wiping(self, limit: int = 64) -> list[str]:
        """Conversations that the store has yet to forget."""
        query = "SELECT id FROM conversations WHERE status = 'wiping' ORDER BY updated_at LIMIT ?"
        return [row["id"] for row in self.all(query, limit)]

    def wiped(self, conversation_id: str) -> None:
        """The store has forgotten it: wipe what is here."""
        self._wipe(conversation_id, "wiped")

    def _wipe(self, conversation_id: str, status: str) -> None:
        self.sql.execute(
            "UPDATE conversations SET status = ?, messages = ?, tools = ?, prompt = ?, user = '', session = '' "
            "WHERE id = ?",
            (status, _pack([]), _pack([]), _WIPED, conversation_id),
        )
        self.sql.execute(
            "UPDATE responses SET observation = NULL, action = ?, metadata = NULL WHERE conversation = ?",
            (_WIPED, conversation_id),
        )

    def statuses(self) -> dict[str, int]:
        """How many conversations are in which state."""
        return {r["status"]: r["n"] for r in self.all("SELECT status, count(*) n FROM conversations GROUP BY status")}
