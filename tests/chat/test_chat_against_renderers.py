"""An independent judge: the hand-written renderers of the `renderers` package."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import renderers
from hypothesis import given, settings
from hypothesis import strategies as st

from agent.chat.renderer import ChatRenderer

contents = st.text(st.characters(exclude_categories=["Cs"]), max_size=30).map(lambda text: f"a{text}.")
answers = st.lists(contents.map(lambda text: {"role": "tool", "content": text}), min_size=1, max_size=3)


@settings(max_examples=40, deadline=None)
@given(system=contents, question=contents, turns=st.lists(st.tuples(contents, st.booleans(), answers), max_size=4))
def check_bridging(mine: ChatRenderer, theirs: Any, system: str, question: str, turns: Any) -> None:
    conversation = [{"role": "system", "content": system}, {"role": "user", "content": question}]
    ids = list(mine.start(conversation).token_ids)
    assert ids == theirs.render_ids(conversation, add_generation_prompt=True)
    for text, stopped, answer in turns:
        action = mine.encode_action(text, closed=stopped)
        conversation.append({"role": "assistant", "content": text})
        expected = theirs.bridge_to_next_turn(ids, list(action), answer).token_ids
        ids += [*action, *mine.extend(conversation, action, answer).token_ids]
        conversation += answer
        assert ids == expected


@pytest.mark.parametrize(("judged", "name"), [("qwen3", "Qwen3Renderer"), ("llama3", "Llama3Renderer")])
def test_two_implementations_disagree_on_the_next_prompt(
    judged: str, name: str, renderer_of: Callable[..., ChatRenderer], reference_of: Callable[[str], Any]
) -> None:
    """Cases B1, B8: what follows an action, stopped or cut, as a second implementation has it."""
    check_bridging(renderer_of(judged), getattr(renderers, name)(reference_of(judged)))
