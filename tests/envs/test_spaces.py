"""The text space: Gymnasium's stock one rejects most of Unicode."""

from __future__ import annotations

import copy
import multiprocessing
import pickle

import pytest
from gymnasium.spaces import Dict, Discrete, Text, Tuple, utils
from gymnasium.vector.utils import (
    batch_space,
    concatenate,
    create_empty_array,
    create_shared_memory,
    iterate,
    read_from_shared_memory,
    write_to_shared_memory,
)
from hypothesis import given
from hypothesis import strategies as st

from envs.spaces import Unicode

ANY_TEXT = st.text(alphabet=st.characters())  # surrogates included


@given(ANY_TEXT)
def test_every_string_is_in_the_space(text: str) -> None:
    assert text in Unicode()


def test_lone_surrogates_nul_and_length_are_no_obstacle() -> None:
    text = "\ud800\x00\U0010ffff" * 100_000
    assert text in Unicode()
    assert text not in Text(10**6)  # why this space exists


@pytest.mark.parametrize("thing", [b"x", None, 1, ["x"], ("x",)])
def test_what_is_no_string_is_not_in_it(thing: object) -> None:
    assert thing not in Unicode()


def test_a_bound_is_a_bound() -> None:
    assert "ab" in Unicode(2)
    assert "abc" not in Unicode(2)
    assert all(Unicode(2, seed=i).sample() in Unicode(2) for i in range(50))


def test_sampling_is_seeded_and_reaches_all_planes() -> None:
    first, second = Unicode(seed=7), Unicode(seed=7)
    texts = [first.sample() for _ in range(200)]
    assert texts == [second.sample() for _ in range(200)]
    characters = set("".join(texts))
    assert any(0xD800 <= ord(c) < 0xE000 for c in characters)
    assert max(characters) > "\U00100000"


def test_spaces_compare_by_value_and_travel_between_processes() -> None:
    assert Unicode() == Unicode(seed=3)
    assert Unicode() != Unicode(5)
    assert Unicode() != Text(5)
    assert pickle.loads(pickle.dumps(Unicode(5))) == Unicode(5) == copy.deepcopy(Unicode(5))


def test_batching_gives_a_tuple_of_independent_spaces() -> None:
    batched = batch_space(Unicode(seed=1), 3)
    assert isinstance(batched, Tuple)
    sample = batched.sample()
    assert sample in batched
    assert len(set(sample)) > 1
    assert list(iterate(batched, sample)) == list(sample)
    assert concatenate(Unicode(), ["a", "b"], create_empty_array(Unicode(), 2)) == ("a", "b")
    assert create_empty_array(Unicode(), 2) == ("", "")


@given(st.lists(ANY_TEXT, min_size=1, max_size=4))
def test_shared_memory_returns_what_was_written_last(texts: list[str]) -> None:
    space = Unicode(shared_bytes=4096)
    memory = create_shared_memory(space, len(texts), multiprocessing)
    view = read_from_shared_memory(space, memory, len(texts))
    for index, text in enumerate(texts):
        write_to_shared_memory(space, index, "something longer, written before", memory)
        write_to_shared_memory(space, index, text, memory)
    assert copy.deepcopy(view) == tuple(texts) == tuple(view)


def test_a_text_too_long_for_shared_memory_is_refused_with_the_way_out() -> None:
    space = Unicode(shared_bytes=8)
    memory = create_shared_memory(space, 1, multiprocessing)
    with pytest.raises(ValueError, match=r"shared_memory.*False"):
        write_to_shared_memory(space, 0, "x" * 9, memory)


def test_flattening_leaves_texts_as_they_are_beside_numbers_that_it_flattens() -> None:
    space = Dict({"said": Unicode(), "level": Discrete(3)})
    flat = utils.flatten(space, {"said": "\ud800 x", "level": 1})
    assert flat in utils.flatten_space(space)
    assert flat["said"] == "\ud800 x"
    assert utils.unflatten(space, flat) == {"said": "\ud800 x", "level": 1}
    assert utils.flatten(Unicode(), "text") == "text" == utils.unflatten(Unicode(), "text")
    assert utils.flatten_space(Unicode(4)) == Unicode(4)


def test_a_text_has_no_number_of_dimensions_and_says_why() -> None:
    with pytest.raises(ValueError, match="any length"):
        utils.flatdim(Unicode())
