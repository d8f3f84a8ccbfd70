"""What every written form of tool calls shares: calls, where they stand in a text, and what thinking is.

A form reads one run of calls from where its opening marker stands; the rest (thinking, several runs, markers that
close nothing) is the same for all and is done here, once through the text.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

THINK_OPEN, THINK_CLOSE = "<think>", "</think>"
# strict=False: models write raw line breaks inside JSON strings, and what is meant is plain.
_JSON = json.JSONDecoder(strict=False)

Schemas = Mapping[str, Mapping[str, Any]]
"""The `function` of each tool's OpenAI schema, by the tool's name."""


@dataclass(frozen=True, slots=True)
class ToolCall:
    """One well-formed call: the tool's name and its arguments."""

    name: str
    arguments: dict[str, Any]


class Malformed(Exception):
    """What is wrong with a call, in words for the model."""


@dataclass(frozen=True, slots=True)
class Span:
    """A run of calls at [start, end) of a text. `bodies`: each call's decoded body, as it was written.

    A body is sound when it is an object with a string `name` and an object `arguments`; others are told to the model.
    """

    start: int
    end: int
    bodies: tuple[Any, ...]


@dataclass(frozen=True, slots=True)
class Reading:
    """What a text holds. With `error` no call counts, and `error_at` is where the broken one begins."""

    spans: tuple[Span, ...] = ()
    error: str | None = None
    error_at: int = 0

    @property
    def bodies(self) -> list[Any]:
        """The bodies of all calls, in order."""
        return [body for span in self.spans for body in span.bodies]


class Form(Protocol):
    """One written form. `opens`: what may begin a call. `strays`: closing markers that are an error without one."""

    @property
    def opens(self) -> tuple[str, ...]: ...

    @property
    def strays(self) -> tuple[str, ...]: ...

    def reading(self, text: str, schemas: Schemas) -> Reading:
        """All calls of `text`. Never raises."""
        ...

    def content(self, text: str, reading: Reading) -> str:
        """What `text` says beside the calls that were read."""
        ...

    def write(self, calls: Sequence[ToolCall]) -> str:
        """The calls as a model of the family writes them."""
        ...


class TaggedForm:
    """A form whose calls begin with a marker of their own. Forms override `read` and `write`.

    `opens`, `strays`: see `Form`. Text inside `<think>...</think>` is no call, nor is what stands before a lone
    `</think>`: there the prompt opened the thinking.
    """

    opens: tuple[str, ...] = ()
    strays: tuple[str, ...] = ()

    def read(self, text: str, start: int, schemas: Schemas) -> Span:
        """The calls whose opening marker is at `start`. Raises `Malformed`."""
        raise NotImplementedError

    def write(self, calls: Sequence[ToolCall]) -> str:
        """See `Form`."""
        raise NotImplementedError

    def reading(self, text: str, schemas: Schemas) -> Reading:
        """See `Form`."""
        markers = _markers((*self.opens, *self.strays, THINK_OPEN, THINK_CLOSE))
        spans: list[Span] = []
        position = self.implicit_thinking_end(text, schemas)
        while (marker := markers.search(text, position)) is not None:
            start, position = marker.start(), marker.end()
            if marker[0] == THINK_OPEN:
                end = text.find(THINK_CLOSE, start)
                if end < 0:  # cut while thinking: whatever follows is a draft
                    break
                position = end + len(THINK_CLOSE)
            elif marker[0] in self.strays:
                return Reading(error=f"{marker[0]} without {self.opens[0]} before it", error_at=start)
            elif marker[0] != THINK_CLOSE:
                try:
                    span = self.read(text, start, schemas)
                except Malformed as problem:
                    return Reading(error=str(problem), error_at=start)
                spans.append(span)
                position = span.end
        return Reading(tuple(spans))

    def content(self, text: str, reading: Reading) -> str:
        """See `Form`."""
        return without_calls(text, reading)

    def implicit_thinking_end(self, text: str, schemas: Schemas) -> int:
        """Where the visible part begins if the prompt opened the thinking: after a `</think>` without `<think>`.

        A `</think>` inside a well-formed call is an argument's, not the end of thinking.
        """
        if THINK_CLOSE not in text:
            return 0
        markers, position = _markers((*self.opens, THINK_OPEN, THINK_CLOSE)), 0
        while (marker := markers.search(text, position)) is not None:
            if marker[0] == THINK_OPEN:
                return 0
            if marker[0] == THINK_CLOSE:
                return marker.end()
            try:
                position = self.read(text, marker.start(), schemas).end
            except Malformed:
                # Not to be walked through: what follows a malformed call may be tried once, or a hostile text takes
                # for ever.
                closed, opened = text.find(THINK_CLOSE, position), text.find(THINK_OPEN, position)
                return 0 if closed < 0 or 0 <= opened < closed else closed + len(THINK_CLOSE)
        return 0


def _markers(words: tuple[str, ...]) -> re.Pattern[str]:
    return re.compile("|".join(map(re.escape, words)))


def without_calls(text: str, reading: Reading) -> str:
    """`text` without the calls that were read; blanks alone between or behind calls are nothing said."""
    if not reading.spans:
        return text
    first, *others = reading.spans
    parts, position = [text[: first.start]], first.end
    for span in others:
        parts.append(text[position : span.start])
        position = span.end
    parts.append(text[position:])
    return parts[0] + "".join(part for part in parts[1:] if part.strip())


def visible_start(text: str) -> int:
    """Where thinking ends that stands at the beginning of `text`; the length of `text` if it never ends."""
    opened = skip_space(text, 0)
    if text.startswith(THINK_OPEN, opened):
        closed = text.find(THINK_CLOSE, opened)
        return len(text) if closed < 0 else closed + len(THINK_CLOSE)
    return 0


def skip_space(text: str, position: int) -> int:
    """The first position from `position` on that is no blank."""
    while position < len(text) and text[position].isspace():
        position += 1
    return position


def decode_json(text: str, begin: int, *, cut: bool) -> tuple[Any, int]:
    """The JSON value at `begin` and where it ends. Raises `Malformed`; `cut`: the text ends before it should."""
    try:
        return _JSON.raw_decode(text, begin)
    except RecursionError:
        raise Malformed("the JSON is nested too deeply") from None
    except json.JSONDecodeError as error:
        if cut:
            raise Malformed("the call is cut off: its JSON does not end") from None
        raise Malformed(f"not valid JSON ({error.msg} at character {error.pos - begin})") from None
    except ValueError as error:  # an integer of more digits than Python reads
        raise Malformed(f"not valid JSON ({error})") from None


def typed_value(raw: str, schema: Any) -> Any:
    """An argument that was written as bare text, by the type that its schema names.

    A string is taken as it is written; anything else is read as JSON (or as Python writes `True`, `False`, `None`), and
    stays text where it is neither, so that the check against the schema can tell the model.
    """
    wanted = _types(schema)
    if wanted == {"string"}:
        return raw
    word = raw.strip()
    if word in _WORDS and not ("string" in wanted and _WORD_TYPES[word] not in wanted):
        return _WORDS[word]
    if "string" in wanted and not wanted & {"integer", "number", "array", "object"}:
        return raw
    try:
        value, end = _JSON.raw_decode(word)
    except (ValueError, RecursionError):
        return raw
    if end != len(word) or (isinstance(value, str) and "string" in wanted):
        return raw
    return value


_WORDS = {"true": True, "false": False, "null": None, "True": True, "False": False, "None": None}
_WORD_TYPES = {word: "null" if value is None else "boolean" for word, value in _WORDS.items()}


def _types(schema: Any) -> set[str]:
    """The JSON types that `schema` allows; none where it does not say."""
    if not isinstance(schema, Mapping):
        return set()
    given = schema.get("type")
    if isinstance(given, str):
        return {given}
    if isinstance(given, Sequence):
        return {name for name in given if isinstance(name, str)}
    several = schema.get("anyOf") or schema.get("oneOf")
    if isinstance(several, Sequence) and several:
        each = [_types(one) for one in several]
        return set().union(*each) if all(each) else set()
    values = schema.get("enum")
    if isinstance(values, Sequence) and values and all(isinstance(value, str) for value in values):
        return {"string"}
    return set()


def property_schema(schemas: Schemas, name: str, key: str) -> Any:
    """The schema of the argument `key` of the tool `name`, or None."""
    parameters = schemas.get(name, {}).get("parameters")
    properties = parameters.get("properties") if isinstance(parameters, Mapping) else None
    return properties.get(key) if isinstance(properties, Mapping) else None
