"""Structured calls as the action's text that an environment reads, and what stands in the conversation after it.

An environment reads an action as text, in one form of calls. A chat endpoint gives calls apart from the text. What is
made of them is read back before it is used: the environment sees exactly the calls that the model made, or none.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from agent.evaluate.config import Endpoint
from agent.evaluate.endpoint.wire import Reply, WireCall
from envs.core import Message
from envs.tool_calls import FORMS, FamilyFormat, parse_calls, write_calls
from envs.tool_formats.reading import ToolCall

Tools = Sequence[Mapping[str, Any]]
_TAGGED: tuple[FamilyFormat, ...] = ("glm", "qwen3_coder", "gemma")
"""Forms whose arguments have tags of their own: what is no object cannot be written in them."""
_SENT = ("role", "content", "name", "tool_calls", "tool_call_id")


class UnwritableCall(ValueError):
    """A call whose arguments the form cannot hold; `hermes` holds all."""


def action_text(content: str, calls: Sequence[WireCall], tools: Tools, tool_format: FamilyFormat) -> str:
    """What the environment is given for a turn that said `content` and made `calls`.

    A call that is malformed (its arguments are no JSON object) is malformed in the text as well, and the environment
    answers it as it answers any other; a message is carried out whole or not at all. What was said stands before the
    calls, unless it would change how they are read. Raises `UnwritableCall`.
    """
    if not calls:
        return content
    read = [(call, _arguments(call.arguments)) for call in calls]
    broken = next((call for call, arguments in read if arguments is None), None)
    if broken is not None:
        return _malformed(broken, tool_format)
    wanted = [ToolCall(call.name, arguments) for call, arguments in read if arguments is not None]
    written = write_calls(wanted, tool_format)
    for text in (f"{content}\n{written}", written) if content.strip() else (written,):
        if _same(parse_calls(text, tools, tool_format).calls, wanted):
            return text
    names = {tool["function"]["name"] for tool in tools}
    unknown = next((call for call in calls if call.name not in names), None)
    if unknown is not None:  # a name that the form cannot hold either
        return _malformed(unknown, tool_format)
    raise UnwritableCall(
        f"the arguments of {wanted[0].name} cannot be written in the form {tool_format!r}, in which the environment "
        "reads calls; --tool-format hermes holds all"
    )


def assistant_message(reply: Reply, turn: int, tools: Tools, endpoint: Endpoint) -> tuple[Message, list[str]]:
    """The turn as it stands in the conversation, and the ids of its structured calls, each of which wants an answer.

    Calls that stood in the text are structured there too, for an endpoint that reads calls; one that is told not to
    gets the text back as it was.
    """
    message: Message = {"role": "assistant", "content": reply.content}
    calls: Sequence[WireCall] = reply.calls
    if not calls and tools and endpoint.calls == "structured":
        read = parse_calls(reply.content, tools, endpoint.tool_format)
        calls = [WireCall("", call.name, json.dumps(call.arguments, ensure_ascii=False)) for call in read.calls]
        message["content"] = read.content if calls else reply.content
    if endpoint.return_reasoning and reply.reasoning:
        message[reply.reasoning_key] = reply.reasoning
    if not calls:
        return message, []
    ids = _identities(calls, turn)
    message["tool_calls"] = [
        {"id": identity, "type": "function", "function": {"name": call.name, "arguments": _sendable(call.arguments)}}
        for identity, call in zip(ids, calls, strict=True)
    ]
    message["content"] = message["content"] or None
    return message, ids


def answers(messages: Sequence[Message], ids: Sequence[str], endpoint: Endpoint, tools: Tools) -> list[Message]:
    """What the environment added, as the endpoint takes it: an answer for each of `ids`, in order, then the rest.

    Without structured calls an answer of a tool is the user's, since endpoints refuse a tool's answer that nothing
    asked for; one that is told not to read calls takes the tool's as it is.
    """
    sent = [{key: message[key] for key in _SENT if key in message} for message in messages]
    if not ids:
        if endpoint.calls == "text" and tools:
            return sent
        return [{"role": "user", "content": m.get("content")} if m["role"] == "tool" else m for m in sent]
    given = [message for message in sent if message["role"] == "tool"] or sent[:1]
    rest = [message for message in sent if all(message is not one for one in given)]
    # One answer to several calls is about all of them; of several the last ones' are left over only at an end.
    texts = [message.get("content") or "" for message in given] or [""]
    told = [
        {"role": "tool", "tool_call_id": identity, "content": texts[min(index, len(texts) - 1)]}
        for index, identity in enumerate(ids)
    ]
    more = [{"role": "user", "content": text} for text in texts[len(ids) :]]
    return [*told, *more, *rest]


def opening(messages: Sequence[Message]) -> list[Message]:
    """The messages that open an episode, with the keys that endpoints know."""
    return [{key: message[key] for key in _SENT if key in message} for message in messages]


def _arguments(text: str) -> dict[str, Any] | None:
    """The object that `text` is, as lenient as the environments' own readers; None for anything else."""
    try:
        read = json.loads(text, strict=False) if text.strip() else {}
    except (ValueError, RecursionError):
        return None
    return read if isinstance(read, dict) else None


def _malformed(call: WireCall, tool_format: FamilyFormat) -> str:
    """A text in which a call begins that cannot be carried out."""
    form = FORMS[tool_format]
    if tool_format in _TAGGED:
        return form.write([ToolCall("call", {})]).removesuffix(form.strays[0])
    for name in (call.name, "call"):  # a name may be one that the form does not see as a call at all
        text = form.write([ToolCall(name, call.arguments)])  # type: ignore[arg-type]  # a text where an object belongs
        if parse_calls(text, [], tool_format).error is not None:
            break
    return text


def _same(read: Sequence[ToolCall], wanted: Sequence[ToolCall]) -> bool:
    """Equal as JSON: 1, 1.0 and true are three values."""
    return [(call.name, json.dumps(call.arguments)) for call in read] == [
        (call.name, json.dumps(call.arguments)) for call in wanted
    ]


def _identities(calls: Sequence[WireCall], turn: int) -> list[str]:
    """The calls' ids; own ones where the endpoint gave none, or one twice."""
    given = [call.id for call in calls]
    sound = all(given) and len(set(given)) == len(given)
    return given if sound else [f"call_{turn}_{index}" for index in range(len(given))]


def _sendable(arguments: str) -> str:
    """Arguments as endpoints take them back: JSON of an object. What was none is shown inside of one."""
    if _arguments(arguments) is not None:
        try:
            json.loads(arguments)
            return arguments
        except ValueError:
            return json.dumps(_arguments(arguments), ensure_ascii=False)
    return json.dumps({"not_valid_json": arguments}, ensure_ascii=False)
