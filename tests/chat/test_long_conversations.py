"""A turn costs the same however long the conversation is, and says what a rendering of the whole would say."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from published_templates import published
from test_tool_manners import MANNERS, MISTRAL, TOOLS, write_family

from agent.chat.renderer import ChatRenderer
from agent.chat.template import ChatTemplateError

LOOK_BACK = ("deepseek_r1_distill", "deepseekv3")
"""Their templates note, until the next call that they write, whether a tool has ever answered."""

contents = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)
said = st.one_of(
    contents.map(lambda text: f"a{text}."),
    contents.map(lambda text: f"<think>\n{text}\n</think>\n\nThen."),
    st.just('<tool_call>\n{"name": "python", "arguments": {"code": "1"}}\n</tool_call>'),
)
tool_answers = st.lists(contents.map(lambda text: {"role": "tool", "content": text}), min_size=1, max_size=3)
user_answers = contents.map(lambda text: [{"role": "user", "content": text}])
conversations = st.tuples(
    st.booleans(),
    st.lists(st.tuples(said, st.one_of(tool_answers, user_answers)), min_size=4, max_size=8),
    st.booleans(),
)


@pytest.fixture(scope="session")
def renderer_with(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], ChatRenderer]:
    root = tmp_path_factory.mktemp("long")

    def make(name: str) -> ChatRenderer:
        folder = root / name
        if not folder.exists():
            write_family(folder, MISTRAL if name == "mistral" else published(name))
        return ChatRenderer.from_pretrained(folder)

    return make


def tried(renderer: ChatRenderer, *arguments: Any) -> tuple[tuple[int, ...], str] | str:
    """The rendering, or that the template refuses."""
    try:
        found = renderer.extend(*arguments)
    except ChatTemplateError:
        return "refused"
    return found.token_ids, found.text


@pytest.mark.parametrize("name", [name for name, (_, answers) in MANNERS.items() if answers != "never"])
def test_what_is_left_out_changes_what_is_written(name: str, renderer_with: Callable[[str], ChatRenderer]) -> None:
    quick, whole = renderer_with(name), renderer_with(name)
    assert quick.looks_back == (name in LOOK_BACK)
    whole.looks_back = True

    @settings(max_examples=5, deadline=None)
    @given(conversation=conversations)
    def check(conversation: Any) -> None:
        with_system, turns, with_tools = conversation
        tools = TOOLS if with_tools else []
        messages = [{"role": "system", "content": "Be brief."}] if with_system else []
        messages.append({"role": "user", "content": "What is 6 * 7?"})
        for text, answers in turns:
            messages.append({"role": "assistant", "content": text})
            ids = quick.encode_action("said")
            expected = tried(whole, messages, ids, answers, tools)
            if (
                expected == "refused"
            ):  # perhaps for a turn of long ago; the rest of an episode that ended here says nothing
                break
            assert tried(quick, messages, ids, answers, tools) == expected
            messages += answers
        assert quick.looks_back == (name in LOOK_BACK), "it was found at load, and not in a conversation"

    check()


def test_the_last_of_300_turns_renders_as_many_messages_as_the_third(
    renderer_with: Callable[[str], ChatRenderer], monkeypatch: pytest.MonkeyPatch
) -> None:
    renderer = renderer_with("qwen3_instruct_2507")
    rendered: list[int] = []
    render = renderer._template.render

    def counted(messages: Any, tools: Any, **options: Any) -> str:
        rendered.append(len(messages))
        return render(messages, tools, **options)

    monkeypatch.setattr(renderer._template, "render", counted)
    messages = [{"role": "user", "content": "What is 6 * 7?"}]
    by_turn = []
    for _ in range(300):
        messages.append({"role": "assistant", "content": "said"})
        answer = [{"role": "tool", "content": "42"}]
        rendered.clear()
        renderer.extend(messages, renderer.encode_action("said"), answer, TOOLS)
        by_turn.append(sum(rendered))
        messages += answer
    assert by_turn[3] == by_turn[299] == 3  # the question, the action and its answer
    checks = [messages for messages in by_turn if messages > 3]
    assert 5 < len(checks) < 10
    assert sum(by_turn) < 4 * len(messages)


def test_a_template_that_looks_further_back_than_any_probe_is_found_out_as_it_does(
    tmp_path: Path, renderer_with: Callable[[str], ChatRenderer], caplog: pytest.LogCaptureFixture
) -> None:
    counting = "{{ '<|im_start|>many\\n' if messages | length > 24 }}"
    template = published("qwen3_instruct_2507") + counting
    renderer = ChatRenderer.from_pretrained(write_family(tmp_path / "model", template))
    whole = copy.copy(renderer)
    whole.looks_back = True
    assert not renderer.looks_back
    messages = [{"role": "user", "content": "one"}]
    found = []
    with caplog.at_level(logging.WARNING):
        for _ in range(40):
            messages.append({"role": "assistant", "content": "said"})
            answer = [{"role": "user", "content": "two"}]
            ids = renderer.encode_action("said")
            found.append(tried(renderer, messages, ids, answer, []) == tried(whole, messages, ids, answer, []))
            messages += answer
    assert renderer.looks_back
    assert "looks far back" in caplog.text
    assert all(found[16:]), "what it writes from the check on is right"
