"""Parsing tool calls: the text is a model's, so anything may be in it."""

from __future__ import annotations

import json
import textwrap
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from envs.python_tir.env import PYTHON_TOOL
from envs.tool_calls import TOOL_FORMATS, ToolCall, parse_action, visible_text

TOOLS = [PYTHON_TOOL]


def hermes(code: str) -> str:
    return f"<tool_call>{json.dumps({'name': 'python', 'arguments': {'code': code}})}</tool_call>"


def call_of(text: str, tool_format: str = "hermes") -> ToolCall | None:
    parsed = parse_action(text, TOOLS, tool_format)  # type: ignore[arg-type]
    assert parsed.error is None, parsed.error
    return parsed.call


def error_of(text: str, tool_format: str = "hermes") -> str:
    parsed = parse_action(text, TOOLS, tool_format)  # type: ignore[arg-type]
    assert parsed.call is None
    assert parsed.error is not None
    return parsed.error


@given(st.text(), st.text(alphabet="abc \n."))
def test_case_e3_code_reaches_the_tool_unchanged(code: str, prose: str) -> None:
    """Case E3: NUL bytes, triple quotes, indentation, and the very tags that delimit a call."""
    call = call_of(f"{prose}{hermes(code)}")
    assert call is not None
    assert call.arguments == {"code": code}


@pytest.mark.parametrize(
    "code",
    ['print("</tool_call>")', "x = '''<tool_call>'''", "'</think>'", "'<think>'", "a\x00b", "if 1:\n    '''x'''"],
)
def test_case_b9_markers_inside_code_are_code(code: str) -> None:
    """Case B9: text that looks like a marker does not become one inside a call's strings."""
    call = call_of("Let me see. " + hermes(code))
    assert call is not None
    assert call.arguments["code"] == code


MARKERS = ["<tool_call>", "</tool_call>", "<think>", "</think>", "```python", "```", "\n", "{", "}", '"name"', "\ud800"]


@given(st.lists(st.one_of(st.sampled_from([*MARKERS, hermes("1"), '{"name": "python"', "[" * 5000]), st.text())))
@pytest.mark.parametrize("tool_format", TOOL_FORMATS)
def test_no_text_whatever_crashes_the_parser(tool_format: str, pieces: list[str]) -> None:
    parsed = parse_action("".join(pieces), TOOLS, tool_format)  # type: ignore[arg-type]
    assert parsed.call is None or parsed.error is None
    if parsed.call is not None:
        assert set(parsed.call.arguments) == {"code"}
        assert isinstance(parsed.call.arguments["code"], str)


@given(st.text(), st.integers(min_value=1, max_value=200))
def test_case_b6_a_call_that_is_cut_off_is_answered_and_not_run(code: str, cut: int) -> None:
    """Case B6: an action cut inside a tool call. However short the piece after the opening tag, it is no answer."""
    text = hermes(code)
    cut = max(len("<tool_call>"), len(text) - cut)
    assert "cut off" in error_of(text[:cut]) or cut == len(text)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("<tool_call>{not json}</tool_call>", "not valid JSON"),
        ("<tool_call></tool_call>", "not valid JSON"),
        ("<tool_call>" + "[" * 100_000 + "</tool_call>", "deeply"),
        ('<tool_call>{"name": "python", "arguments": {"code": ' + "9" * 10_000 + "}}</tool_call>", "not valid JSON"),
        ("<tool_call>[1]</tool_call>", "array, not an object"),
        ("<tool_call>null</tool_call>", "null, not an object"),
        ('<tool_call>{"arguments": {"code": "1"}}</tool_call>', '"name" is missing'),
        ('<tool_call>{"name": 3, "arguments": {}}</tool_call>', '"name" is not a string'),
        ('<tool_call>{"name": "bash", "arguments": {"code": "1"}}</tool_call>', "the tools are: python"),
        ('<tool_call>{"name": "python"}</tool_call>', '"arguments" is missing'),
        ('<tool_call>{"name": "python", "arguments": "1"}</tool_call>', '"arguments" is not an object'),
        ('<tool_call>{"name": "python", "arguments": {}}</tool_call>', '"code" of python is missing'),
        ('<tool_call>{"name": "python", "arguments": {"code": "1", "x": 2}}</tool_call>', "its arguments are: code"),
        ('<tool_call>{"name": "python", "arguments": {"code": 1}}</tool_call>', "is integer, not string"),
        ('<tool_call>{"name": "python", "arguments": {"code": null}}</tool_call>', "is null, not string"),
        ('<tool_call>{"name": "python", "arguments": {"code": "1"}} {}</tool_call>', "more than one JSON object"),
        (hermes("1") + hermes("2"), "one call at a time"),
        (hermes("1") + "<tool_call>{", "cut off"),
        ("</tool_call>", "without <tool_call>"),
    ],
)
def test_a_malformed_call_is_told_what_was_wrong_and_how_to_write_it(text: str, says: str) -> None:
    error = error_of(text)
    assert says.lower() in error.lower()
    assert '<tool_call>{"name": "python", "arguments": {"code": "..."}}</tool_call>' in error


def test_a_models_own_long_word_does_not_flood_the_answer() -> None:
    assert len(error_of(json.dumps({"name": "x" * 10**6}).join(["<tool_call>", "</tool_call>"]))) < 400


@pytest.mark.parametrize(
    "thinking",
    [
        "<think>" + hermes("draft") + "</think>",
        hermes("draft") + "</think>",  # the template itself opened the thinking
        "<think>\n<tool_call>{</think>",
        "<tool_call>{ maybe</think>",
    ],
)
def test_a_draft_inside_thinking_is_no_call(thinking: str) -> None:
    assert call_of(thinking + "It is \\boxed{4}.") is None
    call = call_of(thinking + hermes("real"))
    assert call is not None
    assert call.arguments["code"] == "real"


def test_thinking_that_was_cut_holds_no_call() -> None:
    assert call_of("<think>" + hermes("draft")) is None


def test_an_action_of_only_a_closing_think_tag_is_an_answer() -> None:
    """Case B2, the parser's side of it."""
    assert parse_action("</think>", TOOLS).call is None
    assert parse_action("</think>", TOOLS).error is None


def test_raw_line_breaks_inside_the_json_string_are_accepted() -> None:
    call = call_of('<tool_call>{"name": "python", "arguments": {"code": "a = 1\n\tprint(a)"}}</tool_call>')
    assert call is not None
    assert call.arguments["code"] == "a = 1\n\tprint(a)"


@given(st.text(alphabet="ab \n\t'\"\\{}\x00é😀"))
def test_fenced_code_reaches_the_tool_unchanged(code: str) -> None:
    call = call_of(f"First:\n```python\n{code}\n```\nthen.", "fenced")
    assert call is not None
    assert call.arguments["code"] == code


@pytest.mark.parametrize(
    ("text", "says"),
    [("```python\nprint(1)", "cut off"), ("```python\n1\n```\n```python\n2\n```", "one block at a time")],
)
def test_fenced_malformed_calls_are_answered(text: str, says: str) -> None:
    assert says in error_of(text, "fenced")


@pytest.mark.parametrize(
    "text",
    [
        "```text\nx\n```",
        "```\nx\n```",
        "````md\n```python\n1\n```\n````",
        "<think>\n```python\n1\n```\n</think>x",
        "`python`",
    ],
)
def test_other_blocks_are_no_fenced_calls(text: str) -> None:
    assert call_of(text, "fenced") is None


def test_a_longer_fence_may_hold_a_shorter_one() -> None:
    call = call_of("````python\ns = '''\n```\n'''\n````", "fenced")
    assert call is not None
    assert call.arguments["code"] == "s = '''\n```\n'''"


@pytest.mark.parametrize("deeper", ["", "  "])
@pytest.mark.parametrize("indent", [" ", "   ", "    ", "        ", "\t"])
def test_a_fence_that_is_indented_gives_its_code_without_the_indent(indent: str, deeper: str) -> None:
    """Case J7: in a list, say; the code may stand deeper than its fence, and blank lines need no blanks."""
    code = ["if True:", "    x = '''", "", "\t     ```", "    '''", "    print(x)"]
    body = "\n".join(f"{indent}{deeper}{line}" if line else "" for line in code)
    call = call_of(f"1. First:\n{indent}```python\n{body}\n{indent}```\n2. Then.", "fenced")
    assert call is not None
    assert call.arguments["code"] == "\n".join(code)


@given(st.text(alphabet="ab ('\"\n"), st.sampled_from(["  ", "   ", "\t"]))
def test_the_indent_of_a_fence_is_taken_off_and_nothing_else(code: str, indent: str) -> None:
    """Case J7, for any code that Python could read: its first line is not indented."""
    code = "x = 1\n" + code
    call = call_of(textwrap.indent(f"```python\n{code}\n```", indent, lambda line: True), "fenced")
    assert call is not None
    assert call.arguments["code"] == code


@pytest.mark.parametrize(
    "word",
    ["py", "Python", "PY", "python3", "py3", "ipython", "{python}", "{.python .x}", "python:a.py", 'py title="a"'],
)
def test_python_has_many_names(word: str) -> None:
    """Case J7: the language as models write it."""
    for space in ("", " "):
        call = call_of(f"```{space}{word}\nprint(1)\n```", "fenced")
        assert call is not None
        assert call.arguments["code"] == "print(1)"


@pytest.mark.parametrize("word", ["pycon", "pytb", "sh", "json", "output", "pyproject", "cpp"])
def test_a_name_that_begins_like_python_is_another(word: str) -> None:
    assert call_of(f"```{word}\nprint(1)\n```", "fenced") is None


@given(st.text(alphabet="ab\n"), st.text(alphabet="cd"))
def test_visible_text_keeps_everything_but_the_thinking(thought: str, rest: str) -> None:
    assert visible_text(f"<think>{thought}</think>{rest}") == rest
    assert visible_text(f"{thought}</think>{rest}") == rest
    assert visible_text(rest) == rest


@pytest.mark.parametrize("tool_format", TOOL_FORMATS)
@pytest.mark.parametrize(
    "text",
    [
        '<tool_call>{"a":"</think>"}</tool_call>' * 20_000,
        "<think>x</think>" * 50_000,
        "<tool_call>" * 50_000,
        "</think>" * 50_000,
        '<tool_call>{"a":"' + "</think>" * 50_000,
        "<tool_call>{" * 20_000 + "</think>" * 20_000,
        ("<think>" * 20_000 + "</think>" * 20_000),
        "```python\n" * 50_000,
        "`" * 400_000,
        " " * 400_000,
    ],
    ids=range(10),
)
def test_a_hostile_text_is_parsed_in_linear_time(tool_format: str, text: str) -> None:
    """The parser runs on the event loop of every other episode: half a megabyte must not hold it up."""
    start = time.process_time()
    parse_action(text, TOOLS, tool_format)  # type: ignore[arg-type]
    assert time.process_time() - start < 1.0
