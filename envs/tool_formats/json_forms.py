"""Forms whose calls are JSON: Hermes (Qwen), Llama 3, DeepSeek, Mistral."""

from __future__ import annotations

import ast
import contextlib
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from envs.tool_formats.reading import (
    Malformed,
    Reading,
    Schemas,
    Span,
    TaggedForm,
    ToolCall,
    decode_json,
    skip_space,
    visible_start,
    without_calls,
)


class Hermes(TaggedForm):
    """`<tool_call>{"name": ..., "arguments": {...}}</tool_call>`, as Qwen 2.5 and 3 and Hermes write it."""

    opens = ("<tool_call>",)
    strays = ("</tool_call>",)

    def read(self, text: str, start: int, schemas: Schemas) -> Span:
        """One call; see `TaggedForm`."""
        close = self.strays[0]
        begin = skip_space(text, start + len(self.opens[0]))
        try:
            body, end = decode_json(text, begin, cut=False)
        except Malformed as problem:
            if str(problem).startswith("not valid JSON") and text.find(close, begin) < 0:
                raise Malformed(f"the call is cut off: {close} is missing") from None
            raise
        end = skip_space(text, end)
        if not text.startswith(close, end):
            if text.find(close, end) < 0:
                raise Malformed(f"the call is cut off: {close} is missing")
            raise Malformed(f"there is more than one JSON object between {self.opens[0]} and {close}")
        return Span(start, end + len(close), (body,))

    def write(self, calls: Sequence[ToolCall]) -> str:
        """See `Form`."""
        return "\n".join(f"<tool_call>{_object(call, 'arguments')}</tool_call>" for call in calls)


class Llama3:
    """Bare JSON with `parameters` at the beginning of the text or of a line, maybe behind `<|python_tag|>`.

    Several are separated by `;` or blanks. Behind the tag there may also be `tool.call(key="...")`, or bare Python for
    a tool with that name, as Llama 3.1 is told for its built-in ones.
    """

    opens = ("<|python_tag|>", "{")
    strays: tuple[str, ...] = ()
    _START = re.compile(r'<\|python_tag\|>|(?:^|(?<=\n))[ \t]*\{\s*"(?:name|type)"\s*:')
    _BUILT_IN = re.compile(r"([A-Za-z_]\w*)\.call\(")
    _INTERPRETERS = ("python", "ipython", "code_interpreter")

    def reading(self, text: str, schemas: Schemas) -> Reading:
        """See `Form`."""
        spans: list[Span] = []
        position = visible_start(text)
        while (found := self._START.search(text, position)) is not None:
            try:
                span = self._read(text, found.start(), found[0].startswith("<"), schemas)
            except Malformed as problem:
                return Reading(error=str(problem), error_at=found.start())
            position = span.end
            if span.bodies:
                spans.append(span)
        return Reading(tuple(spans))

    def content(self, text: str, reading: Reading) -> str:
        """See `Form`."""
        return without_calls(text, reading)

    def write(self, calls: Sequence[ToolCall]) -> str:
        """See `Form`."""
        return "; ".join(_object(call, "parameters") for call in calls)

    def _read(self, text: str, start: int, tagged: bool, schemas: Schemas) -> Span:
        begin = skip_space(text, start + len(self.opens[0]) if tagged else start)
        if tagged and not text.startswith("{", begin):
            return self._code(text, start, begin, schemas)
        bodies, end = [], begin
        while text.startswith("{", begin):
            value, end = decode_json(text, begin, cut=text.find("}", begin) < 0)
            bodies.append(value)
            separator = skip_space(text, end)
            if not text.startswith(";", separator):
                break
            begin = skip_space(text, separator + 1)
        if not tagged and not all(_calls_something(body) for body in bodies):
            return Span(start, end, ())  # JSON that calls nothing: text
        return Span(start, end, tuple(_with_arguments(body) for body in bodies))

    def _code(self, text: str, start: int, begin: int, schemas: Schemas) -> Span:
        """A built-in call, or Python for the interpreter among the tools: all of the text behind the tag."""
        source = text[begin:].strip()
        name = next((name for name in self._INTERPRETERS if name in schemas), None)
        if (built_in := self._BUILT_IN.match(source)) is not None and (built_in[1] in schemas or name is None):
            arguments = _keywords(source)
            if arguments is None:
                raise Malformed(f"{built_in[1]}.call(...) takes keywords with plain values")
            return Span(start, len(text), ({"name": built_in[1], "arguments": arguments},))
        if name is None or not source:
            raise Malformed("behind <|python_tag|> there is no call that can be read")
        return Span(start, len(text), ({"name": name, "arguments": {"code": source}},))


class DeepSeek(TaggedForm):
    """DeepSeek V3, R1 and V3.1: calls between `<｜tool▁calls▁begin｜>` and `<｜tool▁calls▁end｜>`."""  # noqa: RUF002

    opens = ("<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>")  # noqa: RUF001
    strays = ("<｜tool▁call▁end｜>", "<｜tool▁calls▁end｜>")  # noqa: RUF001
    _SEPARATOR = "<｜tool▁sep｜>"  # noqa: RUF001
    _FENCED = re.compile(r"[ \t]*(\S+)[ \t]*\n```(?:json)?\s*")

    def read(self, text: str, start: int, schemas: Schemas) -> Span:
        """All calls of the run; see `TaggedForm`. The template itself leaves out the outer marker of later turns."""
        (outer, opening), (closing, outer_end) = self.opens, self.strays
        position = start + len(outer) if text.startswith(outer, start) else start
        bodies = []
        while text.startswith(opening, at := skip_space(text, position)):
            separator = text.find(self._SEPARATOR, at)
            if separator < 0:
                raise Malformed(f"the call is cut off: {self._SEPARATOR} is missing")
            name = text[at + len(opening) : separator].strip()
            begin = separator + len(self._SEPARATOR)
            fenced = self._FENCED.match(text, begin)
            if fenced is not None:  # V3 and R1: type, separator, name, fenced JSON
                name, begin = fenced[1], fenced.end()
            begin = skip_space(text, begin)
            arguments, end = decode_json(text, begin, cut=text.find(closing, begin) < 0)
            end = skip_space(text, end)
            if fenced is not None and text.startswith("```", end):
                end = skip_space(text, end + 3)
            if not text.startswith(closing, end):
                raise Malformed(f"the call is cut off: {closing} is missing")
            bodies.append({"name": name, "arguments": arguments})
            position = end + len(closing)
        if not bodies:
            raise Malformed(f"there is no call behind {outer}")
        at = skip_space(text, position)
        return Span(start, at + len(outer_end) if text.startswith(outer_end, at) else position, tuple(bodies))

    def write(self, calls: Sequence[ToolCall]) -> str:
        """See `Form`; as the template of V3 and R1 has it."""
        (outer, opening), (closing, outer_end) = self.opens, self.strays
        written = [
            f"{opening}function{self._SEPARATOR}{call.name}\n```json\n{_dumps(call.arguments)}\n```{closing}"
            for call in calls
        ]
        return outer + "\n".join(written) + outer_end


class Mistral(TaggedForm):
    """`[TOOL_CALLS]` and a list of calls, or a name and its arguments (`[ARGS]` between them in later tokenizers)."""

    opens = ("[TOOL_CALLS]",)
    _NAMED = re.compile(r"\s*([\w.\-]+)\s*(?:\[CALL_ID\]\s*[\w\-]*\s*)?(?:\[ARGS\])?\s*(?=\{)")

    def read(self, text: str, start: int, schemas: Schemas) -> Span:
        """The calls behind one marker; see `TaggedForm`."""
        begin = skip_space(text, start + len(self.opens[0]))
        named = self._NAMED.match(text, begin)
        if named is not None:
            arguments, end = decode_json(text, named.end(), cut=text.find("}", named.end()) < 0)
            return Span(start, end, ({"name": named[1], "arguments": arguments},))
        if begin == len(text):
            raise Malformed(f"the call is cut off: nothing stands behind {self.opens[0]}")
        value, end = decode_json(text, begin, cut=text.find("]", begin) < 0)
        bodies = value if isinstance(value, list) else [value]
        if not bodies:
            raise Malformed("the list of calls is empty")
        return Span(start, end, tuple(_with_arguments(body) for body in bodies))

    def write(self, calls: Sequence[ToolCall]) -> str:
        """See `Form`; as the older templates have it."""
        return "[TOOL_CALLS] [" + ", ".join(_object(call, "arguments") for call in calls) + "]"


def _dumps(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def _object(call: ToolCall, key: str) -> str:
    return json.dumps({"name": call.name, key: call.arguments})


def _calls_something(body: Any) -> bool:
    """Whether bare JSON is a call: it has a name, and something to call it with."""
    function = body.get("function") if isinstance(body, dict) else None
    body = function if isinstance(function, dict) else body
    return isinstance(body, dict) and "name" in body and ("parameters" in body or "arguments" in body)


def _with_arguments(body: Any) -> Any:
    """A body in the one form: `parameters` are `arguments`, a nested `function` is the body, JSON text is read."""
    if isinstance(body, dict) and isinstance(body.get("function"), dict):
        body = body["function"]
    if not isinstance(body, dict):
        return body
    body = {("arguments" if key == "parameters" and "arguments" not in body else key): v for key, v in body.items()}
    if isinstance(body.get("arguments"), str):
        with contextlib.suppress(ValueError, RecursionError):  # what is no JSON is told as what it is
            body["arguments"] = json.loads(body["arguments"], strict=False)
    return body


def _keywords(source: str) -> Mapping[str, Any] | None:
    """The keyword arguments of the call that `source` is, or None if it is anything else."""
    try:
        call = ast.parse(source, mode="eval").body
        if not isinstance(call, ast.Call) or call.args or any(word.arg is None for word in call.keywords):
            return None
        return {str(word.arg): ast.literal_eval(word.value) for word in call.keywords}
    except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError):
        return None
