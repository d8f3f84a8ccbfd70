"""What a policy wrote, as the assistant's message that a client is given."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Sequence
from typing import Any

from agent.chat.tool_manners import tool_call
from envs.tool_calls import FORMS, FamilyFormat, ParsedCalls, parse_sound_calls


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


def shown_message(message: dict[str, Any]) -> dict[str, Any]:
    """A canonical assistant's message as OpenAI's API gives it: no content beside calls is null."""
    return {**message, "content": message["content"] or None} if "tool_calls" in message else message


def usage(prompt_tokens: int, completion_tokens: int) -> dict[str, int]:
    """OpenAI's account of a request."""
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
    }
