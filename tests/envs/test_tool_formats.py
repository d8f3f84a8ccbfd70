"""Tool calls in every family's form: what is written is read back, and any text has one of three outcomes."""
# ruff: noqa: RUF001, E501 (DeepSeek's own bars; texts as models write them)

from __future__ import annotations

import time
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from envs.said import said
from envs.tool_calls import FAMILY_FORMATS, FORMS, FamilyFormat, parse_action, parse_calls, write_calls
from envs.tool_formats.reading import ToolCall


def tool(name: str, **types: Any) -> dict[str, Any]:
    properties = {key: {"type": kind} if isinstance(kind, str | list) else kind for key, kind in types.items()}
    parameters = {"type": "object", "properties": properties, "required": list(types)[:1]}
    return {"type": "function", "function": {"name": name, "description": "", "parameters": parameters}}


TOOLS = [
    tool("python", code="string"),
    tool("every-thing.1", text="string", count="integer", share="number", yes="boolean", rows="array", deep="object"),
]
# What closes a value in one of the forms: a string that holds it can't be told from the end of the value.
TAGS = ("</arg_value>", "</parameter>", '<|"|>', "<|end|>", "<|call|>", "<|return|>", "<|start|>", "<|message|>")
texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=40).filter(
    lambda text: not any(t in text for t in TAGS)
)
numbers = st.integers(-(2**60), 2**60) | st.floats(allow_nan=False, allow_infinity=False)
# Gemma writes keys bare, so they are names.
values = st.recursive(
    st.none() | st.booleans() | numbers | texts,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.from_regex(r"[a-z_]\w{0,5}", fullmatch=True), inner),
    max_leaves=6,
)
arguments = st.fixed_dictionaries(
    {"text": texts},
    optional={
        "count": st.integers(-(2**60), 2**60),
        "share": st.floats(allow_nan=False, allow_infinity=False),
        "yes": st.booleans(),
        "rows": st.lists(values, max_size=3),
        "deep": st.dictionaries(st.from_regex(r"[a-z_]\w{0,5}", fullmatch=True), values, max_size=3),
    },
)
calls = st.lists(
    st.builds(ToolCall, st.just("python"), st.fixed_dictionaries({"code": texts}))
    | st.builds(ToolCall, st.just("every-thing.1"), arguments),
    min_size=1,
    max_size=3,
)
every_form = pytest.mark.parametrize("form", FAMILY_FORMATS)


@every_form
@settings(max_examples=60, deadline=None)
@given(written=calls, thought=st.sampled_from(["", "<think>I could <tool_call> it</think>", "hm</think>\n"]))
def test_what_is_written_is_read_back_whatever_the_arguments(
    form: FamilyFormat, written: list[ToolCall], thought: str
) -> None:
    text = write_calls(written, form)
    if form not in ("harmony", "llama3"):
        text = thought + text
    read = parse_calls(text, TOOLS, form)
    assert read.error is None
    assert list(read.calls) == written


PIECES = [
    *(
        "<think>",
        "</think>",
        "{",
        "}",
        "[",
        "]",
        ":",
        ",",
        ";",
        '"',
        "\n",
        " ",
        "python",
        '"name"',
        '"parameters"',
        "code",
    ),
    *(
        "<arg_key>",
        "</arg_key>",
        "<arg_value>",
        "</arg_value>",
        "<function=python>",
        "<parameter=code>",
        "</parameter>",
    ),
    *(
        "</function>",
        "</tool_call>",
        "<|message|>",
        "<|end|>",
        "<|call|>",
        "to=functions.python",
        '<|"|>',
        "call:python",
    ),
    *(
        "<tool_call|>",
        "<｜tool▁sep｜>",
        "<｜tool▁call▁end｜>",
        "<｜tool▁calls▁end｜>",
        "```json\n",
        "[ARGS]",
        "\ud800",
        "\0",
    ),
    *(marker for form in FORMS.values() for marker in form.opens),
]


@every_form
@settings(max_examples=150, deadline=None)
@given(pieces=st.lists(st.sampled_from(PIECES) | st.text(max_size=5), max_size=25))
def test_no_text_whatever_crashes_a_reader(form: FamilyFormat, pieces: list[str]) -> None:
    text = "".join(pieces)
    read, action = parse_calls(text, TOOLS, form), parse_action(text, TOOLS, form)
    assert not (read.calls and read.error)
    assert not (action.call and action.error)
    assert isinstance(said(text, form), str)


@every_form
@pytest.mark.parametrize("cut", [1, 5, 12])
def test_a_call_that_is_cut_off_is_never_carried_out(form: FamilyFormat, cut: int) -> None:
    text = write_calls([ToolCall("python", {"code": "print(1)"})], form)
    text = text.removesuffix("<|call|>").removesuffix("<｜tool▁calls▁end｜>")[:-cut]
    read = parse_calls(text, TOOLS, form)
    assert not read.calls
    assert read.error is not None
    assert write_calls([ToolCall("python", {"code": "..."})], form) in read.error, (
        "the answer shows the model's own form"
    )


@every_form
def test_a_draft_inside_thinking_and_the_answer_behind_a_call(form: FamilyFormat) -> None:
    call = write_calls([ToolCall("python", {"code": "1"})], form)
    if form != "harmony":
        assert parse_calls(f"<think>{call}</think>42", TOOLS, form).calls == ()
        assert said(f"<think>{call}</think>42", form) == "42"
        assert said(f"Let me see.\n{call}", form).strip() == "Let me see."
    assert parse_calls("42", TOOLS, form).calls == ()
    assert parse_calls("42", TOOLS, form).error is None


@pytest.mark.parametrize(
    ("form", "text", "arguments"),
    [
        ("llama3", '<|python_tag|>{"name": "python", "parameters": {"code": "1"}}', {"code": "1"}),
        ("llama3", "<|python_tag|>print('a')\nprint('b')", {"code": "print('a')\nprint('b')"}),
        ("llama3", '<|python_tag|>python.call(code="1 + 1")', {"code": "1 + 1"}),
        ("llama3", '{"type": "function", "function": {"name": "python", "arguments": {"code": "1"}}}', {"code": "1"}),
        ("llama3", 'So I call it:\n{"name": "python", "parameters": {"code": "1"}}', {"code": "1"}),
        ("glm", "<tool_call>python\n<arg_key>code</arg_key>\n<arg_value>x = 3\n</arg_value>\n</tool_call>", {"code": "x = 3\n"}),
        ("glm", "<tool_call>python<arg_key>code</arg_key><arg_value>3</arg_value></tool_call>", {"code": "3"}),
        ("qwen3_coder", "<function=python>\n<parameter=code>\n3\n</parameter>\n</function>", {"code": "3"}),
        ("qwen3_coder", "<tool_call>\n<function=python>\n<parameter=code>\n\n3\n\n</parameter>\n</function>\n</tool_call>", {"code": "\n3\n"}),
        ("deepseek", '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>python<｜tool▁sep｜>{"code": "1"}<｜tool▁call▁end｜>', {"code": "1"}),
        ("mistral", '[TOOL_CALLS]python[ARGS]{"code": "1"}', {"code": "1"}),
        ("mistral", '[TOOL_CALLS]python[CALL_ID]a1b2[ARGS]{"code": "1"}', {"code": "1"}),
        ("mistral", '[TOOL_CALLS][{"name": "python", "arguments": {"code": "1"}, "id": "a"}]', {"code": "1"}),
        (
            "harmony",
            "<|channel|>analysis<|message|>I'll run it.<|end|><|start|>assistant<|channel|>commentary to=functions.python "
            '<|constrain|>json<|message|>{"code": "1"}',
            {"code": "1"},
        ),
        ("harmony", "<|channel|>analysis to=python code<|message|>print(1)", {"code": "print(1)"}),
        ("gemma", '<|tool_call>call:python{code:<|"|>a{b},"c"<|"|>}<tool_call|>', {"code": 'a{b},"c"'}),
    ],
)  # fmt: skip
def test_what_models_of_a_family_write_is_a_call_and_no_final_answer(
    form: FamilyFormat, text: str, arguments: dict[str, Any]
) -> None:
    parsed = parse_action(text, TOOLS, form)
    assert parsed.error is None
    assert parsed.call == ToolCall("python", arguments)


@pytest.mark.parametrize(
    ("form", "text"),
    [
        ("llama3", '{"name": "Ada", "born": 1815}'),
        ("llama3", "{1, 2} is the set"),
        ("llama3", r"\boxed{7}"),
        ("harmony", "<|channel|>final<|message|>to=functions.python is how one calls it"),
        ("harmony", "42"),
        ("mistral", "TOOL_CALLS are not needed"),
    ],
)
def test_an_answer_that_looks_like_a_call_is_an_answer(form: FamilyFormat, text: str) -> None:
    parsed = parse_action(text, TOOLS, form)
    assert parsed.call is None
    assert parsed.error is None


def test_bare_text_has_the_type_that_its_schema_says() -> None:
    kinds = tool(
        "kinds",
        text="string",
        maybe=["string", "null"],
        either={"anyOf": [{"type": "integer"}, {"type": "string"}]},
        free={},
    )
    raw = {"text": "true", "maybe": "None", "either": "3", "free": "[1]"}
    for form in ("glm", "qwen3_coder"):
        [call] = parse_calls(write_calls([ToolCall("kinds", raw)], form), [kinds], form).calls
        assert call.arguments == {"text": "true", "maybe": None, "either": 3, "free": [1]}


@every_form
@pytest.mark.parametrize(
    "unit",
    [
        "{opens}",
        "{opens}{{",
        "{call}",
        "{call}</think>",
        "<think>{call}",
        "{opens}</think>",
        '{{"name": 1}}\n',
        '{{"name":\n',
    ],
)
def test_a_hostile_text_is_read_in_linear_time(form: FamilyFormat, unit: str) -> None:
    """The readers run on the event loop of every other episode: some hundred KB must not hold it up."""
    call = write_calls([ToolCall("python", {"code": "</think>"})], form)
    piece = unit.format(opens=FORMS[form].opens[0], call=call)

    def seconds(length: int) -> float:
        text = piece * (length // len(piece))
        began = time.process_time()
        parse_calls(text, TOOLS, form)
        said(text, form)
        return time.process_time() - began

    seconds(1000)
    assert seconds(200_000) < 2.0
