"""An episode as the store keeps it: the same one again, in less room, and damage is told from an episode."""

from __future__ import annotations

import random
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agent.episode import Branch, Episode, EpisodeError, Experts, Segment, StopReason, compact, decode, encode

WORDS = ["".join(random.Random(n).choices("etaoinshrdlu", k=2 + n % 7)) for n in range(4096)]
texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
ids = st.lists(st.integers(0, 2**31 - 1), max_size=5)


@st.composite
def segments(draw: Any) -> tuple[Segment, ...]:
    found = [Segment("prompt", draw(ids), draw(texts))]
    for kind in draw(st.lists(st.sampled_from(["action", "observation"]), max_size=4)):
        tokens = draw(ids)
        if kind == "observation":
            found.append(Segment("observation", tokens, draw(texts)))
            continue
        logprobs = draw(st.lists(st.floats(-100, 0, width=32), min_size=len(tokens), max_size=len(tokens)))
        versions = sorted(draw(st.lists(st.integers(-5, 5), min_size=len(tokens), max_size=len(tokens))))
        experts = Experts(1, 1, b"\1") if tokens and draw(st.booleans()) else None
        found.append(Segment("action", tokens, draw(texts), logprobs, versions, "stop", experts))
    found.append(Segment("action", [1], draw(texts), [-0.5], [3], "length"))
    return tuple(found)


def rewarded(chain: tuple[Segment, ...]) -> tuple[float, ...]:
    return (0.5,) * sum(segment.kind == "action" for segment in chain)


@settings(max_examples=60, deadline=None)
@given(main=segments(), branches=st.lists(segments(), max_size=2))
def test_what_comes_from_the_disk_is_what_was_sampled(main: Any, branches: Any) -> None:
    beside = tuple(Branch(chain, rewarded(chain)) for chain in branches)
    episode = Episode("e", "env", "task", main, rewarded(main), StopReason.TERMINATED, branches=beside)
    assert decode(compact(episode)) == episode == decode(encode(episode))


def written(tokens: int) -> Episode:
    """Turns of 150 sampled tokens and 277 of an observation, a word a token."""
    rng, left = random.Random(0), tokens

    def part(count: int) -> tuple[list[int], str]:
        return rng.choices(range(1000, 150_000), k=count), " ".join(rng.choices(WORDS, k=count))

    found = [Segment("prompt", *part(200))]
    while left > 0:
        found.append(Segment("action", *part(150), [-rng.expovariate(2.0) for _ in range(150)], (3,) * 150, "stop"))
        found.append(Segment("observation", *part(277)))
        left -= 427
    return Episode("e", "env", "task", tuple(found), rewarded(tuple(found)), StopReason.TERMINATED)


def test_a_token_takes_eight_bytes_at_most_on_the_disk_with_its_text() -> None:
    episode = written(30_000)
    assert len(compact(episode)) / episode.tokens < 7.6
    assert len(encode(episode)) / episode.tokens > 11


def damaged(data: bytes, place: int, value: Any) -> bytes:
    columns = msgspec.msgpack.decode(data)
    columns[place] = value
    return msgspec.msgpack.encode(columns)


@pytest.mark.parametrize("place", [2, 3, 4], ids=["token ids", "log-probs", "text"])
def test_a_damaged_column_is_an_episode_error(place: int) -> None:
    data = compact(written(1000))
    for value in (b"", b"noise", msgspec.msgpack.decode(data)[place][:-9]):
        with pytest.raises(EpisodeError):
            decode(damaged(data, place, value))
    others = msgspec.msgpack.decode(compact(written(2000)))[place]
    with pytest.raises(EpisodeError, match="not as long"):
        decode(damaged(data, place, others))


def test_lengths_that_are_not_those_of_the_segments_are_an_episode_error() -> None:
    data = compact(written(1000))
    lengths = msgspec.msgpack.decode(data)[1]
    for wrong in (lengths[:-1], [[1, 1]] * len(lengths), [[-1, 0], *lengths[1:]], "none"):
        with pytest.raises(EpisodeError):
            decode(damaged(data, 1, wrong))
    with pytest.raises(EpisodeError):
        decode(data[:-40])
