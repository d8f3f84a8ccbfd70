"""Harmony, gpt-oss's form: a turn of several messages, each with a channel, some of them to a tool.

<|channel|>analysis<|message|>...<|end|><|start|>assistant<|channel|>commentary to=functions.python <|constrain|>json
<|message|>{"code": "1"}<|call|>
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from envs.tool_formats.reading import Malformed, Reading, Schemas, Span, ToolCall, decode_json, skip_space

_MESSAGE = "<|message|>"
_ENDS = re.compile(r"<\|(?:end|call|return|start)\|>")
_RECIPIENT = re.compile(r"(?:^|\s|>)to=([^\s<]+)")
_CHANNEL = re.compile(r"<\|channel\|>\s*(\w+)")


@dataclass(frozen=True, slots=True)
class _Part:
    """One message of the turn: its header and body, and where body and message begin and end."""

    start: int
    header: str
    body: int
    end: int
    after: int
    ended_by: str

    @property
    def recipient(self) -> str:
        found = _RECIPIENT.search(self.header)
        return found[1] if found else ""

    @property
    def channel(self) -> str:
        found = _CHANNEL.search(self.header)
        return found[1] if found else ""


class Harmony:
    """Calls are messages to `functions.name`, or to a tool by its name; `content` is what the `final` channel says."""

    opens = ("<|channel|>", "<|start|>", "<|constrain|>", _MESSAGE, " to=", "to=")
    strays: tuple[str, ...] = ()

    def reading(self, text: str, schemas: Schemas) -> Reading:
        """See `envs.tool_formats.reading.Form`."""
        spans = []
        for part in _parts(text):
            name = part.recipient.removeprefix("functions.")
            if not name or name in ("user", "assistant") or (part.channel == "analysis" and name not in schemas):
                continue
            try:
                arguments = self._arguments(text, part, name, schemas)
            except Malformed as problem:
                return Reading(error=str(problem), error_at=part.start)
            spans.append(Span(part.start, part.after, ({"name": name, "arguments": arguments},)))
        return Reading(tuple(spans))

    def content(self, text: str, reading: Reading) -> str:
        """What is said to the user: of a turn with channels its `final` messages (and preambles), else all of it."""
        parts = list(_parts(text))
        if not parts:
            return text
        said = [p for p in parts if p.channel == "final" or (p.channel == "commentary" and not p.recipient)]
        return "\n".join(text[part.body : part.end] for part in said)

    def reasoning(self, text: str) -> str:
        """What is thought and not said: the `analysis` messages to nobody."""
        thought = [p for p in _parts(text) if p.channel == "analysis" and not p.recipient]
        return "\n".join(text[part.body : part.end] for part in thought)

    def write(self, calls: Sequence[ToolCall]) -> str:
        """See `Form`; as the template has it, behind the generation prompt."""
        return "<|start|>assistant".join(
            f" to=functions.{call.name}<|channel|>commentary json{_MESSAGE}{json.dumps(call.arguments)}<|call|>"
            for call in calls
        )

    def _arguments(self, text: str, part: _Part, name: str, schemas: Schemas) -> object:
        body = text[part.body : part.end]
        begin = skip_space(body, 0)
        properties = schemas.get(name, {}).get("parameters", {}).get("properties", {})
        if not part.recipient.startswith("functions.") and "code" in properties and not body.startswith("{", begin):
            return {"code": body}  # the built-in interpreter is sent code as it is
        arguments, end = decode_json(body, begin, cut=not part.ended_by and "}" not in body)
        if skip_space(body, end) != len(body):
            raise Malformed("there is more than one JSON object in the call")
        return arguments


def _parts(text: str) -> Iterator[_Part]:
    """The messages of a turn. The first one's header may have begun in the prompt."""
    position = 0
    while (at := text.find(_MESSAGE, position)) >= 0:
        begin = at + len(_MESSAGE)
        ended = _ENDS.search(text, begin)
        end = ended.start() if ended else len(text)
        after = ended.end() if ended and ended[0] != "<|start|>" else end
        yield _Part(position, text[position:at], begin, end, after, ended[0] if ended else "")
        position = after
