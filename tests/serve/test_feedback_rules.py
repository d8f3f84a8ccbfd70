"""What feedback does, as decided: idempotent, conflicting, late; and the episode that comes of it."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from agent.episode import SamplingParams, Segment
from agent.serve.api.limits import RateLimit
from agent.serve.conversations.conversation import Conversation, Turn, episode_of, plan_turn
from agent.serve.conversations.feedback import Feedback, decide, read_feedback
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


def give(reward: float = 1.0, final: bool | None = None) -> Feedback:
    return Feedback("r0", reward, final, {})


def refused(feedback: Feedback, where: Conversation, *, now: float = 101.0) -> int:
    with pytest.raises(ApiError) as error:
        decide(feedback, where, where.turns[0], now=now, ttl_s=TTL)
    return error.value.status


def test_the_default_of_final_is_true_outside_of_sessions_only() -> None:
    alone, inside = conversation(turn(0), session=""), conversation(turn(0))
    assert decide(give(), alone, alone.turns[0], now=101, ttl_s=TTL).closes
    assert not decide(give(), inside, inside.turns[0], now=101, ttl_s=TTL).closes
    assert decide(give(final=True), inside, inside.turns[0], now=101, ttl_s=TTL).closes


def test_the_same_again_is_a_duplicate_and_another_verdict_a_conflict() -> None:
    """Case G5."""
    open_ = conversation(turn(0, 1.0))
    closed = conversation(turn(0, 1.0, final=True), status="answered")
    for where in (open_, closed):
        assert decide(give(), where, where.turns[0], now=9999, ttl_s=TTL).duplicate
        assert refused(give(0.5), where) == 409
    assert refused(give(final=False), closed) == 409
    upgrade = decide(give(final=True), open_, open_.turns[0], now=101, ttl_s=TTL)
    assert (upgrade.duplicate, upgrade.closes, upgrade.final) == (False, True, True)


def test_late_closed_and_deleted_are_told_apart() -> None:
    """Case G5: 410 for what is too late, 409 for what is decided."""
    assert refused(give(), conversation(turn(0)), now=100 + TTL + 1) == 410
    assert refused(give(), conversation(turn(0), status="expired")) == 410
    assert refused(give(), conversation(turn(0), status="wiped")) == 410
    assert refused(give(), conversation(turn(0), turn(1, 1.0), status="delivered")) == 409


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
    assert episode.id == "served-1"


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
