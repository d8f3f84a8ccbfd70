"""Anthropic's messages wire: a request becomes the same `ChatRequest` as OpenAI's, a reply one of their messages.

Decisions only; nothing is sent from here.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterator
from typing import Any

import msgspec

from agent.wire.errors import ApiError
from agent.wire.request import MAX_STOPS, ChatRequest, canonical, checked_tool, decoded

STOP_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}


class _Body(msgspec.Struct):
    messages: list[dict[str, Any]]
    model: str
    max_tokens: int | None = None
    system: str | list[dict[str, Any]] | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: dict[str, Any] | None = None
    stop_sequences: list[str] | None = None
    stream: bool | None = False
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None


def read_messages_request(data: bytes, *, count_only: bool = False) -> ChatRequest:
    """Read the body of /v1/messages (or, `count_only`, of its count_tokens); raises `ApiError` 400 that names the key.

    For whoever learns from every response: a tool choice that forces is refused. See `messages_request`.
    """
    raw = decoded(data)
    choice = raw.get("tool_choice")
    if isinstance(choice, dict) and choice.get("type", "auto") not in ("auto", "none"):
        raise ApiError(
            400,
            f"tool_choice={choice['type']!r} is not supported: every response must be one that can be learned from",
            param="tool_choice",
            code="unsupported_parameter",
        )
    return messages_request(raw, count_only=count_only)


def messages_request(raw: dict[str, Any], *, count_only: bool = False) -> ChatRequest:
    """What is to be answered, whatever the choice of tools; raises `ApiError` 400 that names the key.

    Blocks of text are joined, `tool_use` becomes a call and `tool_result` a message of role `tool`; what was thought
    in earlier turns is left out, as it is never sent from here. Images, documents and tools of Anthropic's own servers
    are refused.
    """
    try:
        body = msgspec.convert(raw, _Body)
    except msgspec.ValidationError as error:
        raise ApiError(400, f"bad request: {error}") from error
    if not count_only and (body.max_tokens is None or body.max_tokens < 1):
        raise ApiError(400, "max_tokens must be given, and be at least 1", param="max_tokens")
    choice = (body.tool_choice or {}).get("type", "auto")
    stops = tuple(body.stop_sequences or ())
    if len(stops) > MAX_STOPS or not all(stops):
        raise ApiError(400, f"stop_sequences: at most {MAX_STOPS} strings, none of them empty", param="stop_sequences")
    messages: list[dict[str, Any]] = []
    if body.system:
        messages.append(canonical({"role": "system", "content": body.system}))
    for index, message in enumerate(body.messages):
        messages += _openai_messages(message, index)
    if not messages or messages[-1]["role"] in ("assistant", "system"):
        raise ApiError(400, "the last message must be the user's: there is nothing to answer", param="messages")
    tools = [] if choice == "none" else [_openai_tool(tool, i) for i, tool in enumerate(body.tools or [])]
    return ChatRequest(
        messages=messages,
        model=body.model,
        tools=tools,
        stream=bool(body.stream),
        include_usage=True,
        max_tokens=body.max_tokens,
        temperature=body.temperature,
        top_p=body.top_p,
        top_k=body.top_k,
        seed=None,
        stops=stops,
        user="",
        session="",
    )


def message_json(message: dict[str, Any], *, model: str, finish_reason: str, tokens: tuple[int, int]) -> dict[str, Any]:
    """The answer's body: a canonical assistant's `message` of a request with so many (prompt, sampled) tokens."""
    return {
        "id": f"msg_{uuid.uuid4().hex[:24]}",
        "type": "message",
        "role": "assistant",
        "model": model,
        "content": _blocks(message),
        "stop_reason": STOP_REASONS.get(finish_reason, "end_turn"),
        "stop_sequence": None,
        "usage": {"input_tokens": tokens[0], "output_tokens": tokens[1]},
    }


def message_events(body: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """The same as the events of a stream: each event's name and data."""
    begun = {**body, "content": [], "stop_reason": None, "usage": {**body["usage"], "output_tokens": 0}}
    yield "message_start", {"type": "message_start", "message": begun}
    for index, block in enumerate(body["content"]):
        if block["type"] == "text":
            empty: dict[str, Any] = {"type": "text", "text": ""}
            delta = {"type": "text_delta", "text": block["text"]}
        else:
            empty = {**block, "input": {}}
            delta = {"type": "input_json_delta", "partial_json": json.dumps(block["input"], ensure_ascii=False)}
        yield "content_block_start", {"type": "content_block_start", "index": index, "content_block": empty}
        yield "content_block_delta", {"type": "content_block_delta", "index": index, "delta": delta}
        yield "content_block_stop", {"type": "content_block_stop", "index": index}
    ended = {"stop_reason": body["stop_reason"], "stop_sequence": body["stop_sequence"]}
    usage = {"output_tokens": body["usage"]["output_tokens"]}
    yield "message_delta", {"type": "message_delta", "delta": ended, "usage": usage}
    yield "message_stop", {"type": "message_stop"}


def _openai_messages(message: dict[str, Any], index: int) -> list[dict[str, Any]]:
    """One message of theirs as canonical ones: results of tools, and what is said around them, in their order."""
    place, role, content = f"messages[{index}]", message.get("role"), message.get("content")
    if role not in ("user", "assistant"):
        raise ApiError(400, f"{place}.role must be user or assistant", param=f"{place}.role")
    if isinstance(content, str):
        return [canonical({"role": role, "content": content}, index)]
    if not isinstance(content, list) or not all(isinstance(block, dict) for block in content):
        raise ApiError(400, f"{place}.content must be text or a list of blocks", param=f"{place}.content")
    found: list[dict[str, Any]] = []
    texts: list[dict[str, Any]] = []
    calls: list[dict[str, Any]] = []

    def said() -> None:
        if texts:
            found.append(canonical({"role": role, "content": list(texts)}, index))
            texts.clear()

    for block in content:
        match block.get("type"), role:
            case "text", _:
                texts.append(block)
            case (("thinking" | "redacted_thinking"), "assistant"):
                pass
            case "tool_use", "assistant":
                calls.append(_call(block, place))
            case "tool_result", "user":
                said()
                result = {"role": "tool", "content": block.get("content"), "tool_call_id": block.get("tool_use_id")}
                found.append(canonical(result, index))
            case kind, _:
                raise ApiError(400, f"{place}: a block of type {kind!r} is not supported here", param=place)
    if role == "assistant":
        return [canonical({"role": role, "content": texts, "tool_calls": calls}, index)]
    said()
    return found


def _call(block: dict[str, Any], place: str) -> dict[str, Any]:
    if not isinstance(block.get("name"), str) or not isinstance(block.get("input"), dict):
        raise ApiError(400, f"{place}: a tool_use needs a name and an input", param=place)
    arguments = json.dumps(block["input"], ensure_ascii=False)
    return {"id": block.get("id", ""), "function": {"name": block["name"], "arguments": arguments}}


def _openai_tool(tool: dict[str, Any], index: int) -> dict[str, Any]:
    if tool.get("type", "custom") != "custom":
        raise ApiError(400, f"tools[{index}]: {tool['type']!r} is not supported, only tools of your own", param="tools")
    function = {"name": tool.get("name"), "parameters": tool.get("input_schema", {})}
    if isinstance(tool.get("description"), str):
        function["description"] = tool["description"]
    return checked_tool({"type": "function", "function": function}, index)


def tool_use(call: dict[str, Any]) -> dict[str, Any]:
    """A canonical call as a block."""
    arguments = json.loads(call["function"]["arguments"])
    return {"type": "tool_use", "id": call["id"], "name": call["function"]["name"], "input": arguments}


def _blocks(message: dict[str, Any]) -> list[dict[str, Any]]:
    blocks: list[dict[str, Any]] = []
    if message["content"].strip():  # Anthropic's clients refuse a block of blanks when it is sent back
        blocks.append({"type": "text", "text": message["content"]})
    return [*blocks, *map(tool_use, message.get("tool_calls", ()))]
