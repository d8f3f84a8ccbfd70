"""What feedback does, as decided: idempotent, conflicting, late; and the episode that comes of it."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent.episode import SamplingParams, Segment
from agent.serve.api.limits import RateLimit
from agent.serve.conversations.conversation import (
    Aggregate,
    Conversation,
    Turn,
    before_turn,
    credited,
    episode_of,
    plan_turn,
)
from agent.serve.conversations.feedback import Feedback, decide, read_feedback, read_preference
from agent.wire.errors import ApiError
from agent.wire.request import ChatRequest, read_chat_request

TTL = 60.0


def turn(number: int, reward: float | None = None, **fields: Any) -> Turn:
    action = Segment("action", (10 + number, 2), text="hi", logprobs=(-0.5, -0.1), versions=(3, 3))
    observation = Segment("observation", (7, number), text="?") if number else None
    return Turn(f"r{number}", action, observation, 3, created_at=100.0, reward=reward, **fields)


def conversation(*turns: Turn, status: str = "open", session: str = "s", **fields: Any) -> Conversation:
    values = {
        "id": "served-1",
        "key": "k",
        "user": "",
        "trainable": True,
        "messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "hi"}],
        "tools": [],
        "prompt": Segment("prompt", (1, 5), "a"),
        "sampling": SamplingParams(),
        "created_at": 99.0,
        "updated_at": 100.0,
    }
    return Conversation(status=status, session=session, turns=list(turns), **{**values, **fields})


def give(reward: float | None = 1.0, final: bool | None = None, **fields: Any) -> Feedback:
    return Feedback("r0", reward, final, {}, **fields)


def refused(feedback: Feedback, where: Conversation, *, now: float = 101.0) -> int:
    with pytest.raises(ApiError) as error:
        decide(feedback, where, where.turns[0], now=now, ttl_s=TTL)
    return error.value.status


def test_the_default_of_final_is_true_outside_of_sessions_only() -> None:
    alone, inside = conversation(turn(0), session=""), conversation(turn(0))
    assert decide(give(), alone, alone.turns[0], now=101, ttl_s=TTL).closes
    assert not decide(give(), inside, inside.turns[0], now=101, ttl_s=TTL).closes
    assert decide(give(final=True), inside, inside.turns[0], now=101, ttl_s=TTL).closes


def test_the_same_again_is_a_duplicate_and_another_verdict_replaces_it() -> None:
    """Case G5, and who has misclicked may say so. Whether the learner has it by then is the store's to say."""
    open_ = conversation(turn(0, 1.0))
    closed = conversation(turn(0, 1.0, final=True), status="answered")
    delivered = conversation(turn(0, 1.0, final=True), status="delivered")
    for where in (open_, closed, delivered):
        assert decide(give(), where, where.turns[0], now=9999, ttl_s=TTL).duplicate
        other = decide(give(0.5), where, where.turns[0], now=101, ttl_s=TTL)
        assert (other.duplicate, other.counts, other.closes) == (False, True, False)
    assert refused(give(final=False), closed) == 409
    upgrade = decide(give(final=True), open_, open_.turns[0], now=101, ttl_s=TTL)
    assert (upgrade.duplicate, upgrade.closes, upgrade.final) == (False, True, True)


def test_late_closed_and_deleted_are_told_apart() -> None:
    """Case G5: 410 for what is too late or deleted; a turn of a closed conversation may still be judged."""
    assert refused(give(), conversation(turn(0)), now=100 + TTL + 1) == 410
    assert refused(give(), conversation(turn(0), status="expired")) == 410
    assert refused(give(), conversation(turn(0), status="wiped")) == 410
    assert refused(give(0.5), conversation(turn(0, 1.0), status="delivered"), now=100 + TTL + 1) == 410
    closed = conversation(turn(0), turn(1, 1.0), status="delivered")
    assert decide(give(), closed, closed.turns[0], now=101, ttl_s=TTL).counts


def test_a_signal_counts_until_there_is_a_verdict_and_closes_nothing() -> None:
    """A client that says `copy` must not outvote the person who then says Bad."""
    alone = conversation(turn(0), session="")
    first = decide(give(0.8, signal="copy"), alone, alone.turns[0], now=101, ttl_s=TTL)
    assert (first.counts, first.closes) == (True, False)
    signalled = conversation(turn(0, 0.8, explicit=False), session="")
    second = decide(give(0.0), signalled, signalled.turns[0], now=101, ttl_s=TTL)
    assert (second.counts, second.closes) == (True, True)
    same = decide(give(0.8), signalled, signalled.turns[0], now=101, ttl_s=TTL)
    assert same.counts, "said by a person, and of the same worth"
    judged = conversation(turn(0, 0.0), session="")
    late = decide(give(0.8, signal="copy"), judged, judged.turns[0], now=101, ttl_s=TTL)
    assert (late.duplicate, late.counts, late.closes) == (False, False, False)


def test_words_alone_are_no_verdict() -> None:
    silent = conversation(turn(0))
    said = decide(give(None, comment="why so long?"), silent, silent.turns[0], now=101, ttl_s=TTL)
    assert (said.duplicate, said.counts, said.closes) == (False, False, False)
    trained = conversation(turn(0, 1.0, final=True), status="delivered")
    assert not decide(give(None, correction="Yes."), trained, trained.turns[0], now=101, ttl_s=TTL).duplicate
    assert decide(give(None), silent, silent.turns[0], now=101, ttl_s=TTL).duplicate


def test_a_body_of_feedback_in_every_form() -> None:
    def read(**body: Any) -> Feedback:
        return read_feedback(msgspec.json.encode({"response_id": "r", **body}), {"copy": 1.0, "edit": 0.3})

    assert read(reward=0.25).reward == read(score=0.25).reward == 0.25
    assert (read(thumbs="up").reward, read(signal="edit").reward, read(comment="hm").reward) == (1.0, 0.3, None)
    edited = read(signal="edit", correction="Meow.", user="ann")
    assert (edited.signal, edited.correction, edited.user) == ("edit", "Meow.", "ann")
    with pytest.raises(ApiError, match="copy, edit"):
        read(signal="like")


@pytest.mark.parametrize(
    ("body", "status"),
    [
        (b"{}", 400),
        (b'{"chosen": "a", "rejected": "a"}', 422),
        (b'{"chosen": "a", "rejected": "b", "margin": 0}', 422),
        (b'{"chosen": "a", "rejected": "b", "margin": 1.5}', 422),
        (b'{"chosen": "a", "rejected": "b", "score": 1}', 400),
    ],
)
def test_a_preference_that_prefers_nothing_is_refused(body: bytes, status: int) -> None:
    with pytest.raises(ApiError) as error:
        read_preference(body)
    assert error.value.status == status


def test_a_preference_is_two_verdicts_as_far_apart_as_its_margin() -> None:
    chosen, rejected = read_preference(b'{"chosen": "a", "rejected": "b"}')
    assert (chosen.reward, rejected.reward, chosen.final, rejected.final) == (1.0, 0.0, None, True)
    chosen, rejected = read_preference(b'{"chosen": "a", "rejected": "b", "margin": 0.5}')
    assert (chosen.reward, rejected.reward, chosen.other) == (0.75, 0.25, "b")


@pytest.mark.parametrize(
    ("body", "status"),
    [
        (b"{", 400),
        (b"[]", 400),
        (b'{"response_id": "r"}', 422),
        (b'{"response_id": "r", "reward": 1.01}', 422),
        (b'{"response_id": "r", "reward": -0.1}', 422),
        (b'{"response_id": "r", "reward": NaN}', 400),
        (b'{"response_id": "r", "reward": 1e999}', 400),
        (b'{"response_id": "r", "reward": "1"}', 400),
        (b'{"response_id": "r", "reward": true}', 400),
        (b'{"response_id": "r", "thumbs": "sideways"}', 400),
        (b'{"response_id": "r", "thumbs": "up", "reward": 1}', 422),
        (b'{"response_id": "r", "score": 0.5, "reward": 0.5}', 422),
        (b'{"response_id": "r", "signal": "copy"}', 422),
        (b'{"response_id": "r", "comment": "x", "final": true}', 422),
        (b'{"response_id": "r", "comment": "' + b"x" * 70_000 + b'"}', 422),
        (b'{"response_id": "r", "thumbs": "up", "rewards": 1}', 400),
        (b'{"response_id": "r", "thumbs": "up", "metadata": {"a": "' + b"x" * 5000 + b'"}}', 422),
        (b"\xff\xfe", 400),
    ],
)
def test_feedback_out_of_range_is_refused(body: bytes, status: int) -> None:
    with pytest.raises(ApiError) as error:
        read_feedback(body)
    assert error.value.status == status


def test_an_episode_ends_at_the_last_response_with_feedback() -> None:
    """Case B1: the segments are the recorded tokens; what was not judged is not learned from."""
    judged = conversation(turn(0), turn(1, 0.5, metadata={"style": "cute"}, answered_at=105.0), turn(2))
    episode = episode_of(judged, "w")
    assert [s.kind for s in episode.segments] == ["prompt", "action", "observation", "action"]
    assert [s.token_ids for s in episode.segments] == [(1, 5), (10, 2), (7, 1), (11, 2)]
    assert episode.turn_rewards == (0.0, 0.5)
    assert episode.metrics["feedback"] == [{}, {"style": "cute"}]
    assert episode.metrics["verdicts"] == [None, 0.5], "silence is unknown, whatever the sum needs"
    assert episode.id == "served-1"


@pytest.mark.parametrize(
    ("verdicts", "aggregate", "rewards"),
    [
        ((0.6,) * 3, "mean", (0.2, 0.2, 0.2)),
        ((0.6,) * 3, "sum", (0.6, 0.6, 0.6)),
        ((1.0, 0.6), "last", (0.0, 0.6)),
        ((1.0, None, 0.0), "mean", (0.5, 0.0, 0.0)),
        ((None, None, 0.8), "mean", (0.0, 0.0, 0.8)),
        ((None, 0.5), "last", (0.0, 0.5)),
        ((None,), "mean", (0.0,)),
    ],
)
def test_a_silent_turn_is_in_no_mean(
    verdicts: tuple[float | None, ...], aggregate: Aggregate, rewards: tuple[float, ...]
) -> None:
    assert credited(verdicts, aggregate) == pytest.approx(rewards)


@given(st.lists(st.one_of(st.none(), st.floats(0, 1)), min_size=1, max_size=12))
def test_a_conversation_is_worth_no_more_for_being_long(verdicts: list[float | None]) -> None:
    """Ten turns of .6 used to sum to 6, and to beat a single turn of 1: the model was taught to go on and on."""
    judged = [reward for reward in verdicts if reward is not None]
    worth = sum(credited(verdicts))
    assert worth == pytest.approx(sum(judged) / len(judged) if judged else 0.0)
    assert sum(credited([*verdicts, None])) == pytest.approx(worth), "nor less for a turn that nobody judged"
    assert sum(credited(verdicts * 3)) == pytest.approx(worth)


class Letters:
    """A renderer of one token a character, which says what it was asked to do."""

    def start(self, messages: Any, tools: Any = None) -> Segment:
        return Segment("prompt", tuple(map(ord, "".join(m["content"] for m in messages))))

    def extend(self, transcript: Any, action_ids: Any, messages: Any, tools: Any = None) -> Segment:
        return Segment("observation", tuple(map(ord, "".join(m["content"] for m in messages))))


def ask(*contents: tuple[str, str], tools: list[dict[str, Any]] | None = None) -> ChatRequest:
    messages = [{"role": role, "content": content} for role, content in contents]
    return read_chat_request(
        msgspec.json.encode({"model": "m", "messages": messages, "session": "s", "tools": tools or []})
    )


def test_a_session_appends_and_an_edit_forks() -> None:
    """Case B1: what was sampled stays as it is, whatever it decodes to."""
    known = conversation(turn(0))
    more = plan_turn(ask(("user", "a"), ("assistant", "hi"), ("user", "b")), [known], Letters())
    assert (more.base, more.turn) == ("served-1", 1)
    assert more.prompt_ids == (1, 5, 10, 2, ord("b"))
    for edited in (
        ask(("user", "A"), ("assistant", "hi"), ("user", "b")),
        ask(("user", "a"), ("assistant", "hi!"), ("user", "b")),
        ask(("user", "a")),
        ask(("user", "a"), ("assistant", "hi"), ("assistant", "x"), ("user", "b")),
        ask(("user", "a"), ("assistant", "hi"), ("user", "b"), tools=[{"type": "function", "function": {"name": "f"}}]),
    ):
        fork = plan_turn(edited, [known], Letters())
        assert fork.base == ""
        assert fork.prompt_ids[0] != 1, "rendered afresh"


def test_white_space_that_a_client_strips_forks_nothing() -> None:
    """Chat clients send replies back without the white space at their ends; the tokens stay as sampled."""
    said = {"role": "assistant", "content": " hi  \n\nthere \n"}
    known = conversation(turn(0), messages=[{"role": "user", "content": "a"}, said])
    for sent_back in (" hi  \n\nthere \n", "hi\n\nthere", "hi  \r\n\r\nthere"):
        plan = plan_turn(ask(("user", "a"), ("assistant", sent_back), ("user", "b")), [known], Letters())
        assert (plan.base, plan.after) == ("served-1", "served-1")
        assert plan.prompt_ids == (1, 5, 10, 2, ord("b"))
    for edited in ("hi there", "hi\nthere", "hi\n\n there"):
        assert plan_turn(ask(("user", "a"), ("assistant", edited), ("user", "b")), [known], Letters()).base == ""
    assert plan_turn(ask(("user", "a "), ("assistant", "hi\n\nthere"), ("user", "b")), [known], Letters()).base == ""


def test_what_a_turn_answered_is_found_behind_replies_of_a_forks_prompt() -> None:
    messages = [{"role": role, "content": text} for role, text in zip(["user", "assistant"] * 3, "abcdef", strict=True)]
    forked = conversation(turn(0), turn(1), messages=messages)
    assert [m["content"] for m in before_turn(forked, 0)] == ["a", "b", "c"]
    assert [m["content"] for m in before_turn(forked, 1)] == ["a", "b", "c", "d", "e"]


def test_after_final_feedback_the_same_tokens_begin_a_new_episode() -> None:
    """Case B1, over the border of an episode."""
    closed = conversation(turn(0, 1.0), status="delivered")
    plan = plan_turn(ask(("user", "a"), ("assistant", "hi"), ("user", "b")), [closed], Letters())
    assert plan.base == ""
    assert plan.as_prompt().token_ids == (1, 5, 10, 2, ord("b"))


@pytest.mark.parametrize(
    "body",
    [
        b"{",
        b"[]",
        b"{}",
        b'{"model": "m", "messages": []}',
        b'{"model": "m", "messages": [{"role": "wizard", "content": "x"}]}',
        b'{"model": "m", "messages": [{"role": "assistant", "content": "x"}]}',
        b'{"model": "m", "messages": [{"role": "user", "content": [{"type": "image_url"}]}]}',
        b'{"model": "m", "messages": [{"role": "tool", "content": "x"}]}',
        b'{"model": "m", "messages": [{"role": "user", "content": "x"}], "n": 2}',
        b'{"model": "m", "messages": [{"role": "user", "content": "x"}], "presence_penalty": 1}',
        b'{"model": "m", "messages": [{"role": "user", "content": "x"}], "logprobs": true}',
        b'{"model": "m", "messages": [{"role": "user", "content": "x"}], "max_tokens": 0}',
        b'{"model": "m", "messages": [{"role": "user", "content": "x"}], "temperature": 3}',
        b'{"model": "m", "messages": [{"role": "user", "content": "x"}], "top_p": 0}',
        b'{"model": "m", "messages": [{"role": "user", "content": "x"}], "stop": ["a", "b", "c", "d", "e"]}',
        b'{"model": "m", "messages": [{"role": "user", "content": "x"}], "stop": ""}',
        b'{"model": "m", "messages": [{"role": "user", "content": "x"}], "tools": [{"type": "code"}]}',
        b'{"model": "m", "messages": [{"role": "user", "content": "x"}], "tool_choice": "required"}',
        b'{"model": "m", "messages": [{"role": "user", "content": "x"}], "top_k": 1000000000000000000000}',
        b'{"model": "m", "messages": [{"role": "user", "content": "x"}], "tools": [{"type": "function", "function": '
        b'{"name": "f", "parameters": {"maximum": 1000000000000000000000}}}]}',
        b'{"model": "m", "messages": [{"role": "user", "content": "x"}], "tools": [{"type": "function", "function": '
        b'{"name": "f", "parameters": {"x": ' + b"[" * 800 + b"]" * 800 + b"}}}]}",
        b'{"model": "m", "messages": ' + b"[" * 10_000,
    ],
)
def test_what_cannot_be_served_is_a_400_that_names_it(body: bytes) -> None:
    with pytest.raises(ApiError) as error:
        read_chat_request(body)
    assert error.value.status == 400


def test_a_session_header_that_is_no_utf8_is_a_400() -> None:
    """aiohttp gives such bytes as half surrogate pairs, which the journal could not write."""
    with pytest.raises(ApiError) as error:
        read_chat_request(b'{"model": "m", "messages": [{"role": "user", "content": "x"}]}', "ann\udcff")
    assert error.value.status == 400


@pytest.mark.parametrize(
    "metadata", [{"a": 10**30}, {"a": [{"b": -(2**63) - 1}]}, {"a": msgspec.Raw(b"[" * 900 + b"]" * 900)}]
)
def test_metadata_that_could_not_be_kept_is_refused_and_not_accepted(metadata: dict[str, Any]) -> None:
    """What the journal, the store or the learner cannot write and read would be a 500, or worse."""
    with pytest.raises(ApiError) as error:
        read_feedback(msgspec.json.encode({"response_id": "r", "reward": 1, "metadata": metadata}))
    assert error.value.status == 422


def test_harmless_words_of_other_clients_are_no_error() -> None:
    body = {
        "model": "m",
        "messages": [{"role": "user", "content": [{"type": "text", "text": "x"}], "name": "ann"}],
        "n": 1,
        "presence_penalty": 0.0,
        "tool_choice": "auto",
        "response_format": {"type": "text"},
        "store": False,
        "metadata": {"a": "b"},
        "service_tier": "auto",
    }
    assert read_chat_request(msgspec.json.encode(body)).messages == [{"role": "user", "content": "x", "name": "ann"}]


def test_a_flood_is_limited_by_caller_and_says_when_to_come_back() -> None:
    now = 0.0
    limit = RateLimit(60, 3, clock=lambda: now)
    for _ in range(3):
        limit.take("a")
    with pytest.raises(ApiError) as error:
        limit.take("a")
    assert (error.value.status, round(error.value.retry_s)) == (429, 1)
    limit.take("b")
    now = 1.01
    limit.take("a")
    with pytest.raises(ApiError):
        limit.take("a")
