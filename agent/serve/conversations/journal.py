"""The server's journal: every served response and its feedback in one SQLite file, on the disk before it is answered.

What the episode store has acknowledged is the store's; until then this file is where feedback is safe.
"""

from __future__ import annotations

import sqlite3
import time
import uuid
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec

from agent.episode import SamplingParams, Segment
from agent.serve.conversations import journal_file as layout
from agent.serve.conversations import journal_reading as reading
from agent.serve.conversations.conversation import Conversation, Plan, Turn
from agent.serve.conversations.feedback import Feedback, Verdict, decide
from agent.serve.conversations.journal_file import ConversationWords, ResponseWords, VerdictWords
from agent.serve.conversations.judges import judge_of
from agent.store import texts
from agent.store.database import Database
from agent.wire.errors import ApiError

_CANDIDATES = 16
_AT_ONCE = 256
_GENERATION_S = 24 * 3600.0
"""No response is generated for longer: deletions before that concern none that is under way."""
_ANY = "*"
"""In the table of deletions, for every user, or every session."""
_pack = msgspec.msgpack.encode


def nobody(_: str) -> str:
    """The judge of a verdict whose giver is not known."""
    return ""


class Answered(msgspec.Struct, frozen=True):
    """What became of feedback. `counted`: the response has this reward now. `closed`: no turn comes to it any more."""

    response: str
    conversation: str
    duplicate: bool
    counted: bool
    closed: bool
    trainable: bool
    version: int
    reward: float | None
    user: str
    sampled_by: tuple[int, ...] = ()
    judge: str = ""


class Weighed(msgspec.Struct, frozen=True):
    """Feedback beside what it is about. `where`: how the conversation will be, with the new verdict in it."""

    conversation: Conversation
    where: Conversation
    turn: Turn
    verdict: Verdict


class Journal(Database):
    """Conversations, responses, feedback and versions. Methods run inside `apply` and are durable when it returns.

    Synchronous, for one thread: use it through `agent.store.database_thread.DatabaseThread`.

    A conversation belongs to a key, and to a user of that key. `user` None in a method means whoever holds the key: all
    of it. A name narrows that, and never widens it.
    """

    def __init__(
        self, path: Path | str, *, max_bytes: int | None = None, clock: Callable[[], float] = time.time
    ) -> None:
        super().__init__(
            path,
            max_bytes=max_bytes,
            schema=layout.SCHEMA,
            version=layout.VERSION,
            what="online journal",
            migrate=layout.migrate,
        )
        self.clock = clock
        try:
            self._salt = layout.salt_of(self.sql)
        except BaseException:
            self.close()
            raise

    def _digest(self, key: str, name: str) -> str:
        return layout.digest(self._salt, key, name)

    # -- conversations

    def candidates(self, key: str, user: str, session: str) -> list[Conversation]:
        """The latest conversations of one session of one user that may be gone on with."""
        rows = self.all(
            "SELECT * FROM conversations WHERE key = ? AND user = ? AND session = ? AND session != '' "
            "AND status NOT IN ('wiping', 'wiped') ORDER BY updated_at DESC LIMIT ?",
            *(key, self._digest(key, user), self._digest(key, session), _CANDIDATES),
        )
        return [reading.conversation(self.sql, row) for row in rows]

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

        A new one also where the base has moved on meanwhile (another response, final feedback). Where what it goes on
        with was deleted while it was generated, its words are not kept: they would bring back what was to be gone.
        """
        now = self.clock()
        row = self._row(plan.base) if plan.base else None
        turns = self.one("SELECT count(*) FROM responses WHERE conversation = ?", plan.base) if row else 0
        observation: Segment | None = None
        said = ConversationWords(user, session, messages, tools, b"")
        kept = not self._deleted_since(started_at, plan.after, key, user, session)
        if kept and row is not None and row["status"] == "open" and turns == plan.turn:
            conversation, turn, observation = plan.base, plan.turn, plan.added
            said.prompt = reading.words(self.sql, row["words"], ConversationWords).prompt
            texts.put(self.sql, _pack(said), row["words"])
            self.sql.execute(
                "UPDATE conversations SET updated_at = ?, trainable = min(trainable, ?) WHERE id = ?",
                (now, int(trainable), conversation),
            )
        else:
            conversation, turn = f"served-{uuid.uuid4().hex}", 0
            said.prompt = _pack(plan.as_prompt())
            user, session = self._digest(key, user), self._digest(key, session)
            self.sql.execute(
                "INSERT INTO conversations (id, key, user, session, status, trainable, words, sampling, created_at, "
                "updated_at) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
                (
                    *(conversation, key, *((user, session) if kept else ("", ""))),
                    *("open" if kept else "wiped", int(trainable), texts.put(self.sql, _pack(said)) if kept else None),
                    *(_pack(sampling), started_at, now),
                ),
            )
        said_now = ResponseWords(_pack(action), None if observation is None else _pack(observation))
        self.sql.execute(
            "INSERT INTO responses (id, conversation, turn, version, words, created_at, generate_s) "
            "VALUES (?, ?, ?, ?, ?, ?, ?)",
            (
                *(response_id, conversation, turn, version, texts.put(self.sql, _pack(said_now)) if kept else None),
                *(now, now - started_at),
            ),
        )
        self.count("responses")
        return conversation

    def _deleted_since(self, started_at: float, after: str, key: str, user: str, session: str) -> bool:
        if after and self.status_of(after) in ("wiping", "wiped"):
            return True
        names = (self._digest(key, user), _ANY, self._digest(key, session), _ANY)
        query = "SELECT 1 FROM deletions WHERE key = ? AND user IN (?, ?) AND session IN (?, ?) AND at >= ?"
        return self.one(query, key, *names, started_at) is not None

    # -- feedback

    def owners_of(self, given: Sequence[Feedback], key: str) -> list[str]:
        """The conversations that feedback is about; raises `ApiError` 404 for a response of nobody, or of others."""
        return [self._found(feedback, key).id for feedback in given]

    def weigh(self, feedback: Feedback, key: str, ttl_s: float) -> Weighed:
        """What feedback would do; raises `ApiError` as `feedback.decide` does, and 404 as `owners_of`."""
        now, conversation = self.clock(), self._found(feedback, key)
        turn = next(t for t in conversation.turns if t.response_id == feedback.response_id)
        verdict = decide(feedback, conversation, turn, now=now, ttl_s=ttl_s)
        new = turn
        if verdict.counts:
            new = msgspec.structs.replace(
                turn,
                reward=feedback.reward,
                explicit=not feedback.signal,
                metadata=feedback.metadata or turn.metadata,
                answered_at=now,
            )
        new = msgspec.structs.replace(
            new,
            final=verdict.final,
            comment=feedback.comment or turn.comment,
            correction=feedback.correction or turn.correction,
        )
        turns = [new if t is turn else t for t in conversation.turns]
        return Weighed(conversation, msgspec.structs.replace(conversation, turns=turns), new, verdict)

    def give(
        self,
        feedback: Feedback,
        key: str,
        ttl_s: float,
        weighed: Weighed | None = None,
        judge: Callable[[str], str] = nobody,
    ) -> Answered:
        """Write feedback, of the judge that `judge` names for the conversation's user (see `Judges`).

        Raises as `weigh` does, which need not be done again in the same operation.
        """
        weighed = weighed or self.weigh(feedback, key, ttl_s)
        conversation, turn, verdict = weighed.conversation, weighed.turn, weighed.verdict
        if not verdict.duplicate:
            self._write(feedback, weighed)
            if verdict.counts:
                row = (turn.response_id, judge(conversation.user))
                self.sql.execute("INSERT OR REPLACE INTO judges VALUES (?, ?)", row)
            self.count("feedback")
            if verdict.closes:
                self._close(conversation.id, trainable=conversation.trainable)
        return Answered(
            turn.response_id,
            conversation.id,
            verdict.duplicate,
            verdict.counts,
            verdict.closes or conversation.status != "open",
            conversation.trainable,
            turn.version,
            turn.reward,
            conversation.user,
            tuple(sorted({version for version, _ in turn.action.versions.runs()})),
            judge(conversation.user),
        )

    def judge_of(self, conversation_id: str) -> str:
        """Whose verdict a conversation's episode is, "" if nobody knows."""
        rows = self.all(
            "SELECT answered_at, judge FROM responses JOIN judges ON judges.response = responses.id "
            "WHERE conversation = ?",
            conversation_id,
        )
        return judge_of([(row["answered_at"], row["judge"]) for row in rows])

    def _write(self, feedback: Feedback, weighed: Weighed) -> None:
        turn, now = weighed.turn, self.clock()
        row = self.all("SELECT words FROM responses WHERE id = ?", turn.response_id)[0]
        words = reading.words(self.sql, row["words"], ResponseWords)
        words.metadata, words.comment, words.correction = turn.metadata, turn.comment, turn.correction
        texts.put(self.sql, _pack(words), row["words"])
        self.sql.execute(
            "UPDATE responses SET reward = ?, explicit = ?, final = ?, answered_at = ? WHERE id = ?",
            (turn.reward, int(turn.explicit), int(turn.final), turn.answered_at, turn.response_id),
        )
        said = VerdictWords(feedback.comment, feedback.correction, feedback.metadata)
        self.sql.execute(
            "INSERT INTO verdicts (response, at, reward, signal, counts, final, other, words) "
            "VALUES (?, ?, ?, ?, ?, ?, ?, ?)",
            (
                *(turn.response_id, now, feedback.reward, feedback.signal, int(weighed.verdict.counts)),
                *(int(weighed.verdict.final), feedback.other),
                texts.put(self.sql, _pack(said)) if said != VerdictWords() else None,
            ),
        )
        if weighed.conversation.status == "open":
            judged = int(turn.reward is not None or weighed.conversation.answered > 0)
            self.sql.execute(
                "UPDATE conversations SET judged = ?, updated_at = ? WHERE id = ?",
                (judged, now, weighed.conversation.id),
            )

    def _found(self, feedback: Feedback, key: str) -> Conversation:
        name = self.one("SELECT conversation FROM responses WHERE id = ?", feedback.response_id)
        found = None if name is None else self.owned(name, key, feedback.user)
        if found is None:
            raise ApiError(404, f"no response {feedback.response_id}", code="response_not_found", param="response_id")
        return found

    def _close(self, conversation_id: str, *, trainable: bool) -> None:
        status = "answered" if trainable else "unlearned"
        self.sql.execute("UPDATE conversations SET status = ? WHERE id = ?", (status, conversation_id))
        self.count(status)

    def owned(self, conversation_id: str, key: str, user: str | None) -> Conversation | None:
        """The conversation, if it is that owner's; a deleted one has no user any more, and is its key's."""
        row = self._row(conversation_id)
        if row is None or row["key"] != key:
            return None
        gone = row["status"] in ("wiping", "wiped")
        if user is not None and not gone and row["user"] != self._digest(key, user):
            return None
        return reading.conversation(self.sql, row)

    def conversation(self, conversation_id: str) -> Conversation | None:
        """One conversation with its turns."""
        row = self._row(conversation_id)
        return None if row is None else reading.conversation(self.sql, row)

    def status_of(self, conversation_id: str) -> str:
        """A conversation's state; "" if there is none of that id."""
        return str(self.one("SELECT status FROM conversations WHERE id = ?", conversation_id) or "")

    def _row(self, conversation_id: str) -> sqlite3.Row | None:
        rows = self.all("SELECT * FROM conversations WHERE id = ?", conversation_id)
        return rows[0] if rows else None

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

    def expire(self, ttl_s: float, close_s: float | None = None) -> int:
        """Close judged conversations that were silent for `close_s` (None: `ttl_s`), and end those that nobody has
        judged within `ttl_s`; how many were closed."""
        now, query = self.clock(), "SELECT id, trainable FROM conversations WHERE status = 'open' AND judged = ? "
        query += "AND updated_at < ? ORDER BY updated_at LIMIT ?"
        silent = self.all(query, 1, now - min(ttl_s, close_s or ttl_s), _AT_ONCE)
        for row in silent:
            self._close(row["id"], trainable=bool(row["trainable"]))
        for row in self.all(query, 0, now - ttl_s, _AT_ONCE):
            self.sql.execute("UPDATE conversations SET status = 'expired' WHERE id = ?", (row["id"],))
            self.count("expired")
        return len(silent)

    # -- deletion

    def retire(self, retention_s: float) -> int:
        """Begin to wipe what is past its retention; how many conversations."""
        rows = self.all(
            "SELECT id FROM conversations WHERE status IN ('delivered', 'unlearned', 'expired') AND updated_at < ? "
            "LIMIT ?",
            *(self.clock() - retention_s, _AT_ONCE),
        )
        for row in rows:
            self._wipe(row["id"])
        self.sql.execute("DELETE FROM deletions WHERE at < ?", (self.clock() - _GENERATION_S,))
        return len(rows)

    def delete(self, conversation_id: str, key: str, user: str | None = None) -> list[str]:
        """Begin to wipe a conversation at its owner's wish, and those of its session that repeat messages of it; which
        those are. Raises `ApiError` 404. Twice is harmless."""
        found = self.owned(conversation_id, key, user)
        if found is None:
            raise ApiError(404, f"no conversation {conversation_id}", code="conversation_not_found")
        if found.status in ("wiping", "wiped"):
            return []
        said, ids = _words_of(found), [conversation_id]
        row = self._row(conversation_id)
        if row is not None and row["session"]:
            query = "SELECT * FROM conversations WHERE key = ? AND user = ? AND session = ? AND id != ? "
            query += "AND status NOT IN ('wiping', 'wiped')"
            siblings = self.all(query, key, row["user"], row["session"], conversation_id)
            ids += [sibling["id"] for sibling in siblings if said & _words_of(reading.conversation(self.sql, sibling))]
        return self._delete_all(ids)

    def delete_session(self, session: str, key: str, user: str | None = None) -> list[str]:
        """Begin to wipe all of a session, of one user or of every one of the key; which conversations."""
        wanted = {"key": key, "session": self._digest(key, session)}
        return self._delete_where(wanted if user is None else {**wanted, "user": self._digest(key, user)})

    def delete_user(self, user: str, key: str) -> list[str]:
        """Begin to wipe everything that a user of the key has said; which conversations."""
        return self._delete_where({"key": key, "user": self._digest(key, user)})

    def _delete_where(self, wanted: dict[str, str]) -> list[str]:
        """`wanted`: what columns must hold; users and sessions by digest."""
        said = [wanted.get(column, _ANY) for column in ("key", "user", "session")]
        self.sql.execute("INSERT INTO deletions VALUES (?, ?, ?, ?)", (*said, self.clock()))
        conditions = " AND ".join(f"{column} = ?" for column in wanted)
        query = f"SELECT id FROM conversations WHERE {conditions} AND status NOT IN ('wiping', 'wiped')"
        return self._delete_all([row["id"] for row in self.all(query, *wanted.values())])

    def _delete_all(self, ids: list[str]) -> list[str]:
        for conversation_id in ids:
            self._wipe(conversation_id)
        self.count("deleted", len(ids))
        return ids

    def wiping(self, limit: int = 64) -> list[str]:
        """Conversations that the store has yet to forget."""
        query = "SELECT id FROM conversations WHERE status = 'wiping' ORDER BY updated_at LIMIT ?"
        return [row["id"] for row in self.all(query, limit)]

    def wiped(self, conversation_id: str) -> None:
        """The store has forgotten it too."""
        self.sql.execute("UPDATE conversations SET status = 'wiped' WHERE id = ?", (conversation_id,))

    def _wipe(self, conversation_id: str) -> None:
        """Take its words; figures stay."""
        numbers = self.all(
            "SELECT words FROM conversations WHERE id = ? UNION ALL SELECT words FROM responses WHERE conversation = ? "
            "UNION ALL SELECT v.words FROM verdicts v JOIN responses r ON r.id = v.response WHERE r.conversation = ?",
            *(conversation_id,) * 3,
        )
        for row in numbers:
            texts.drop(self.sql, row["words"])
        self.sql.execute(
            "UPDATE conversations SET status = 'wiping', words = NULL, user = '', session = '' WHERE id = ?",
            (conversation_id,),
        )
        self.sql.execute(
            "UPDATE verdicts SET words = NULL WHERE response IN (SELECT id FROM responses WHERE conversation = ?)",
            (conversation_id,),
        )
        self.sql.execute(
            "DELETE FROM judges WHERE response IN (SELECT id FROM responses WHERE conversation = ?)",
            (conversation_id,),
        )
        self.sql.execute("UPDATE responses SET words = NULL WHERE conversation = ?", (conversation_id,))

    def statuses(self) -> dict[str, int]:
        """How many conversations are in which state."""
        return {r["status"]: r["n"] for r in self.all("SELECT status, count(*) n FROM conversations GROUP BY status")}


def _words_of(conversation: Conversation) -> set[str]:
    texts_of = (message["content"].strip() for message in conversation.messages if message["role"] != "system")
    return {text for text in texts_of if text}
