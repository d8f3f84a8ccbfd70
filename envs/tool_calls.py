"""Finding the tool calls in an action's text, in whichever form the model's family writes them.

Whatever a model writes, the outcome is one of three: no call, calls, or an error that tells the model what was wrong
and how to write it. Text inside `<think>...</think>` is never a call. The forms are in `envs.tool_formats`; `fenced` is
none of a family's: a block of ```python, for models that call no tools.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

from envs.tool_formats.fenced import fenced_code
from envs.tool_formats.harmony import Harmony
from envs.tool_formats.json_forms import DeepSeek, Hermes, Llama3, Mistral
from envs.tool_formats.reading import THINK_CLOSE, THINK_OPEN, Form, Malformed, Schemas, ToolCall
from envs.tool_formats.tagged_forms import Gemma, Glm, Qwen3Coder

FamilyFormat = Literal["hermes", "qwen3_coder", "glm", "deepseek", "mistral", "harmony", "gemma", "llama3"]
"""The forms in which model families write calls."""
ToolFormat = Literal[FamilyFormat, "fenced"]
FAMILY_FORMATS: tuple[FamilyFormat, ...] = get_args(FamilyFormat)
TOOL_FORMATS: tuple[ToolFormat, ...] = (*FAMILY_FORMATS, "fenced")

_HERMES = Hermes()
FORMS: Mapping[FamilyFormat, Form] = {
    "hermes": _HERMES,
    "qwen3_coder": Qwen3Coder(),
    "glm": Glm(),
    "deepseek": DeepSeek(),
    "mistral": Mistral(),
    "harmony": Harmony(),
    "gemma": Gemma(),
    "llama3": Llama3(),
}
"""The reader and writer of each form."""

_TYPES: Mapping[str, tuple[type, ...]] = {
    "string": (str,),
    "integer": (int,),
    "number": (int, float),
    "boolean": (bool,),
    "array": (list,),
    "object": (dict,),
}


@dataclass(frozen=True, slots=True)
class ParsedAction:
    """What an action's text asks for: at most one of `call` and `error` is set; neither means a final answer."""

    call: ToolCall | None = None
    error: str | None = None


@dataclass(frozen=True, slots=True)
class ParsedCalls:
    """All calls of one action, in order. With `error` there are none: a message is carried out whole or not at all.

    `content`: what the text says beside its calls, thinking included.
    """

    calls: tuple[ToolCall, ...] = ()
    error: str | None = None
    content: str = ""


def parse_action(text: str, tools: Sequence[Mapping[str, Any]], tool_format: ToolFormat = "hermes") -> ParsedAction:
    """Find the tool call in `text`. `tools` are OpenAI tool schemas. Never raises, whatever `text` holds."""
    if tool_format == "fenced":
        return _parse_fenced(text, tools)
    reading = FORMS[tool_format].reading(text, _schemas(tools))
    if reading.error is not None:
        return _malformed(reading.error, tools, tool_format)
    bodies = reading.bodies
    if not bodies:
        return ParsedAction()
    if len(bodies) > 1:
        many = f"{len(bodies)} calls in one message; none was carried out. Make one call at a time"
        return _malformed(many, tools, tool_format)
    return _checked(bodies[0], tools, tool_format)


def parse_calls(text: str, tools: Sequence[Mapping[str, Any]], tool_format: ToolFormat = "hermes") -> ParsedCalls:
    """Find every tool call in `text`, for environments that take several in one message.

    Only the form is checked, not names and arguments: whoever owns the tools answers for those. Never raises.
    """
    if tool_format == "fenced":
        action = _parse_fenced(text, tools)
        return ParsedCalls(() if action.call is None else (action.call,), action.error, text)
    form = FORMS[tool_format]
    reading = form.reading(text, _schemas(tools))
    if reading.error is not None:
        return ParsedCalls(error=_malformed(reading.error, tools, tool_format).error, content=text)
    calls = []
    for body in reading.bodies:
        name = body.get("name") if isinstance(body, dict) else None
        arguments = body.get("arguments") if isinstance(body, dict) else None
        if not isinstance(name, str) or not isinstance(arguments, dict):
            # The message says which of the two it is.
            error = _checked(body, tools, tool_format).error
            error = error or _malformed("no call can be read in it", tools, tool_format).error
            return ParsedCalls(error=error, content=text)
        calls.append(ToolCall(name, arguments))
    return ParsedCalls(tuple(calls), content=form.content(text, reading))


def parse_sound_calls(
    text: str, tools: Sequence[Mapping[str, Any]], tool_format: FamilyFormat = "hermes"
) -> ParsedCalls:
    """As `parse_calls`, and each call is held against its tool's schema: one that is wrong makes all of it an error."""
    read = parse_calls(text, tools, tool_format)
    for call in read.calls:
        error = _checked({"name": call.name, "arguments": call.arguments}, tools, tool_format).error
        if error is not None:
            return ParsedCalls(error=error, content=text)
    return read


def write_calls(calls: Sequence[ToolCall], tool_format: FamilyFormat = "hermes") -> str:
    """`calls` as a model of the family writes them, for demonstrations; `parse_calls` reads them back."""
    return FORMS[tool_format].write(calls)


def visible_text(text: str) -> str:
    """`text` without its thinking: `<think>...</think>`, and what stands before a `</think>` the template opened."""
    parts: list[str] = []
    position = _HERMES.implicit_thinking_end(text, {})
    while True:
        opened = text.find(THINK_OPEN, position)
        if opened < 0:
            return "".join([*parts, text[position:]])
        parts.append(text[position:opened])
        closed = text.find(THINK_CLOSE, opened)
        if closed < 0:
            return "".join(parts)
        position = closed + len(THINK_CLOSE)


def _checked(body: Any, tools: Sequence[Mapping[str, Any]], tool_format: FamilyFormat) -> ParsedAction:
    """Hold one decoded call against the schemas."""
    wrong = functools.partial(_malformed, tools=tools, tool_format=tool_format)
    if not isinstance(body, dict):
        return wrong(f"the JSON is {_json_type(body)}, not an object")
    name, arguments = body.get("name"), body.get("arguments")
    schemas = _schemas(tools)
    if not isinstance(name, str):
        return wrong('"name" is missing' if name is None else '"name" is not a string')
    if name not in schemas:
        return wrong(f"there is no tool {_short(name)}; the tools are: {', '.join(schemas) or 'none'}")
    if not isinstance(arguments, dict):
        return wrong('"arguments" is missing' if arguments is None else '"arguments" is not an object')
    parameters = schemas[name].get("parameters", {})
    properties: Mapping[str, Any] = parameters.get("properties", {})
    missing = [key for key in parameters.get("required", []) if key not in arguments]
    if missing:
        return wrong(f"the argument {_short(missing[0])} of {name} is missing")
    unknown = [key for key in arguments if key not in properties]
    if unknown:
        known = ", ".join(properties) or "none"
        return wrong(f"{name} has no argument {_short(unknown[0])}; its arguments are: {known}")
    for key, value in arguments.items():
        wanted = properties[key].get("type")
        allowed = _TYPES.get(wanted, (object,))
        if not isinstance(value, allowed) or (isinstance(value, bool) and bool not in allowed and wanted in _TYPES):
            return wrong(f"the argument {_short(key)} of {name} is {_json_type(value)}, not {wanted}")
    return ParsedAction(call=ToolCall(name, arguments))


def _parse_fenced(text: str, tools: Sequence[Mapping[str, Any]]) -> ParsedAction:
    try:
        blocks = fenced_code(visible_text(text))
    except Malformed as problem:
        return ParsedAction(error=f"Malformed tool call: {problem}.")
    if not blocks:
        return ParsedAction()
    if len(blocks) > 1:
        return ParsedAction(
            error=f"Malformed tool call: {len(blocks)} ```python blocks in one message; none was carried out. "
            "Write one block at a time."
        )
    return _checked({"name": "python", "arguments": {"code": blocks[0]}}, tools, "hermes")


def _schemas(tools: Sequence[Mapping[str, Any]]) -> Schemas:
    return {tool["function"]["name"]: tool["function"] for tool in tools}


def _malformed(what: str, tools: Sequence[Mapping[str, Any]], tool_format: FamilyFormat) -> ParsedAction:
    return ParsedAction(error=f"Malformed tool call: {what}. {_usage(tools, tool_format)}")


def _usage(tools: Sequence[Mapping[str, Any]], tool_format: FamilyFormat) -> str:
    """How to write a call, shown with the first tool's own names."""
    if not tools:
        return "No tool is available."
    function = tools[0]["function"]
    arguments = {key: "..." for key in function.get("parameters", {}).get("required", [])}
    return f"Write it as {write_calls([ToolCall(function['name'], arguments)], tool_format)}"


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
