"""The journal on a clock that the test turns."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from agent.episode import SamplingParams, Segment
from agent.serve.conversations.conversation import Plan
from agent.serve.conversations.feedback import Feedback
from agent.serve.conversations.journal import Journal
from agent.store.protocol import StoreFault
from agent.wire.errors import ApiError


class Bench:
    def __init__(self, path: Path) -> None:
        self.now = 1000.0
        self.journal = Journal(path / "journal.sqlite", clock=lambda: self.now)
        self.count = 0

    def do(self, operation: Callable[[], Any]) -> Any:
        [answer] = self.journal.apply([operation])
        if isinstance(answer, Exception):
            raise answer
        return answer

    def reply(
        self,
        base: str = "",
        turn: int = 0,
        session: str = "",
        *,
        user: str = "u",
        asked: str = "secret",
        after: str = "",
        began: float | None = None,
    ) -> tuple[str, str]:
        self.count += 1
        name = f"r{self.count}"
        added = Segment("observation" if base else "prompt", (1, 2))
        conversation = self.do(
            lambda: self.journal.record(
                Plan(base, turn, (9, 9, 1, 2), "text", added, after or base),
                name,
                Segment("action", (5,), logprobs=(-0.1,), versions=(0,)),
                key="k",
                user=user,
                session=session,
                messages=[{"role": "user", "content": asked}, {"role": "assistant", "content": f"reply to {asked}"}],
                tools=[],
                sampling=SamplingParams(),
                trainable=True,
                version=0,
                started_at=self.now if began is None else began,
            )
        )
        return name, conversation

    def give(self, name: str, reward: float | None = 1.0, final: bool | None = None, **more: Any) -> Any:
        return self.do(lambda: self.journal.give(Feedback(name, reward, final, {}, **more), "k", 60.0))

    def states(self, *conversations: str) -> list[str]:
        return [self.journal.status_of(name) for name in conversations]


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return Bench(tmp_path)


def test_a_reply_that_comes_after_the_final_feedback_begins_a_new_episode(bench: Bench) -> None:
    """Case B1: while a reply was generated its conversation was closed; its whole prefix becomes a prompt."""
    name, conversation = bench.reply(session="s")
    bench.give(name, final=True)
    _, other = bench.reply(conversation, 1, session="s")
    assert other != conversation
    kept = bench.journal.conversation(other)
    assert kept is not None
    assert kept.prompt.token_ids == (9, 9, 1, 2)


def test_two_replies_to_one_turn_fork(bench: Bench) -> None:
    _, conversation = bench.reply(session="s")
    assert bench.reply(conversation, 1, session="s")[1] == conversation
    assert bench.reply(conversation, 1, session="s")[1] != conversation


def test_what_is_open_too_long_is_closed_if_it_was_judged_and_expires_if_not(bench: Bench) -> None:
    judged, a = bench.reply(session="s")
    bench.give(judged, 0.5)
    silent, b = bench.reply()
    bench.now += 61
    assert bench.do(lambda: bench.journal.expire(60.0)) == 1
    assert (bench.journal.status_of(a), bench.journal.status_of(b)) == ("answered", "expired")
    with pytest.raises(ApiError) as late:
        bench.give(silent)
    assert late.value.status == 410
    assert bench.give(judged, 0.5).duplicate


def test_undelivered_feedback_is_never_retired(bench: Bench) -> None:
    """No accepted feedback is lost: retention waits for the delivery."""
    name, conversation = bench.reply()
    bench.give(name)
    bench.now += 10_000
    assert bench.do(lambda: bench.journal.retire(100.0)) == 0
    assert bench.journal.undelivered() == [conversation]
    bench.do(lambda: bench.journal.delivered(conversation, "accepted"))
    assert bench.do(lambda: bench.journal.retire(100.0)) == 1
    assert bench.journal.wiping() == [conversation]
    bench.do(lambda: bench.journal.wiped(conversation))
    kept = bench.journal.conversation(conversation)
    assert kept is not None
    assert (kept.status, kept.messages, kept.turns[0].action.token_ids) == ("wiped", [], ())


def test_a_second_server_on_one_journal_is_refused(bench: Bench) -> None:
    with pytest.raises(StoreFault, match="another online journal"):
        Journal(bench.journal.path)


def test_late_verdicts_are_taken_without_a_session_that_stays_open(bench: Bench) -> None:
    """The conversation is closed and learned from after a while; a verdict on a later turn still counts."""
    first, conversation = bench.reply(session="s")
    later, _ = bench.reply(conversation, 1, session="s")
    bench.give(first, 0.5)
    bench.now += 11
    assert bench.do(lambda: bench.journal.expire(60.0, 10.0)) == 1
    assert bench.states(conversation) == ["answered"]
    answered = bench.give(later, 1.0)
    assert (answered.counted, answered.closed) == (True, True)
    kept = bench.journal.conversation(conversation)
    assert kept is not None
    assert [turn.reward for turn in kept.turns] == [0.5, 1.0]
    bench.now += 60
    with pytest.raises(ApiError) as late:
        bench.give(later, 0.0)
    assert late.value.status == 410


def test_a_silent_conversation_waits_for_its_verdict_as_long_as_one_is_taken(bench: Bench) -> None:
    name, conversation = bench.reply()
    bench.now += 50
    bench.do(lambda: bench.journal.expire(60.0, 10.0))
    assert bench.states(conversation) == ["open"]
    assert bench.give(name).counted
    assert bench.states(conversation) == ["answered"]


def test_what_was_said_before_is_kept_when_a_verdict_is_changed(bench: Bench) -> None:
    name, conversation = bench.reply()
    bench.give(name, 0.0, comment="dull", correction="better")
    bench.give(name, 1.0)
    kept = bench.journal.conversation(conversation)
    assert kept is not None
    assert (kept.turns[0].reward, kept.turns[0].comment, kept.turns[0].correction) == (1.0, "dull", "better")
    assert [row["reward"] for row in bench.journal.all("SELECT reward FROM verdicts ORDER BY number")] == [0.0, 1.0]


def test_a_user_reaches_what_is_its_own_and_the_keys_holder_all_of_it(bench: Bench) -> None:
    name, conversation = bench.reply(user="ann")
    for user, found in (("ann", True), ("bob", False), ("", False), (None, True)):
        assert (bench.journal.owned(conversation, "k", user) is not None) is found
        assert bench.journal.owned(conversation, "another", user) is None
        if not found:
            for refused in (
                lambda user=user: bench.give(name, user=user),
                lambda user=user: bench.do(lambda: bench.journal.delete(conversation, "k", user)),
            ):
                with pytest.raises(ApiError) as error:
                    refused()
                assert error.value.status == 404
    assert bench.give(name, user="ann").user == "ann"


def test_a_user_and_a_session_are_deleted_whole_and_nothing_else(bench: Bench) -> None:
    mine = [bench.reply(user="ann", session=session)[1] for session in ("", "s", "t")]
    other = [bench.reply(user=user, session="s")[1] for user in ("bob", "")]
    assert bench.do(lambda: bench.journal.delete_session("s", "k", "ann")) == [mine[1]]
    nameless = bench.reply(user="", session="n")[1]
    assert bench.do(lambda: bench.journal.delete_session("n", "k", "bob")) == []
    assert bench.do(lambda: bench.journal.delete_session("t", "k", "")) == [], "of those without a name, not of all"
    assert bench.do(lambda: bench.journal.delete_session("n", "k", "")) == [nameless]
    assert bench.do(lambda: bench.journal.delete_user("ann", "another")) == []
    assert set(bench.do(lambda: bench.journal.delete_user("ann", "k"))) == {mine[0], mine[2]}
    assert bench.do(lambda: bench.journal.delete_user("ann", "k")) == []
    assert bench.states(*mine, *other) == ["wiping"] * 3 + ["open"] * 2
    assert set(bench.do(lambda: bench.journal.delete_session("s", "k"))) == set(other), "of every user of the key"


def test_what_repeats_a_deleted_conversation_goes_with_it(bench: Bench) -> None:
    """After final feedback a session goes on in a new episode, whose prompt holds all the words of the one before."""
    _, first = bench.reply(session="s", asked="zebra")
    _, repeats = bench.reply(session="s", asked="zebra")
    _, apart = bench.reply(session="s", asked="something else")
    _, elsewhere = bench.reply(session="t", asked="zebra")
    assert set(bench.do(lambda: bench.journal.delete(first, "k"))) == {first, repeats}
    assert bench.states(first, repeats, apart, elsewhere) == ["wiping", "wiping", "open", "open"]


def test_a_reply_under_way_does_not_bring_deleted_words_back(bench: Bench) -> None:
    _, conversation = bench.reply(session="s")
    bench.do(lambda: bench.journal.delete(conversation, "k"))
    extends = bench.reply(conversation, 1, session="s")
    repeats = bench.reply(session="s", after=conversation)
    began = bench.now
    bench.now += 1
    bench.do(lambda: bench.journal.delete_user("u", "k"))
    bench.now += 1
    fresh = bench.reply(session="t", began=began)
    for name, made in (extends, repeats, fresh):
        kept = bench.journal.conversation(made)
        assert kept is not None
        assert (kept.status, kept.messages, kept.turns[0].action.token_ids) == ("wiped", [], ())
        with pytest.raises(ApiError) as gone:
            bench.give(name)
        assert gone.value.status == 410
    assert bench.states(bench.reply(session="t")[1]) == ["open"], "what is said after that is kept"


def test_names_and_words_of_a_deleted_user_are_in_no_file(bench: Bench) -> None:
    """Also not in the parts of pages that SQLite leaves when rows move."""
    words = {f"user-{i:04d}-name": f"word-{i:04d}-" for i in range(150)}
    for number, (user, word) in enumerate(words.items()):
        name, _ = bench.reply(user=user, session=f"of {user}", asked=word * (1 + number % 7 * 40))
        bench.give(name, comment=f"comment {word}", correction=f"correction {word}")
    gone = list(words)[::2]
    for user in gone:
        bench.do(lambda user=user: bench.journal.delete_user(user, "k"))
    assert bench.journal.settle()
    files = b"".join(path.read_bytes() for path in bench.journal.path.parent.iterdir())
    assert not [user for user in gone if user.encode() in files or words[user].encode() in files]
    assert all(words[user].encode() in files for user in list(words)[1::2])


VERSION_2 = """
CREATE TABLE meta (key TEXT PRIMARY KEY, value TEXT NOT NULL) WITHOUT ROWID;
INSERT INTO meta VALUES ('schema', '2');
CREATE TABLE conversations (
    id TEXT PRIMARY KEY, key TEXT NOT NULL, user TEXT NOT NULL, session TEXT NOT NULL, status TEXT NOT NULL,
    trainable INTEGER NOT NULL, messages BLOB NOT NULL, tools BLOB NOT NULL, prompt BLOB NOT NULL,
    sampling BLOB NOT NULL, created_at REAL NOT NULL, updated_at REAL NOT NULL) WITHOUT ROWID;
CREATE INDEX conversations_session ON conversations (key, user, session, updated_at) WHERE session != '';
CREATE INDEX conversations_status ON conversations (status, updated_at);
CREATE TABLE responses (
    id TEXT PRIMARY KEY, conversation TEXT NOT NULL, turn INTEGER NOT NULL, version INTEGER NOT NULL,
    observation BLOB, action BLOB NOT NULL, created_at REAL NOT NULL, generate_s REAL NOT NULL,
    reward REAL, final INTEGER NOT NULL DEFAULT 0, metadata BLOB, answered_at REAL NOT NULL DEFAULT 0) WITHOUT ROWID;
CREATE UNIQUE INDEX responses_turn ON responses (conversation, turn);
"""


def test_a_journal_of_the_layout_before_is_read_on(tmp_path: Path) -> None:
    """Feedback that waits for the store in an older file is not lost, and its users are found by their names."""
    pack = msgspec.msgpack.encode
    action = Segment("action", (5,), logprobs=(-0.1,), versions=(0,))
    sql = sqlite3.connect(tmp_path / "journal.sqlite")
    sql.executescript(VERSION_2)
    said = [{"role": "user", "content": "secret"}, {"role": "assistant", "content": "x"}]
    row = (pack(said), pack([]), pack(Segment("prompt", (1, 2))), pack(SamplingParams()), 1.0, 2.0)
    sql.execute("INSERT INTO conversations VALUES ('c', 'k', 'ann', 's', 'answered', 1, ?, ?, ?, ?, ?, ?)", row)
    turn = (pack(action), pack({"style": "cute"}))
    sql.execute("INSERT INTO responses VALUES ('r', 'c', 0, 3, NULL, ?, 1.0, 0.5, 0.25, 1, ?, 2.0)", turn)
    sql.commit()
    sql.close()
    bench = Bench(tmp_path)
    assert bench.journal.undelivered() == ["c"]
    [kept] = bench.journal.candidates("k", "ann", "s")
    assert (kept.messages, kept.prompt.token_ids, kept.turns[0].action) == (said, (1, 2), action)
    assert (kept.turns[0].reward, kept.turns[0].metadata, kept.user) == (0.25, {"style": "cute"}, "ann")
    assert bench.do(lambda: bench.journal.delete_user("ann", "k")) == ["c"]
