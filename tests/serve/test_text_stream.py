"""Text deltas: no half characters, nothing of a stop string, no tool call, and nothing lost."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agent.chat.renderer import ChatRenderer
from agent.serve.conversations.reply_text import Detokenizer, TextFilter

OPEN = "<tool_call>"
Decode = Callable[[Sequence[int]], str]


@pytest.fixture(scope="session")
def renderer(models: tuple[Path, Path]) -> ChatRenderer:
    return ChatRenderer.from_pretrained(models[0])


@settings(max_examples=200, deadline=None)
@given(text=st.text(max_size=40), sizes=st.lists(st.integers(1, 5), min_size=1, max_size=20))
def test_no_delta_ends_inside_a_character(renderer: ChatRenderer, text: str, sizes: list[int]) -> None:
    ids = renderer.encode_action(text, closed=False)
    whole = renderer.decode(ids)
    detokenizer, deltas, at = Detokenizer(renderer.decode), [], 0
    for size in sizes * len(ids):
        deltas.append(detokenizer.add(ids[at : at + size]))
        at += size
    assert whole.startswith("".join(deltas))
    for delta in deltas:
        assert "\ufffd" not in delta or "\ufffd" in whole
    assert "".join(deltas) + detokenizer.finish() == whole


@settings(max_examples=200, deadline=None)
@given(ids=st.lists(st.integers(0, 255), max_size=30), step=st.integers(1, 4))
def test_bytes_that_are_no_text_lose_nothing(renderer: ChatRenderer, ids: list[int], step: int) -> None:
    kept = [i for i in ids if i not in renderer.stop_token_ids]
    detokenizer = Detokenizer(renderer.decode)
    deltas = [detokenizer.add(kept[i : i + step]) for i in range(0, len(kept), step)]
    assert "".join(deltas) + detokenizer.finish() == renderer.decode(kept)


@given(text=st.text("ab<>_tolcal", max_size=40), stops=st.lists(st.text("ab<t", min_size=1, max_size=4), max_size=4))
def test_a_stop_string_ends_the_text_wherever_it_is_cut(text: str, stops: list[str]) -> None:
    cuts = [at for stop in stops if (at := text.find(stop)) >= 0]
    for size in (1, 2, 3, 7):
        stream, sent = TextFilter(stops), ""
        for i in range(0, len(text), size):
            delta = stream.add(text[i : i + size])
            sent += delta.text
            if delta.stopped:
                break
        else:
            sent += stream.finish()
        if size == 1 and cuts:  # character by character the first match is the one that is complete first
            ends = min(text.find(stop) + len(stop) for stop in stops if stop in text)
            first = min(text.find(stop) for stop in stops if stop in text and text.find(stop) + len(stop) == ends)
            assert sent == text[:first]
        if not cuts:
            assert sent == text
        assert not any(stop in sent for stop in stops)


@given(before=st.text("ab<_", max_size=12), after=st.text(max_size=12))
def test_nothing_of_a_tool_call_is_sent(before: str, after: str) -> None:
    stream, sent = TextFilter((), opens=["<tool_call>"]), ""
    for character in before + OPEN + after:
        sent += stream.add(character).text
    sent += stream.finish()
    assert sent == (before + OPEN + after).partition(OPEN)[0]
    assert stream.text == before + OPEN + after


def test_what_only_looked_like_a_call_is_sent_at_the_end() -> None:
    stream = TextFilter((), opens=["<tool_call>"])
    assert stream.add("a <tool_").text == "a "
    assert stream.finish() == "<tool_"
