"""Thinking and what is said: apart, whole, and the same however a stream is cut."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent.serve.conversations.reasoning import ReasoningFilter

TEXT = st.lists(st.sampled_from(["<think>", "</think>", "<", "</th", "\n", " ", "a", "hm"]), max_size=12).map("".join)


def apart(text: str, size: int, prompt: str = "") -> tuple[str, str]:
    stream = ReasoningFilter("think", prompt)
    said = [stream.add(text[i : i + size]) for i in range(0, len(text), size)] + [stream.finish()]
    joined = ("".join(s.reasoning for s in said), "".join(s.content for s in said))
    assert joined == (stream.reasoning, stream.content)
    return joined


@given(text=TEXT, begun=st.booleans())
def test_a_cut_anywhere_changes_nothing_and_no_letter_is_lost(text: str, begun: bool) -> None:
    prompt = "assistant\n<think>\n" if begun else "assistant\n"
    whole = apart(text, 1000, prompt)
    assert all(apart(text, size, prompt) == whole for size in (1, 2, 3, 7))
    letters = text.replace("<think>", "", 0 if begun else 1).replace("</think>", "", 1)
    if whole[0]:
        assert "".join(whole).replace("\n", "").replace(" ", "") == letters.replace("\n", "").replace(" ", "")
    else:
        assert whole[1] == text or not whole[1].strip() or "<think>" in text or begun


@pytest.mark.parametrize(
    ("text", "prompt", "reasoning", "content"),
    [
        ("<think>\nhm\n</think>\n\n42", "", "hm", "42"),
        ("\n<think>hm</think>42", "", "hm", "42"),
        ("hm\n</think>\n\n42", "<|assistant|><think>\n", "hm", "42"),
        ("42", "<|assistant|><think>\n\n</think>\n\n", "", "42"),
        ("it is <think> as text", "", "", "it is <think> as text"),
        ("<think>cut in its thou", "", "cut in its thou", ""),
        ("<think>a</think><think>b</think>", "", "a", "<think>b</think>"),
    ],
)
def test_thinking_is_what_stands_before_the_answer(text: str, prompt: str, reasoning: str, content: str) -> None:
    assert apart(text, 3, prompt) == (reasoning, content)


def test_where_no_thinking_is_known_a_reply_is_what_it_is() -> None:
    stream = ReasoningFilter("none", "<think>")
    assert stream.add("<think>a</think>b").content == "<think>a</think>b"
