"""What a policy wrote, as the assistant's message that a client is given."""

from __future__ import annotations

import json
import uuid
from collections.abc import Callable, Sequence
from typing import Any

from agent.chat.tool_manners import tool_call
from envs.tool_calls import FORMS, FamilyFormat, ParsedCalls, parse_sound_calls
from envs.tool_formats.reading import ToolCall


def call_opens(tools: Sequence[dict[str, Any]], tool_format: FamilyFormat) -> tuple[str, ...]:
    """What no client is shown as text: where a call may begin, and with channels everything but what is said in the
    end. () where text is shown as it is."""
    return FORMS[tool_format].opens if tools or tool_format == "harmony" else ()


def assistant_message(
    text: str,
    tools: Sequence[dict[str, Any]],
    tool_format: FamilyFormat,
    *,
    sent: str = "",
    read_calls: Callable[..., ParsedCalls] = parse_sound_calls,
) -> dict[str, Any]:
    """The message of an action's `text` in canonical form (`agent.wire.request.canonical`).

    Calls that are sound become `tool_calls`; a text whose calls are not is shown as it was written. `sent` was shown
    already and can't be taken back; it is what stands before the first call. `read_calls`: `parse_calls` for clients
    that check the calls of their tools themselves.
    """
    if not call_opens(tools, tool_format):
        return {"role": "assistant", "content": text}
    read = read_calls(text, tools, tool_format)
    content = read.content if read.content.startswith(sent) else sent + read.content
    message: dict[str, Any] = {"role": "assistant", "content": content}
    if read.calls:
        message["tool_calls"] = [tool_call(call, f"call_{uuid.uuid4().hex[:24]}") for call in read.calls]
    return message


def forced_message(text: str, forced: str) -> dict[str, Any]:
    """The canonical message of a `text` that was held to the form of calls (`agent.wire.wishes.Wishes.forced`).

    What was cut off before it was one is shown as it was written.
    """
    try:
        read = json.loads(text)
        wanted = [{"name": forced, "parameters": read}] if forced != "*" else read
        calls = [ToolCall(call["name"], {**call["parameters"]}) for call in wanted]
    except (ValueError, KeyError, TypeError, RecursionError):
        return {"role": "assistant", "content": text}
    made = [tool_call(call, f"call_{uuid.uuid4().hex[:24]}") for call in calls]
    return {"role": "assistant", "content": "", "tool_calls": made} if made else {"role": "assistant", "content": text}


def shown_message(message: dict[str, Any], reasoning: str = "") -> dict[str, Any]:
    """A canonical assistant's message as OpenAI's API gives it: no content beside calls is null.

    `reasoning` goes under both names by which clients know it.
    """
    thought = {"reasoning_content": reasoning, "reasoning": reasoning} if reasoning else {}
    return {**message, "content": message["content"] or (None if "tool_calls" in message else ""), **thought}


def usage(prompt_tokens: int, completion_tokens: int) -> dict[str, int]:
    """OpenAI's account of a request."""
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
    }
