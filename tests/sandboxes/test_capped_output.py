"""Output is capped while it is read and cut between characters. Case F4: a character split across two reads."""

from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st

from sandboxes.inside.output import CHUNK, CappedOutput


def fed(data: bytes, limit: int, cuts: list[int]) -> CappedOutput:
    text = CappedOutput(limit)
    edges = sorted({0, len(data), *(cut % (len(data) + 1) for cut in cuts)})
    for start, end in itertools.pairwise(edges):
        text.feed(data[start:end])
    return text


@given(st.text(max_size=200), st.lists(st.integers(0, 1000)))
def test_text_within_the_limit_comes_through_whole_however_it_is_split(text: str, cuts: list[int]) -> None:
    """Case F4: a UTF-8 character split across two reads is one character."""
    data = text.encode("utf-8", "surrogatepass")
    capped = fed(data, 4096, cuts)
    assert capped.text() == data.decode("utf-8", "replace")
    assert capped.omitted_bytes == 0


@given(st.binary(max_size=400), st.integers(0, 100), st.lists(st.integers(0, 1000)))
def test_any_bytes_give_the_same_text_however_they_are_split(data: bytes, limit: int, cuts: list[int]) -> None:
    whole, parts = fed(data, limit, []), fed(data, limit, cuts)
    assert parts.text() == whole.text()
    assert parts.omitted_bytes == whole.omitted_bytes
    assert whole.omitted_bytes == 0 or len(data) > limit


@given(st.text(st.sampled_from("aé€😀"), min_size=40, max_size=200), st.integers(0, 60), st.lists(st.integers(0, 1000)))
def test_the_cut_falls_between_characters_and_is_counted(text: str, limit: int, cuts: list[int]) -> None:
    data = text.encode()
    capped = fed(data, limit, cuts)
    shown = capped.text()
    if not capped.omitted_bytes:
        assert shown == text
        return
    note = f"\n[... {capped.omitted_bytes} bytes of output cut here ...]\n"
    head, _, tail = shown.partition(note)
    assert "\ufffd" not in shown
    assert text.startswith(head)
    assert text.endswith(tail)
    assert len(head.encode()) + len(tail.encode()) + capped.omitted_bytes == len(data)
    assert len(head.encode()) + len(tail.encode()) >= limit - 6


def test_what_is_held_does_not_grow_with_what_is_read() -> None:
    capped = CappedOutput(1000)
    for _ in range(2000):
        capped.feed(b"x" * CHUNK)
        assert len(capped._head) + len(capped._tail) <= 1000 + 2 * CHUNK
    assert capped.omitted_bytes == 2000 * CHUNK - 1000


def test_the_cut_is_told_where_it_is_whenever_the_reader_stops() -> None:
    """What is held of the tail is shortened now and then; the moment after is like any other."""
    note = "\n[... {} bytes of output cut here ...]\n"
    for chunks in range(1, 8):
        capped = CappedOutput(1000)
        for _ in range(chunks):
            capped.feed(b"x" * (CHUNK // 2))
        assert capped.text() == "x" * 500 + note.format(chunks * CHUNK // 2 - 1000) + "x" * 500
