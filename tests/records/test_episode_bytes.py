"""An episode's bytes: what is refused, what older programs have written, and how many there are."""

from __future__ import annotations

import base64
import gc
import math
import random
from typing import Any

import msgspec
import numpy as np
import pytest

from agent.episode import (
    SCHEMA_VERSION,
    Episode,
    EpisodeError,
    Experts,
    Segment,
    StopReason,
    decode,
    decode_segment,
    encode,
    validate,
)

# As version 1 of the schema wrote them: lists of numbers, and no schema where it was the first.
VERSION_1 = base64.b64decode(
    "jaJpZKJlMaZlbnZfaWSwc2FvL1B5dGhvblRJUi12MKd0YXNrX2lkonQ3qHNlZ21lbnRzlIOka2luZKZwcm9tcHSpdG9rZW5faWRzkwHMyM4AARFw"
    "pHRleHShUYeka2luZKZhY3Rpb26pdG9rZW5faWRzkwUGB6R0ZXh0o2FiY6hsb2dwcm9ic5PLv+AAAAAAAADLv9AAAAAAAADLv/AAAAAAAACodmVy"
    "c2lvbnOTAwMErWZpbmlzaF9yZWFzb26kc3RvcKdleHBlcnRzg6ZsYXllcnMBpXRvcF9rAqRkYXRhxAQBAQEBg6RraW5kq29ic2VydmF0aW9uqXRv"
    "a2VuX2lkc5EJpHRleHShb4aka2luZKZhY3Rpb26pdG9rZW5faWRzkQikdGV4dKFkqGxvZ3Byb2Jzkcu/wAAAAAAAAKh2ZXJzaW9uc5EErWZpbmlz"
    "aF9yZWFzb26mbGVuZ3RorHR1cm5fcmV3YXJkc5LLAAAAAAAAAADLP/AAAAAAAACrc3RvcF9yZWFzb26vdHJ1bmNhdGVkX3R1cm5zqHNhbXBsaW5n"
    "h6t0ZW1wZXJhdHVyZcs/8AAAAAAAAKV0b3BfcMs/8AAAAAAAAKV0b3Bfa/+qbWF4X3Rva2Vuc80EAKRzZWVkA65zdG9wX3Rva2VuX2lkc5ECpHN0"
    "b3CQp3RpbWluZ3OCqWlzc3VlZF9hdMs/+AAAAAAAAKtmaW5pc2hlZF9hdMtABAAAAAAAAKZ3b3JrZXKhd6hncm91cF9pZKFnp2F0dGVtcHQBp21l"
    "dHJpY3OBpmZhbWlseaRzdW1zq2Vudmlyb25tZW50o3Rpcg=="
)
SEGMENT_1 = base64.b64decode(
    "h6RraW5kpmFjdGlvbql0b2tlbl9pZHOTBQYHpHRleHSjYWJjqGxvZ3Byb2Jzk8u/4AAAAAAAAMu/0AAAAAAAAMu/8AAAAAAAAKh2ZXJzaW9uc5MD"
    "AwStZmluaXNoX3JlYXNvbqRzdG9wp2V4cGVydHODpmxheWVycwGldG9wX2sCpGRhdGHEBAEBAQE="
)


def one(*segments: Segment, **fields: Any) -> Episode:
    found = segments or (Segment("prompt", (1,)), Segment("action", (2, 3), "x", (-0.1, -0.2), (4, 4), "stop"))
    rewards = (1.0,) * sum(s.kind == "action" for s in found)
    return Episode("e", "env", "task", tuple(found), rewards, StopReason.TERMINATED, **fields)


def long_episode(turns: int = 300) -> Episode:
    """Turns of 150 sampled tokens and 277 of observation, without text; 128,000 tokens in 300."""
    rng, segments = random.Random(0), [Segment("prompt", range(200))]
    for turn in range(turns):
        logprobs = [-rng.expovariate(2.0) for _ in range(150)]
        segments.append(Segment("action", rng.choices(range(150_000), k=150), "", logprobs, [turn // 50] * 150, "stop"))
        segments.append(Segment("observation", rng.choices(range(150_000), k=277)))
    return one(*segments)


def test_bytes_of_the_version_before_are_read() -> None:
    episode = decode(VERSION_1)
    assert episode.schema == SCHEMA_VERSION
    assert [s.token_ids for s in episode.segments] == [(1, 200, 70_000), (5, 6, 7), (9,), (8,)]
    assert [s.logprobs for s in episode.actions] == [(-0.5, -0.25, -1.0), (-0.125,)]
    assert [s.versions for s in episode.actions] == [(3, 3, 4), (4,)]
    assert [s.kind for s in episode.segments] == ["prompt", "action", "observation", "action"]
    assert (episode.id, episode.group_id, episode.attempt, episode.environment) == ("e1", "g", 1, "tir")
    assert (episode.sampling.seed, episode.timings.finished_at, episode.metrics) == (3, 2.5, {"family": "sums"})
    assert episode.actions[0].experts == Experts.pack(np.ones((2, 1, 2), int))
    assert episode.stop_reason is StopReason.TRUNCATED_TURNS
    assert decode(encode(episode)) == episode


def test_a_segment_that_a_journal_of_the_version_before_holds_is_read() -> None:
    segment = decode_segment(SEGMENT_1)
    assert segment == decode(VERSION_1).segments[1]
    assert decode_segment(msgspec.msgpack.encode(segment)) == segment


def test_what_is_written_says_its_schema_and_a_later_one_is_refused_by_its_number() -> None:
    fields = msgspec.msgpack.decode(encode(one()))
    assert fields["schema"] == 2
    with pytest.raises(EpisodeError, match="schema 3"):
        decode(encode(one(schema=3)))
    later = {**fields, "schema": 3, "segments": [{"kind": "prompt", "pages": [1, 2]}]}
    with pytest.raises(EpisodeError, match="schema 3"):
        decode(msgspec.msgpack.encode(later))


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\xc1",
        b"\x93\x01\x02\x03",
        msgspec.msgpack.encode({}),
        msgspec.msgpack.encode({"segments": 3}),
        msgspec.msgpack.encode({"segments": [3]}),
        VERSION_1[:-30],
        VERSION_1.replace(b"\x93\x05\x06\x07", b"\x93\x05\xa1a\x07"),
        VERSION_1.replace(b"\x93\x03\x03\x04", b"\x92\x03\x03\x04"),
    ],
    ids=["nothing", "noise", "list", "empty", "no segments", "no segment", "cut", "a letter", "a version less"],
)
def test_other_bytes_are_an_episode_error(data: bytes) -> None:
    with pytest.raises(EpisodeError):
        decode(data)


@pytest.mark.parametrize(
    ("field", "data"),
    [
        ("token_ids", b"\1\0\0"),
        ("logprobs", b"\1\0\0"),
        ("versions", b"\1\0\0"),
        ("versions", (4).to_bytes(4, "little") + bytes(4)),
        ("versions", bytes(4) + (3).to_bytes(4, "little") + bytes(4) + (-1).to_bytes(4, "little", signed=True)),
    ],
    ids=["ids", "log-probs", "versions", "an empty run", "a run of less than nothing"],
)
def test_bytes_that_are_no_whole_number_of_tokens_are_refused(field: str, data: bytes) -> None:
    fields = msgspec.msgpack.decode(encode(one()))
    fields["segments"][1][field] = [data]
    with pytest.raises(EpisodeError):
        decode(msgspec.msgpack.encode(fields))


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_log_prob_that_is_none_is_refused_and_one_of_minus_infinity_is_not(bad: float) -> None:
    def acted(logprob: float) -> Episode:
        return one(Segment("prompt", (1,)), Segment("action", (2, 3), "", (-0.5, logprob), (0, 0)))

    with pytest.raises(EpisodeError, match="segment 1"):
        validate(acted(bad))
    assert decode(encode(acted(-math.inf))).actions[0].logprobs == (-0.5, -math.inf)


def test_token_ids_that_are_none_are_refused() -> None:
    with pytest.raises(EpisodeError, match="negative"):
        validate(one(Segment("prompt", (1, -2)), Segment("action", (2,), "", (-0.5,), (0,))))
    for ids in ((2**31,), (1.5,), ("a",)):
        with pytest.raises(EpisodeError, match="prompt"):
            Segment("prompt", ids)  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", [tuple, list, np.array, iter])
def test_any_sequence_may_be_given_also_in_place_of_another(kind: Any) -> None:
    if kind is iter:
        kind = lambda values: range(values[0], values[-1] + 1) if isinstance(values[0], int) else values  # noqa: E731
    made = Segment("action", kind([5, 6]), logprobs=kind([-0.5, -1.0]), versions=kind([1, 2]))
    assert (made.token_ids, made.logprobs, made.versions) == ((5, 6), (-0.5, -1.0), (1, 2))
    other = msgspec.structs.replace(made, logprobs=kind([-0.25, -0.75]), versions=kind([3, 4]))
    assert (other.logprobs, other.versions, other.token_ids) == ((-0.25, -0.75), (3, 4), (5, 6))


def test_an_observation_writes_no_empty_arrays() -> None:
    given = Segment("observation", [7], "o", (), [], "")
    assert set(msgspec.msgpack.decode(msgspec.msgpack.encode(given))) == {"kind", "token_ids", "text"}
    assert decode_segment(msgspec.msgpack.encode(given)) == given


def test_a_token_takes_eight_bytes_at_most_on_the_disk() -> None:
    """4 for an observation's, 8 for a sampled one, and little for a turn (text comes on top)."""
    episode = long_episode()
    assert len(encode(episode)) / episode.tokens < 5.8
    sampled = one(Segment("prompt", (1,)), Segment("action", range(20_000), "", (-0.5,) * 20_000, (1,) * 20_000))
    assert len(encode(sampled)) / sampled.tokens < 8.05


def test_a_long_episode_is_read_without_a_python_number_a_token() -> None:
    """Objects that a decoded episode of 43,000 tokens consists of: some a turn. The collector sees a handful."""
    data = encode(long_episode(100))
    gc.collect()
    before = len(gc.get_objects())
    episode = decode(data)
    assert len(gc.get_objects()) - before < 20
    assert all(not gc.is_tracked(segment) for segment in episode.segments)
