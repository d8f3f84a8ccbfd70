"""Packed numbers read like the tuples that they stand for, and take a fraction of the room."""

from __future__ import annotations

import copy
import pickle
import sys
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent.packed import LogProbs, Packed, TokenIds, Versions

INTS = st.lists(st.integers(-(2**31), 2**31 - 1), max_size=30)
FLOATS = st.lists(st.floats(width=32, allow_nan=False), max_size=30)
RUNS = st.lists(st.tuples(st.integers(0, 5), st.integers(1, 5)), max_size=8)
CASES = st.one_of(
    INTS.map(lambda values: (TokenIds.of(values), tuple(values))),
    FLOATS.map(lambda values: (LogProbs.of(values), tuple(values))),
    RUNS.map(lambda runs: [v for v, n in runs for _ in range(n)]).map(lambda v: (Versions.of(v), tuple(v))),
)


@given(CASES, st.data())
def test_it_does_what_a_tuple_does(case: tuple[Packed[Any], tuple[Any, ...]], data: st.DataObject) -> None:
    packed, plain = case
    assert isinstance(packed, Sequence)
    assert packed == plain
    assert plain == packed
    assert packed == list(plain)
    assert not any((packed != plain, plain != packed, packed != packed[:]))
    assert len(packed) == len(plain)
    assert bool(packed) == bool(plain)
    assert tuple(packed) == plain
    assert [*reversed(packed)] == [*reversed(plain)]
    assert hash(packed) == hash(plain)
    assert {plain: "found"}[packed] == "found"
    part = data.draw(st.slices(len(plain)))
    assert type(packed[part]) is type(packed)
    assert packed[part] == plain[part]
    assert packed + packed == plain + plain
    assert packed + plain == plain + packed == plain + plain
    assert sum([packed, packed], ()) == plain + plain
    assert packed.join([packed, packed[:0], packed]) == plain + plain
    for place, value in enumerate(plain):
        assert packed[place] == packed[place - len(plain)] == value
        assert type(packed[place]) is type(value)
        assert value in packed
        assert packed.index(value) == plain.index(value)
        assert packed.count(value) == plain.count(value)
    if plain:
        assert (max(packed), min(packed)) == (max(plain), min(plain))
    for place in (len(plain), -len(plain) - 1):
        with pytest.raises(IndexError):
            packed[place]


@given(CASES)
def test_it_goes_through_numpy_pickle_copies_and_every_codec_of_msgspec(
    case: tuple[Packed[Any], tuple[Any, ...]],
) -> None:
    packed, plain = case
    kind = type(packed)
    assert np.asarray(packed).tolist() == list(plain)
    assert kind.of(np.asarray(packed)) == packed
    assert np.asarray(packed, np.float64).dtype == np.float64
    for back in (
        copy.deepcopy(packed),
        pickle.loads(pickle.dumps(packed)),
        msgspec.msgpack.decode(msgspec.msgpack.encode(packed), type=kind),
        msgspec.json.decode(msgspec.json.encode(packed), type=kind),
    ):
        assert back == plain
        assert type(back) is kind


def test_a_list_is_extended_by_it_in_place() -> None:
    """As by a tuple: what else holds the list sees the new numbers."""
    transcript = [9]
    held = transcript
    transcript += TokenIds.of([1, 2])
    assert held == [9, 1, 2]
    with pytest.raises(TypeError, match="list"):
        [9] + TokenIds.of([1, 2])  # type: ignore[operator]  # noqa: RUF005


def test_log_probs_compare_as_float32_on_both_sides() -> None:
    """What a caller wrote as -0.1 is kept as the nearest float32, and still equals -0.1 written again."""
    packed = LogProbs.of((-0.1, -0.2, -0.3))
    assert packed == (-0.1, -0.2, -0.3)
    assert packed[:2] == [-0.1, -0.2]
    assert packed != (-0.1, -0.2, -0.3001)
    assert packed != ("a", "b", "c")
    assert packed == pytest.approx([-0.1, -0.2, -0.3])
    assert pytest.approx(packed) == [-0.1, -0.2, -0.3]
    assert packed[0] == float(np.float32(-0.1))
    assert LogProbs.of([float("nan")]) != LogProbs.of([float("nan")])[:0]


def test_arrays_are_views_that_nobody_can_write_to() -> None:
    ids = TokenIds.of([1, 2, 3])
    assert np.shares_memory(np.asarray(ids), np.frombuffer(ids.data, np.int32))
    for packed in (ids, LogProbs.of([0.0]), Versions.of([1, 1])):
        with pytest.raises(ValueError, match="read-only"):
            np.asarray(packed)[0] = 5


@pytest.mark.parametrize(
    ("make", "values"),
    [
        (TokenIds.of, [2**31]),
        (TokenIds.of, [1.5]),
        (TokenIds.of, ["a"]),
        (TokenIds.of, [None]),
        (TokenIds.of, np.array([1.5])),
        (TokenIds.of, np.array([2**40])),
        (TokenIds.of, np.array([[1]])),
        (LogProbs.of, [None]),
        (LogProbs.of, ["-1"]),
        (LogProbs.of, np.array(["a"])),
        (Versions.of, [2**31]),
        (Versions.of, ["a", "b"]),
        (Versions.of, [1, 1.5]),
    ],
    ids=lambda value: value.__qualname__ if callable(value) else None,
)
def test_what_is_no_such_number_is_refused_and_never_rounded(make: Callable[[Any], Any], values: Any) -> None:
    with pytest.raises((TypeError, ValueError)):
        make(values)


def test_versions_are_as_long_as_their_runs() -> None:
    """A turn of a thousand tokens of one version takes eight bytes."""
    assert len(Versions.of([7] * 1000).data) == 8
    assert Versions.of([3, 3, 4, 4, 4]).runs() == [(3, 2), (4, 3)]
    assert Versions.join([Versions.of([3]), Versions.of([3, 4])]).runs() == [(3, 2), (4, 1)]


def test_a_token_takes_four_bytes_and_nothing_for_the_collector() -> None:
    import gc

    ids = TokenIds.of(range(10_000))
    assert sys.getsizeof(ids) + sys.getsizeof(ids.data) < 40_200
    assert not gc.is_tracked(ids)


def test_it_says_what_it_holds_without_filling_the_screen() -> None:
    assert repr(TokenIds.of([1, 2])) == "<2 TokenIds: 1, 2>"
    assert repr(Versions.of([1] * 100)) == "<100 Versions: 1, 1, 1, 1, 1, 1, 1, 1, ...>"
