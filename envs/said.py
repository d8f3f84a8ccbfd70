r"""What counts as said: the part of an action that answers, outside thinking and tool calls. One function for all.

said("<think>perhaps 42</think> I give up.")     # " I give up."
said("<think>perhaps 42")                        # "": the thinking never ends
"""

from __future__ import annotations

import contextlib
import json
import re
from typing import Literal

from envs.tool_calls import FORMS, ToolFormat
from envs.tool_formats.reading import Reading

Counted = Literal["said", "everything"]
COUNTED: tuple[Counted, ...] = ("said", "everything")
"""What of an action may hold the answer: what is said, or all of it, drafts and code included."""

_MARKER = re.compile(r"<(/?)(think|thinking|tool_call|tool_response)>")
_FENCE = re.compile(r"^ {0,3}(`{3,}|~{3,})[ \t]*([^\s`]*)[^\n`]*$")
_CODE = frozenset({"python", "py", "python3"})
_CLOSE = "</tool_call>"
_TAGGED = ("hermes", "glm", "qwen3_coder")
"""Formats whose calls stand between `<tool_call>` tags."""
_JSON = json.JSONDecoder(strict=False)
_DECODED = 32
"""Calls whose JSON is read to find where they end; behind these the next closing tag will do, or it takes for ever."""


def said(text: str, tool_format: ToolFormat = "hermes") -> str:
    """Return `text` without its thinking and its tool calls. Never raises; linear in the text.

    Thinking or a call that never closes swallows the rest. A `</think>` without its opening closes what the prompt
    opened: nothing before it is said. What looks like a tool's answer (`<tool_response>`) is not said either.
    """
    if tool_format != "fenced" and tool_format not in _TAGGED:
        form = FORMS[tool_format]
        reading = form.reading(text, {})
        if reading.error is not None:
            text, reading = text[: reading.error_at], Reading()
        text = form.content(text, reading)
    parts: list[str] = []
    position = calls = 0
    while (marker := _MARKER.search(text, position)) is not None:
        closing, name = marker.groups()
        if closing:
            # A stray `</think>` ends thinking that began before the text did; other stray tags are text.
            parts = [] if name.startswith("think") else [*parts, text[position : marker.end()]]
            position = marker.end()
            continue
        parts.append(text[position : marker.start()])
        if name == "tool_call":
            calls += 1
            end = _call_end(text, marker.end(), decode=calls <= _DECODED)
        else:
            closed = text.find(f"</{name}>", marker.end())
            end = -1 if closed < 0 else closed + len(name) + 3
        if end < 0:
            position = len(text)
            break
        position = end
    whole = "".join([*parts, text[position:]])
    return _without_blocks(whole) if tool_format == "fenced" else whole


def _call_end(text: str, start: int, *, decode: bool) -> int:
    """Where the call ends whose body begins at `start`, past its closing tag; -1 if it never does.

    A closing tag inside the strings of well-formed JSON is code.
    """
    if decode:
        begin = start + len(text[start : start + 100]) - len(text[start : start + 100].lstrip())
        with contextlib.suppress(ValueError, RecursionError):
            _, start = _JSON.raw_decode(text, begin)
    closed = text.find(_CLOSE, start)
    return -1 if closed < 0 else closed + len(_CLOSE)


def _without_blocks(text: str) -> str:
    """Leave out the fenced blocks of Python, the last one also if it never closes."""
    kept: list[str] = []
    fence, code = "", False
    for line in text.split("\n"):
        mark = _FENCE.match(line.rstrip("\r"))
        if not fence and mark:
            fence, code = mark[1], mark[2].lower() in _CODE
        elif fence and mark and mark[1].startswith(fence) and not mark[2]:
            fence = ""
            if code:
                code = False
                continue
        if not code:
            kept.append(line)
    return "\n".join(kept)
