"""Forms whose arguments have tags of their own: GLM, Qwen3-Coder, Gemma 4.

A string stands there as it is, so whether `3` is a number is said by the tool's schema only.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any

from envs.tool_formats.reading import (
    Malformed,
    Schemas,
    Span,
    TaggedForm,
    ToolCall,
    property_schema,
    skip_space,
    typed_value,
)

_NAME = re.compile(r"[\w.\-]+")
_LEVELS = 100
"""How deep values of Gemma's own notation may nest."""


class Glm(TaggedForm):
    """GLM 4.5: `<tool_call>name`, then `<arg_key>` and `<arg_value>` for each argument, `</tool_call>`."""

    opens = ("<tool_call>",)
    strays = ("</tool_call>",)
    _KEY = re.compile(r"\s*<arg_key>(.*?)</arg_key>\s*<arg_value>", re.DOTALL)
    _CLOSE = "</arg_value>"

    def read(self, text: str, start: int, schemas: Schemas) -> Span:
        """One call; see `TaggedForm`."""
        close = self.strays[0]
        named = _NAME.match(text, skip_space(text, start + len(self.opens[0])))
        if named is None:
            raise Malformed(f"behind {self.opens[0]} there is no name of a tool")
        name, position = named[0], named.end()
        arguments: dict[str, Any] = {}
        while not text.startswith(close, at := skip_space(text, position)):
            key = self._KEY.match(text, position) if text.startswith("<arg_key>", at) else None
            if key is None:
                raise _cut_or_wrong(text, at, close, "<arg_key>")
            end = self._value_end(text, key.end())
            arguments[key[1].strip()] = typed_value(
                text[key.end() : end], property_schema(schemas, name, key[1].strip())
            )
            position = end + len(self._CLOSE)
        return Span(start, at + len(close), ({"name": name, "arguments": arguments},))

    def write(self, calls: Sequence[ToolCall]) -> str:
        """See `Form`."""
        return "\n".join(
            "".join(
                [
                    f"<tool_call>{call.name}\n",
                    *(
                        f"<arg_key>{key}</arg_key>\n<arg_value>{_bare(value)}</arg_value>\n"
                        for key, value in call.arguments.items()
                    ),
                    "</tool_call>",
                ]
            )
            for call in calls
        )

    def _value_end(self, text: str, begin: int) -> int:
        """Where the value ends: at a closing tag that another argument or the end of the call follows."""
        return _end_of_value(text, begin, self._CLOSE, ("<arg_key>", self.strays[0]))


class Qwen3Coder(TaggedForm):
    """Qwen3-Coder, Qwen 3.5 and later, Nemotron 3: `<function=name>` with `<parameter=key>` in `<tool_call>`."""

    opens = ("<tool_call>", "<function=")
    strays = ("</tool_call>",)
    _FUNCTION = re.compile(r"<function=([\w.\-]+)>")
    _PARAMETER = re.compile(r"<parameter=([^<>\n]+)>\n?")
    _CLOSE = "</parameter>"

    def read(self, text: str, start: int, schemas: Schemas) -> Span:
        """One call, or those of one `<tool_call>`; see `TaggedForm`. Models at times leave the outer tag out."""
        outer, close = self.opens[0], self.strays[0]
        wrapped = text.startswith(outer, start)
        position = skip_space(text, start + len(outer)) if wrapped else start
        bodies = []
        while (function := self._FUNCTION.match(text, position)) is not None:
            arguments, position = self._arguments(text, function.end(), function[1], schemas)
            bodies.append({"name": function[1], "arguments": arguments})
            position = skip_space(text, position) if wrapped else position
        if not bodies:
            raise _cut_or_wrong(text, position, close, "<function=name>")
        if wrapped and not text.startswith(close, position):
            raise _cut_or_wrong(text, position, close, close)
        if not wrapped and text.startswith(close, at := skip_space(text, position)):
            position = at + len(close)
        return Span(start, position + len(close) if wrapped else position, tuple(bodies))

    def write(self, calls: Sequence[ToolCall]) -> str:
        """See `Form`."""
        return "\n".join(
            f"<tool_call>\n<function={call.name}>\n"
            + "".join(f"<parameter={key}>\n{_bare(value)}\n</parameter>\n" for key, value in call.arguments.items())
            + "</function>\n</tool_call>"
            for call in calls
        )

    def _arguments(self, text: str, position: int, name: str, schemas: Schemas) -> tuple[dict[str, Any], int]:
        end_of_function = "</function>"
        arguments: dict[str, Any] = {}
        while not text.startswith(end_of_function, at := skip_space(text, position)):
            key = self._PARAMETER.match(text, at)
            if key is None:
                raise _cut_or_wrong(text, at, end_of_function, "<parameter=name>")
            end = _end_of_value(text, key.end(), self._CLOSE, ("<parameter=", end_of_function))
            raw = text[key.end() : end].removesuffix("\n")
            arguments[key[1]] = typed_value(raw, property_schema(schemas, name, key[1]))
            position = end + len(self._CLOSE)
        return arguments, at + len(end_of_function)


class Gemma(TaggedForm):
    """Gemma 4: `<|tool_call>call:name{key:value,...}<tool_call|>`, strings between `<|"|>`."""

    opens = ("<|tool_call>",)
    strays = ("<tool_call|>",)
    _QUOTE = '<|"|>'
    _KEY = re.compile(r"\s*([^\s:{}\[\],<]+)\s*:")
    _NUMBER = re.compile(r"-?\d+(?:\.\d+)?(?:[eE][+-]?\d+)?")
    _WORD = re.compile(r"true|false|null|True|False|None")
    _CALL = re.compile(r"\s*call:([\w.\-]+)\s*(?=\{)")

    def read(self, text: str, start: int, schemas: Schemas) -> Span:
        """One call; see `TaggedForm`."""
        close = self.strays[0]
        head = self._CALL.match(text, start + len(self.opens[0]))
        if head is None:
            raise Malformed(f"behind {self.opens[0]} there is no call:name{{...}}")
        arguments, end = self._value(text, head.end(), 0)
        end = skip_space(text, end)
        if not text.startswith(close, end):
            raise Malformed(f"the call is cut off: {close} is missing")
        return Span(start, end + len(close), ({"name": head[1], "arguments": arguments},))

    def write(self, calls: Sequence[ToolCall]) -> str:
        """See `Form`."""
        return "".join(f"<|tool_call>call:{call.name}{self._written(call.arguments)}<tool_call|>" for call in calls)

    def _value(self, text: str, begin: int, level: int) -> tuple[Any, int]:
        if level > _LEVELS:
            raise Malformed("its arguments are nested too deeply")
        if text.startswith(self._QUOTE, begin):
            begin += len(self._QUOTE)
            end = text.find(self._QUOTE, begin)
            if end < 0:
                raise Malformed(f"the call is cut off: {self._QUOTE} is missing")
            return text[begin:end], end + len(self._QUOTE)
        if text[begin : begin + 1] in ("{", "["):
            return self._several(text, begin, level)
        if (word := self._WORD.match(text, begin)) is not None:
            return typed_value(word[0], None), word.end()
        if (number := self._NUMBER.match(text, begin)) is not None:
            try:
                return json.loads(number[0]), number.end()
            except ValueError as error:  # leading zeros, or more digits than Python reads
                raise Malformed(f"not a number ({error})") from None
        raise Malformed(f"an argument is neither a value nor a text between {self._QUOTE}")

    def _several(self, text: str, begin: int, level: int) -> tuple[Any, int]:
        """The object or list that opens at `begin`."""
        keyed = text[begin] == "{"
        close, keys, values, position = "}" if keyed else "]", list[str](), list[Any](), begin + 1
        while not text.startswith(close, at := skip_space(text, position)):
            if values:
                if not text.startswith(",", at):
                    raise Malformed(f"the call is cut off, or a comma or {close} is missing")
                at = skip_space(text, at + 1)
            if keyed:
                key, at = self._key(text, at)
                keys.append(key)
                at = skip_space(text, at)
            value, position = self._value(text, at, level + 1)
            values.append(value)
        return dict(zip(keys, values, strict=True)) if keyed else values, at + 1

    def _key(self, text: str, begin: int) -> tuple[str, int]:
        if text.startswith(self._QUOTE, begin):
            key, end = self._value(text, begin, 0)
            if text.startswith(":", at := skip_space(text, end)):
                return key, at + 1
        elif (key_found := self._KEY.match(text, begin)) is not None:
            return key_found[1], key_found.end()
        raise Malformed("an argument has no name")

    def _written(self, value: Any) -> str:
        if isinstance(value, dict):
            return "{" + ",".join(f"{key}:{self._written(item)}" for key, item in value.items()) + "}"
        if isinstance(value, list | tuple):
            return "[" + ",".join(self._written(item) for item in value) + "]"
        return f"{self._QUOTE}{value}{self._QUOTE}" if isinstance(value, str) else json.dumps(value)


def _bare(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _end_of_value(text: str, begin: int, close: str, followed_by: tuple[str, ...]) -> int:
    """The first `close` from `begin` on that one of `followed_by` follows, blanks aside. Raises `Malformed`."""
    end = text.find(close, begin)
    while end >= 0:
        after = skip_space(text, end + len(close))
        if text.startswith(followed_by, after):
            return end
        end = text.find(close, after)
    raise Malformed(f"the call is cut off: {close} is missing")


def _cut_or_wrong(text: str, at: int, close: str, wanted: str) -> Malformed:
    if text.find(close, at) < 0:
        return Malformed(f"the call is cut off: {close} is missing")
    return Malformed(f"{wanted} is missing")
