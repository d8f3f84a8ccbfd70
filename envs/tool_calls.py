"""Finding the tool call in an action's text.

Two written forms: `hermes`, `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`, and `fenced`, a block of
```python. Whatever a model writes, the outcome is one of three: no call, one call, or an error that tells the model
what was wrong and how to write it. Text inside `<think>...</think>` is never a call.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

ToolFormat = Literal["hermes", "fenced"]
TOOL_FORMATS: tuple[ToolFormat, ...] = ("hermes", "fenced")

OPEN, CLOSE = "<tool_call>", "</tool_call>"
_THINK_OPEN, _THINK_CLOSE = "<think>", "</think>"
_MARKER = re.compile("|".join(map(re.escape, (OPEN, CLOSE, _THINK_OPEN, _THINK_CLOSE))))
# strict=False: models write raw line breaks inside JSON strings, and what is meant is plain.
_JSON = json.JSONDecoder(strict=False)
_TYPES: Mapping[str, tuple[type, ...]] = {
    "string": (str,),
    "integer": (int,),
    "number": (int, float),
    "boolean": (bool,),
    "array": (list,),
    "object": (dict,),
}


@dataclass(frozen=True, slots=True)
class ToolCall:
    """One well-formed call: the tool's name and its arguments, checked against the tool's schema."""

    name: str
    arguments: dict[str, Any]


@dataclass(frozen=True, slots=True)
class ParsedAction:
    """What an action's text asks for: at most one of `call` and `error` is set; neither means a final answer."""

    call: ToolCall | None = None
    error: str | None = None


def parse_action(text: str, tools: Sequence[Mapping[str, Any]], tool_format: ToolFormat = "hermes") -> ParsedAction:
    """Find the tool call in `text`. `tools` are OpenAI tool schemas. Never raises, whatever `text` holds."""
    if tool_format == "fenced":
        return _parse_fenced(text, tools)
    return _parse_hermes(text, tools)


@dataclass(frozen=True, slots=True)
class ParsedCalls:
    """All calls of one action, in order. With `error` there are none: a message is carried out whole or not at all."""

    calls: tuple[ToolCall, ...] = ()
    error: str | None = None


def parse_calls(text: str, tools: Sequence[Mapping[str, Any]]) -> ParsedCalls:
    """Find every tool call in `text`, written as `hermes`, for environments that take several in one message.

    Only the form is checked, not names and arguments: whoever owns the tools answers for those. Never raises.
    """
    found = _hermes_bodies(text, tools)
    if isinstance(found, ParsedAction):
        return ParsedCalls(error=found.error)
    calls = []
    for body in found:
        name = body.get("name") if isinstance(body, dict) else None
        arguments = body.get("arguments") if isinstance(body, dict) else None
        if not isinstance(name, str) or not isinstance(arguments, dict):
            # The message says which of the two it is.
            return ParsedCalls(
                error=_checked(body, tools).error or _malformed("no call can be read in it", tools).error
            )
        calls.append(ToolCall(name, arguments))
    return ParsedCalls(tuple(calls))


def visible_text(text: str) -> str:
    """`text` without its thinking: `<think>...</think>`, and what stands before a `</think>` the template opened."""
    parts: list[str] = []
    position = _implicit_thinking_end(text)
    while True:
        opened = text.find(_THINK_OPEN, position)
        if opened < 0:
            return "".join([*parts, text[position:]])
        parts.append(text[position:opened])
        closed = text.find(_THINK_CLOSE, opened)
        if closed < 0:
            return "".join(parts)
        position = closed + len(_THINK_CLOSE)


def _implicit_thinking_end(text: str) -> int:
    """Where the visible part begins when the prompt itself opened the thinking: after a `</think>` without `<think>`.

    A `</think>` inside the strings of a well-formed call is code, not the end of thinking.
    """
    position = 0
    while (marker := _MARKER.search(text, position)) is not None:
        if marker[0] == _THINK_OPEN:
            return 0
        if marker[0] == _THINK_CLOSE:
            return marker.end()
        call_end = _call_end(text, marker.start()) if marker[0] == OPEN else None
        # Not to be walked through: what follows a malformed call may be tried once, or a hostile text takes for ever.
        if call_end is None and marker[0] == OPEN:
            closed, opened = text.find(_THINK_CLOSE, position), text.find(_THINK_OPEN, position)
            return 0 if closed < 0 or 0 <= opened < closed else closed + len(_THINK_CLOSE)
        position = call_end or marker.end()
    return 0


def _call_end(text: str, start: int) -> int | None:
    """Where the call that opens at `start` ends (past its closing tag); None if it is no well-formed JSON call."""
    position = start + len(OPEN)
    try:
        _, end = _JSON.raw_decode(text, _skip_space(text, position))
    except (ValueError, RecursionError):
        return None
    end = _skip_space(text, end)
    return end + len(CLOSE) if text.startswith(CLOSE, end) else None


def _skip_space(text: str, position: int) -> int:
    while position < len(text) and text[position].isspace():
        position += 1
    return position


def _parse_hermes(text: str, tools: Sequence[Mapping[str, Any]]) -> ParsedAction:
    bodies = _hermes_bodies(text, tools)
    if isinstance(bodies, ParsedAction):
        return bodies
    if not bodies:
        return ParsedAction()
    if len(bodies) > 1:
        return _malformed(f"{len(bodies)} calls in one message; none was carried out. Make one call at a time", tools)
    return _checked(bodies[0], tools)


def _hermes_bodies(text: str, tools: Sequence[Mapping[str, Any]]) -> list[Any] | ParsedAction:
    """The decoded JSON of every call in `text`, or what is wrong with one of them."""
    bodies: list[Any] = []
    position = _implicit_thinking_end(text)
    while (marker := _MARKER.search(text, position)) is not None:
        start, position = marker.start(), marker.end()
        if marker[0] == _THINK_OPEN:
            end = text.find(_THINK_CLOSE, start)
            if end < 0:  # cut while thinking: whatever follows is a draft
                break
            position = end + len(_THINK_CLOSE)
            continue
        if marker[0] == _THINK_CLOSE:
            continue
        if marker[0] == CLOSE:
            return _malformed(f"{CLOSE} without {OPEN} before it", tools)
        begin = _skip_space(text, start + len(OPEN))
        try:
            body, end = _JSON.raw_decode(text, begin)
        except RecursionError:
            return _malformed("the JSON is nested too deeply", tools)
        except json.JSONDecodeError as error:
            if text.find(CLOSE, begin) < 0:
                return _malformed(f"the call is cut off: {CLOSE} is missing", tools)
            return _malformed(f"not valid JSON ({error.msg} at character {error.pos - begin})", tools)
        except ValueError as error:  # an integer of more digits than Python reads
            return _malformed(f"not valid JSON ({error})", tools)
        end = _skip_space(text, end)
        if not text.startswith(CLOSE, end):
            if text.find(CLOSE, end) < 0:
                return _malformed(f"the call is cut off: {CLOSE} is missing", tools)
            return _malformed(f"there is more than one JSON object between {OPEN} and {CLOSE}", tools)
        bodies.append(body)
        position = end + len(CLOSE)
    return bodies


def _checked(body: Any, tools: Sequence[Mapping[str, Any]]) -> ParsedAction:
    """Hold one decoded call against the schemas."""
    if not isinstance(body, dict):
        return _malformed(f"the JSON is {_json_type(body)}, not an object", tools)
    name, arguments = body.get("name"), body.get("arguments")
    schemas = {tool["function"]["name"]: tool["function"] for tool in tools}
    if not isinstance(name, str):
        return _malformed('"name" is missing' if name is None else '"name" is not a string', tools)
    if name not in schemas:
        return _malformed(f"there is no tool {_short(name)}; the tools are: {', '.join(schemas) or 'none'}", tools)
    if not isinstance(arguments, dict):
        return _malformed('"arguments" is missing' if arguments is None else '"arguments" is not an object', tools)
    parameters = schemas[name].get("parameters", {})
    properties: Mapping[str, Any] = parameters.get("properties", {})
    missing = [key for key in parameters.get("required", []) if key not in arguments]
    if missing:
        return _malformed(f"the argument {_short(missing[0])} of {name} is missing", tools)
    unknown = [key for key in arguments if key not in properties]
    if unknown:
        known = ", ".join(properties) or "none"
        return _malformed(f"{name} has no argument {_short(unknown[0])}; its arguments are: {known}", tools)
    for key, value in arguments.items():
        wanted = properties[key].get("type")
        allowed = _TYPES.get(wanted, (object,))
        if not isinstance(value, allowed) or (isinstance(value, bool) and bool not in allowed and wanted in _TYPES):
            return _malformed(f"the argument {_short(key)} of {name} is {_json_type(value)}, not {wanted}", tools)
    return ParsedAction(call=ToolCall(name, arguments))


_FENCE = re.compile(r"^ {0,3}(`{3,}|~{3,})[ \t]*([^\s`]*)[^\n`]*$")


def _parse_fenced(text: str, tools: Sequence[Mapping[str, Any]]) -> ParsedAction:
    blocks: list[str] = []
    fence, language, lines = "", "", list[str]()
    for line in visible_text(text).split("\n"):
        found = _FENCE.match(line.rstrip("\r"))
        if not fence:
            if found:
                fence, language, lines = found[1], found[2].lower(), []
        elif found and found[1].startswith(fence) and not found[2]:
            if language == "python":
                blocks.append("\n".join(lines))
            fence = ""
        else:
            lines.append(line)
    if fence and language == "python":
        return ParsedAction(error="Malformed tool call: the ```python block is cut off: its closing ``` is missing.")
    if not blocks:
        return ParsedAction()
    if len(blocks) > 1:
        return ParsedAction(
            error=f"Malformed tool call: {len(blocks)} ```python blocks in one message; none was carried out. "
            "Write one block at a time."
        )
    return _checked({"name": "python", "arguments": {"code": blocks[0]}}, tools)


def _malformed(what: str, tools: Sequence[Mapping[str, Any]]) -> ParsedAction:
    return ParsedAction(error=f"Malformed tool call: {what}. {_usage(tools)}")


def _usage(tools: Sequence[Mapping[str, Any]]) -> str:
    """How to write a call, shown with the first tool's own names."""
    if not tools:
        return "No tool is available."
    function = tools[0]["function"]
    arguments = {key: "..." for key in function.get("parameters", {}).get("required", [])}
    example = json.dumps({"name": function["name"], "arguments": arguments})
    return f"Write it as {OPEN}{example}{CLOSE}"


def _json_type(value: Any) -> str:
    if value is None:
        return "null"
    for name, types in _TYPES.items():
        if type(value) in types:
            return name
    return type(value).__name__


def _short(value: str) -> str:
    """A model's own word in an answer to it: quoted, and no longer than needed to recognise it."""
    return json.dumps(value if len(value) <= 40 else value[:40] + "...")
