"""The journal on a clock that the test turns."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

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

    def reply(self, base: str = "", turn: int = 0, session: str = "") -> tuple[str, str]:
        self.count += 1
        name = f"r{self.count}"
        added = Segment("observation" if base else "prompt", (1, 2))
        conversation = self.do(
            lambda: self.journal.record(
                Plan(base, turn, (9, 9, 1, 2), "text", added),
                name,
                Segment("action", (5,), logprobs=(-0.1,), versions=(0,)),
                key="k",
                user="u",
                session=session,
                messages=[{"role": "user", "content": "secret"}, {"role": "assistant", "content": "x"}],
                tools=[],
                sampling=SamplingParams(),
                trainable=True,
                version=0,
                started_at=self.now,
            )
        )
        return name, conversation

    def give(self, name: str, reward: float = 1.0, final: bool | None = None) -> Any:
        return self.do(lambda: self.journal.give(Feedback(name, reward, final, {}), "k", 60.0))


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
