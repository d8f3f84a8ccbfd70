"""Rows of what people said: nothing of them is where SQLite may leave it behind."""

from __future__ import annotations

import re
import sqlite3
from pathlib import Path

from hypothesis import example, given
from hypothesis import strategies as st

from agent.store import texts


def local_part(payload: int, page: int) -> int:
    """How much of a row lies in the page of its tree, as SQLite's description of its files has it."""
    largest, smallest = page - 35, (page - 12) * 32 // 255 - 23
    if payload <= largest:
        return payload
    kept = smallest + (payload - smallest) % (page - 4)
    return kept if kept <= largest else smallest


def varint(value: int) -> int:
    return max(1, (value.bit_length() + 6) // 7)


@given(st.integers(0, 2**24), st.sampled_from([1024, 2048, 4096, 8192]))
@example(0, 4096)
@example(3572, 4096)
def test_no_byte_of_a_text_is_in_a_page_that_it_could_be_left_in(size: int, page: int) -> None:
    pad = texts.padding(size, page)
    before = 2 + varint(2 * pad + 12) + varint(2 * size + 12) + pad
    assert local_part(before + size, page) <= before
    assert pad <= page


def test_sqlite_agrees_with_the_arithmetic(tmp_path: Path) -> None:
    """Every page of a tree (its first byte says so) is searched for letters; overflow pages have them."""
    path = tmp_path / "texts.sqlite"
    sql = sqlite3.connect(path, isolation_level=None)
    sql.executescript(texts.SCHEMA + "BEGIN")
    for size in (*range(1, 300, 7), *range(3000, 9000, 13)):
        texts.put(sql, b"x" * size)
    sql.execute("COMMIT")
    assert texts.read(sql, 1) == b"x"
    data = path.read_bytes()
    pages = [data[i : i + 4096] for i in range(4096, len(data), 4096)]
    leaves = [page for page in pages if page[0] == 13]
    assert len(leaves) > 50
    assert not [page for page in leaves if re.search(b"xx", page)]
