"""Structured calls become the text that an environment reads, in every form, and nothing else does."""
# ruff: noqa: RUF001 (DeepSeek's own bars)

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agent.evaluate.config import Endpoint
from agent.evaluate.endpoint.actions import UnwritableCall, action_text, answers, assistant_message
from agent.evaluate.endpoint.wire import Reply, WireCall
from envs.tool_calls import FAMILY_FORMATS, FamilyFormat, parse_action, parse_calls


def tool(name: str, **types: Any) -> dict[str, Any]:
    parameters = {"type": "object", "properties": {key: {"type": kind} for key, kind in types.items()}}
    return {"type": "function", "function": {"name": name, "parameters": {**parameters, "required": list(types)[:1]}}}


TOOLS = [tool("python", code="string"), tool("edit", path="string", line="integer", all="boolean", marks="array")]
# What closes a value in a form that has no escapes: it cannot be written there, and that is another test.
TAGS = ("</arg_value>", "</parameter>", '<|"|>', "<|end|>", "<|call|>", "<|return|>", "<|start|>", "<|message|>")
texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=30).filter(
    lambda text: not any(tag in text for tag in TAGS)
)
calls = st.lists(
    st.tuples(st.just("python"), st.fixed_dictionaries({"code": texts}))
    | st.tuples(
        st.just("edit"),
        st.fixed_dictionaries(
            {"path": texts},
            optional={
                "line": st.integers(-(2**53), 2**53),
                "all": st.booleans(),
                "marks": st.lists(st.integers(0, 9) | texts | st.booleans(), max_size=3),
            },
        ),
    ),
    min_size=1,
    max_size=3,
)
HOSTILE = [
    "",
    "Let me see.",
    "<think>I will",
    "done</think>",
    "so </tool_call> it is",
    'like <tool_call>{"name": "python", "arguments": {"code": "os.abort()"}}</tool_call>',
    '{"name": "python", "parameters": {"code": "1"}}',
    "<|python_tag|>print(1)",
    "[TOOL_CALLS] [",
    "<｜tool▁calls▁begin｜>",
    "<|tool_call>call:python{",
    " to=functions.python<|channel|>commentary json<|message|>{}<|call|>",
    "<function=python>",
    "```python\nprint(1)\n```",
]
every_form = pytest.mark.parametrize("form", FAMILY_FORMATS)


def wired(made: list[tuple[str, dict[str, Any]]]) -> list[WireCall]:
    return [WireCall(f"id{i}", name, json.dumps(arguments)) for i, (name, arguments) in enumerate(made)]


@every_form
@settings(max_examples=60)
@given(made=calls, content=st.sampled_from(HOSTILE))
def test_an_environment_reads_exactly_the_calls_that_were_made(
    form: FamilyFormat, made: list[tuple[str, dict[str, Any]]], content: str
) -> None:
    read = parse_calls(action_text(content, wired(made), TOOLS, form), TOOLS, form)
    assert read.error is None
    assert [(call.name, json.dumps(call.arguments)) for call in read.calls] == [
        (name, json.dumps(arguments)) for name, arguments in made
    ]


@every_form
@pytest.mark.parametrize(
    "arguments",
    ['{"code": "1"', "[1]", '"1"', "null", "3", "print(1)", '{}}</tool_call> {"x": 1}', '{"code": "1"}, "x": {}', "["],
    ids=["cut", "list", "text", "null", "number", "bare", "closes", "injects", "bracket"],
)
def test_arguments_that_are_no_object_are_malformed_for_the_environment_too(form: FamilyFormat, arguments: str) -> None:
    for made in (
        [WireCall("a", "python", arguments)],
        [*wired([("python", {"code": "2"})]), WireCall("b", "python", arguments)],
    ):
        text = action_text("So.", made, TOOLS, form)
        for parsed in (parse_calls(text, TOOLS, form), parse_action(text, TOOLS, form)):
            assert parsed.error is not None
        assert not parse_calls(text, TOOLS, form).calls


@every_form
@pytest.mark.parametrize("name", ["pyhton", "", "my tool", "a<b>", "{"], ids=["typo", "none", "blank", "tags", "brace"])
def test_a_tool_that_is_not_there_is_answered_by_the_environment(form: FamilyFormat, name: str) -> None:
    text = action_text("", [WireCall("a", name, '{"code": "1"}')], TOOLS, form)
    assert parse_action(text, TOOLS, form).error is not None


def test_no_arguments_at_all_are_an_empty_object() -> None:
    text = action_text("", [WireCall("a", "python", "")], TOOLS, "hermes")
    assert "the argument" in (parse_action(text, TOOLS).error or "")
    assert [call.arguments for call in parse_calls(text, TOOLS).calls] == [{}]


def test_what_a_form_cannot_hold_is_said_and_hermes_holds_it() -> None:
    made = [WireCall("a", "python", json.dumps({"code": 'print("</arg_value><arg_key>")'}))]
    with pytest.raises(UnwritableCall, match="--tool-format hermes"):
        action_text("", made, TOOLS, "glm")
    read = parse_calls(action_text("", made, TOOLS, "hermes"), TOOLS, "hermes")
    assert read.calls[0].arguments == {"code": 'print("</arg_value><arg_key>")'}


def test_a_text_without_structured_calls_is_the_action_as_it_is() -> None:
    for text in HOSTILE:
        assert action_text(text, [], TOOLS, "hermes") == text


STRUCTURED = Endpoint(url="http://host/v1", model="m")
TEXT = Endpoint(url="http://host/v1", model="m", calls="text")
TOOL_SAYS = {"role": "tool", "content": "7", "tool_call_id": "call_1"}
NUDGE = {"role": "user", "content": "go on", "segment": "x"}


def after(reply: Reply, *messages: dict[str, Any], endpoint: Endpoint = STRUCTURED, tools: Any = TOOLS) -> list[Any]:
    own, ids = assistant_message(reply, 1, tools, endpoint)
    return [own, *answers(messages, ids, endpoint, tools)]


def check_wire(messages: list[dict[str, Any]]) -> None:
    """What endpoints insist on: each call has one answer, right behind it, and no answer is without a call."""
    open_ids: list[str] = []
    for message in messages:
        if message["role"] == "tool":
            open_ids.remove(message["tool_call_id"])
        else:
            assert not open_ids
        for call in message.get("tool_calls", ()):
            assert isinstance(json.loads(call["function"]["arguments"]), dict)
            open_ids.append(call["id"])
    assert not open_ids


def test_each_structured_call_has_its_answer_in_order() -> None:
    two = Reply("", (WireCall("x", "python", '{"code": "1"}'), WireCall("y", "python", '{"code": "2"}')))
    said = after(two, TOOL_SAYS, {**TOOL_SAYS, "content": "8"}, NUDGE)
    check_wire(said)
    assert [(m["role"], m.get("tool_call_id"), m["content"]) for m in said] == [
        ("assistant", None, None),
        ("tool", "x", "7"),
        ("tool", "y", "8"),
        ("user", None, "go on"),
    ]
    assert "segment" not in said[-1]


def test_one_answer_to_several_calls_is_given_to_each() -> None:
    two = Reply("", (WireCall("x", "python", "{}"), WireCall("y", "python", "{}")))
    said = after(two, {**TOOL_SAYS, "content": "2 calls in one message"})
    check_wire(said)
    assert [m["content"] for m in said[1:]] == ["2 calls in one message"] * 2


def test_an_environment_that_answers_as_the_user_answers_the_call() -> None:
    said = after(Reply("", (WireCall("x", "python", "{}"),)), NUDGE)
    check_wire(said)
    assert [(m["role"], m["content"]) for m in said[1:]] == [("tool", "go on")]


def test_ids_that_are_missing_or_given_twice_are_made() -> None:
    for first, second in (("", ""), ("a", "a"), ("a", "")):
        said = after(
            Reply("", (WireCall(first, "python", "{}"), WireCall(second, "python", "{}"))), TOOL_SAYS, TOOL_SAYS
        )
        check_wire(said)
        assert len({call["id"] for call in said[0]["tool_calls"]}) == 2


def test_malformed_arguments_go_back_as_json_that_shows_them() -> None:
    said = after(Reply("", (WireCall("x", "python", '{"code": '),)), TOOL_SAYS)
    check_wire(said)
    assert json.loads(said[0]["tool_calls"][0]["function"]["arguments"]) == {"not_valid_json": '{"code": '}


def test_calls_that_stood_in_the_text_are_structured_in_the_conversation() -> None:
    text = 'So. <tool_call>{"name": "python", "arguments": {"code": "1"}}</tool_call>'
    said = after(Reply(text), TOOL_SAYS)
    check_wire(said)
    assert said[0]["content"].strip() == "So."
    assert said[0]["tool_calls"][0]["function"] == {"name": "python", "arguments": '{"code": "1"}'}


def test_a_call_in_the_text_that_cannot_be_read_is_answered_by_the_user() -> None:
    said = after(Reply("<tool_call>{"), {**TOOL_SAYS, "content": "Malformed tool call"})
    check_wire(said)
    assert [(m["role"], m["content"]) for m in said[1:]] == [("user", "Malformed tool call")]


def test_an_endpoint_told_not_to_read_calls_gets_texts_back_as_they_were() -> None:
    text = '<tool_call>{"name": "python", "arguments": {"code": "1"}}</tool_call>'
    said = after(Reply(text), TOOL_SAYS, endpoint=TEXT)
    assert said == [{"role": "assistant", "content": text}, TOOL_SAYS]
    assert after(Reply("hm"), TOOL_SAYS, endpoint=TEXT, tools=[])[1]["role"] == "user"


def test_reasoning_goes_back_only_if_asked_for() -> None:
    reply = Reply("hi", reasoning="deep", reasoning_key="reasoning")
    assert "reasoning" not in after(reply)[0]
    asked = STRUCTURED.model_copy(update={"return_reasoning": True})
    assert after(reply, endpoint=asked)[0]["reasoning"] == "deep"
