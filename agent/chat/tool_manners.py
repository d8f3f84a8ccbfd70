"""What a chat template does with tools, learned by rendering a small conversation: nothing is looked up by name.

manners = learn_tool_manners(template)
manners.tool_format      # the form in which it writes a call: that of the model's family
manners.answers          # "plain": behind any turn. "structured": behind `tool_calls` only. "never"
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from agent.chat.template import ChatTemplate, ChatTemplateError
from envs.core import Message
from envs.tool_calls import FAMILY_FORMATS, FamilyFormat, parse_calls
from envs.tool_formats.reading import ToolCall

_QUESTION = "question"
_ANSWER = "probe-answer-5"
_PLACE = "probe-place-7"
_ARGUMENTS = {"text": "one\ntwo", "count": 3}
_TOOL: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "probe_tool",
        "description": "A tool.",
        "parameters": {
            "type": "object",
            "properties": {
                "text": {"type": "string", "description": "Text."},
                "count": {"type": "integer", "description": "A number."},
            },
            "required": ["text"],
        },
    },
}
# The forms with markers of their own first: bare JSON reads more than its own family's text.
_TRIED: tuple[FamilyFormat, ...] = (
    "harmony",
    *(name for name in FAMILY_FORMATS if name not in ("harmony", "llama3")),
    "llama3",
)
_CLOSES: dict[FamilyFormat, str] = {"gemma": "<tool_call|>", "harmony": '"}'}
"""What a call ends with that the model writes itself, for the forms whose templates need structured calls."""


@dataclass(frozen=True, slots=True)
class ToolManners:
    """How a template treats tools. `tool_format` is None where it writes calls in no known form, or none at all.

    `writes_calls`: whether a structured call is shown. `text_arguments`: whether it wants the arguments as JSON text.
    `answers`: where it shows what a tool answered.
    """

    tool_format: FamilyFormat | None
    writes_calls: bool
    text_arguments: bool
    answers: Literal["plain", "structured", "never"]

    def called(self, names: Sequence[str], place: str) -> list[dict[str, Any]]:
        """Structured calls of these tools, the last one with `place` as its argument."""
        return [
            tool_call(
                ToolCall(name, {"text": place if i == len(names) - 1 else ""}), f"call0000{i}", self.text_arguments
            )
            for i, name in enumerate(names)
        ]

    def behind_call(self, text: str) -> str | None:
        """What stands behind the calls in `text`, which begins in the last one's last argument; None: not known."""
        if self.tool_format not in _CLOSES:
            return None
        _, close, rest = text.partition(_CLOSES[self.tool_format])
        return rest if close else None


def tool_call(call: ToolCall, identity: str, text_arguments: bool = True) -> dict[str, Any]:
    """A call as the OpenAI format has it; `text_arguments`: the arguments as JSON text, as on the wire."""
    arguments: Any = json.dumps(call.arguments, ensure_ascii=False) if text_arguments else call.arguments
    return {"id": identity, "type": "function", "function": {"name": call.name, "arguments": arguments}}


def learn_tool_manners(template: ChatTemplate, tool_format: FamilyFormat | None = None) -> ToolManners:
    """Render calls and answers, and see what becomes of them. `tool_format` is known already, or None."""
    user = {"role": "user", "content": _QUESTION}
    prompt = _rendered(template, [user], add_generation_prompt=True) or ""
    turn, text_arguments, writes_calls = "", False, False
    for content, text_arguments in (("", False), ("", True), (None, True)):
        call = tool_call(ToolCall("probe_tool", _ARGUMENTS), "call00000", text_arguments)
        written = _rendered(template, [user, {"role": "assistant", "content": content, "tool_calls": [call]}]) or ""
        turn = written[_shared(prompt, written) :]
        # The name alone may stand in a list of tools that the template shows only then; the argument does not.
        writes_calls = "probe_tool" in turn and ("one\ntwo" in turn or "one\\ntwo" in turn)
        if writes_calls:
            break
    text_arguments = text_arguments and writes_calls
    if tool_format is None and writes_calls:
        tool_format = next((name for name in _TRIED if _reads(turn, name)), None)
    manners = ToolManners(tool_format, writes_calls, text_arguments, "never")
    return ToolManners(tool_format, writes_calls, text_arguments, _where_answers_show(template, manners))


def _shared(one: str, other: str) -> int:
    """How many characters both begin with."""
    return next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


def _reads(turn: str, tool_format: FamilyFormat) -> bool:
    calls = parse_calls(turn, [_TOOL], tool_format).calls
    return [(call.name, call.arguments) for call in calls] == [("probe_tool", _ARGUMENTS)]


def _where_answers_show(template: ChatTemplate, manners: ToolManners) -> Literal["plain", "structured", "never"]:
    user = {"role": "user", "content": _QUESTION}
    answer = {"role": "tool", "content": _ANSWER, "tool_call_id": "call00000", "name": "probe_tool"}
    plain = {"role": "assistant", "content": _PLACE}
    text = _rendered(template, [user, plain, answer], add_generation_prompt=True)
    if text is not None and _ANSWER in text.partition(_PLACE)[2]:
        return "plain"
    called = {"role": "assistant", "content": "", "tool_calls": manners.called(["probe_tool"], _PLACE)}
    text = _rendered(template, [user, called, answer], add_generation_prompt=True)
    behind = None if text is None else manners.behind_call(text.partition(_PLACE)[2])
    return "structured" if behind is not None and _ANSWER in behind else "never"


def _rendered(
    template: ChatTemplate, messages: Sequence[Message], *, add_generation_prompt: bool = False
) -> str | None:
    try:
        return template.render(messages, [_TOOL], add_generation_prompt=add_generation_prompt)
    except ChatTemplateError:
        return None
