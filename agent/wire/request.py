"""The body of /v1/chat/completions: what is served, what is refused, what means nothing here and is ignored."""

from __future__ import annotations

import re
from typing import Any

import msgspec

from agent.wire.errors import ApiError

MAX_STOPS = 4
_MAX_STOP = 256
_TOOL_LEVELS = 64
_ROLES = ("system", "developer", "user", "assistant", "tool")
# What would change the distribution that actions are drawn from, or the answer's shape; each with its harmless value.
_REFUSED: dict[str, tuple[Any, ...]] = {
    "n": (1,),
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "repetition_penalty": (1,),
    "logit_bias": ({},),
    "logprobs": (False,),
    "top_logprobs": (0,),
    "min_p": (0,),
    "best_of": (1,),
    "modalities": (["text"],),
    "audio": (),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "response_format": ({"type": "text"},),
    "tool_choice": ("auto", "none"),
}


KEYS = (
    *("messages", "model", "tools", "stream", "stream_options", "max_tokens", "max_completion_tokens", "temperature"),
    *("top_p", "top_k", "seed", "stop", "user", "session", "tool_choice"),
)
"""What `chat_request` reads."""


class StreamOptions(msgspec.Struct):
    """Key `stream_options` of a request."""

    include_usage: bool = False


class _Body(msgspec.Struct):
    messages: list[dict[str, Any]]
    model: str
    tools: list[dict[str, Any]] | None = None
    stream: bool | None = False
    stream_options: StreamOptions | None = None
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    user: str | None = None
    session: str | None = None
    tool_choice: Any = None


class ChatRequest(msgspec.Struct, frozen=True):
    """A checked request. `messages` are canonical (see `canonical`); `session` "" means none: an episode of its own."""

    messages: list[dict[str, Any]]
    model: str
    tools: list[dict[str, Any]]
    stream: bool
    include_usage: bool
    max_tokens: int | None
    temperature: float | None
    top_p: float | None
    top_k: int | None
    seed: int | None
    stops: tuple[str, ...]
    user: str
    session: str


def read_chat_request(data: bytes, session_header: str = "") -> ChatRequest:
    """Read a body where every response is one that is learned from; raises `ApiError` 400 that names the key.

    What would bend the distribution is refused; what means nothing here is ignored.
    """
    raw = decoded(data)
    for key, harmless in _REFUSED.items():
        value = raw.get(key)
        if value is not None and value not in harmless:
            raise ApiError(
                400,
                f"{key}={value!r} is not supported: every response must be one that can be learned from",
                param=key,
                code="unsupported_parameter",
            )
    return chat_request(raw, session_header)


def decoded(data: bytes) -> dict[str, Any]:
    """A body as a JSON object; raises `ApiError` 400."""
    try:
        raw = msgspec.json.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ApiError(400, f"the body is not valid JSON: {error}") from error
    if not isinstance(raw, dict):
        raise ApiError(400, f"bad request: Expected `object`, got `{type(raw).__name__}`")
    return raw


def chat_request(raw: dict[str, Any], session_header: str = "") -> ChatRequest:
    """The part of a request that says what is to be answered, checked; raises `ApiError` 400 that names the key."""
    try:
        body = msgspec.convert(raw, _Body)
    except msgspec.ValidationError as error:
        raise ApiError(400, f"bad request: {error}", param=_place(error)) from error
    stops = (body.stop,) if isinstance(body.stop, str) else tuple(body.stop or ())
    if len(stops) > MAX_STOPS or any(not 0 < len(stop) <= _MAX_STOP for stop in stops):
        raise ApiError(400, f"stop: at most {MAX_STOPS} strings of 1 to {_MAX_STOP} characters", param="stop")
    max_tokens = body.max_completion_tokens if body.max_completion_tokens is not None else body.max_tokens
    if max_tokens is not None and max_tokens < 1:
        raise ApiError(400, f"max_tokens must be at least 1, got {max_tokens}", param="max_tokens")
    if body.temperature is not None and not 0 <= body.temperature <= 2:
        raise ApiError(400, f"temperature must be in [0, 2], got {body.temperature}", param="temperature")
    if body.top_p is not None and not 0 < body.top_p <= 1:
        raise ApiError(400, f"top_p must be in (0, 1], got {body.top_p}", param="top_p")
    if body.top_k is not None and not -1 <= body.top_k < 2**31:
        raise ApiError(400, f"top_k must be -1 (off) or more, and fit into 32 bits, got {body.top_k}", param="top_k")
    if body.seed is not None and not -(2**63) <= body.seed < 2**63:
        raise ApiError(400, "seed must fit into 64 bits", param="seed")
    if not body.messages:
        raise ApiError(400, "messages must hold at least one message", param="messages")
    messages = [canonical(message, i) for i, message in enumerate(body.messages)]
    if messages[-1]["role"] == "assistant":
        raise ApiError(400, "the last message is the assistant's own: there is nothing to answer", param="messages")
    tools = [] if body.tool_choice == "none" else [checked_tool(tool, i) for i, tool in enumerate(body.tools or [])]
    session = body.session or session_header
    if len(session) > 256 or len(body.user or "") > 256:
        raise ApiError(400, "session and user have at most 256 characters", param="session")
    if any("\ud800" <= letter <= "\udfff" for letter in session):  # what aiohttp makes of other bytes in a header
        raise ApiError(400, "session must be UTF-8", param="session")
    return ChatRequest(
        messages=messages,
        model=body.model,
        tools=tools,
        stream=bool(body.stream),
        include_usage=bool(body.stream_options and body.stream_options.include_usage),
        max_tokens=max_tokens,
        temperature=body.temperature,
        top_p=body.top_p,
        top_k=body.top_k or None,
        seed=body.seed,
        stops=stops,
        user=body.user or "",
        session=session,
    )


def _place(error: msgspec.ValidationError) -> str | None:
    """The key that a validation error is about: `$.max_tokens`."""
    found = re.search(r"at `\$\.?([^`]*)`", str(error))
    return found[1] or None if found else None


def canonical(message: dict[str, Any], index: int = 0) -> dict[str, Any]:
    """The part of a message that means something here, in one form, so that equal messages compare equal."""
    place = f"messages[{index}]"
    role = message.get("role")
    if role not in _ROLES:
        raise ApiError(400, f"{place}.role must be one of {', '.join(_ROLES)}", param=f"{place}.role")
    result: dict[str, Any] = {"role": role, "content": _text(message.get("content"), place)}
    if role == "assistant" and message.get("tool_calls"):
        try:
            result["tool_calls"] = [
                {
                    "id": str(call["id"]),
                    "type": "function",
                    "function": {
                        "name": str(call["function"]["name"]),
                        "arguments": str(call["function"]["arguments"]),
                    },
                }
                for call in message["tool_calls"]
            ]
        except (KeyError, TypeError) as error:
            raise ApiError(
                400, f"{place}.tool_calls: each needs id, function.name and function.arguments", param=place
            ) from error
    if role == "tool":
        if not isinstance(message.get("tool_call_id"), str):
            raise ApiError(400, f"{place}.tool_call_id is missing", param=f"{place}.tool_call_id")
        result["tool_call_id"] = message["tool_call_id"]
    if isinstance(message.get("name"), str):
        result["name"] = message["name"]
    return result


def _text(content: Any, place: str) -> str:
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if isinstance(content, list) and all(
        isinstance(part, dict) and part.get("type") in ("text", "refusal") and isinstance(part.get("text"), str)
        for part in content
    ):
        return "".join(part["text"] for part in content)
    raise ApiError(400, f"{place}.content must be text (or parts of type text)", param=f"{place}.content")


def checked_tool(tool: dict[str, Any], index: int) -> dict[str, Any]:
    """A tool's schema in OpenAI's form, or an `ApiError` 400 that says what is wrong with it."""
    function = tool.get("function")
    if tool.get("type") != "function" or not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise ApiError(400, f"tools[{index}] must be of type function and have function.name", param="tools")
    parameters = function.get("parameters", {})
    properties = parameters.get("properties", {}) if isinstance(parameters, dict) else None
    if not isinstance(properties, dict) or not all(isinstance(schema, dict) for schema in properties.values()):
        raise ApiError(400, f"tools[{index}].function.parameters must be a JSON schema of an object", param="tools")
    required = parameters.get("required", [])
    if not isinstance(required, list) or not all(isinstance(name, str) for name in required):
        raise ApiError(400, f"tools[{index}].function.parameters.required must be a list of names", param="tools")
    if not storable(tool, _TOOL_LEVELS):
        raise ApiError(
            400,
            f"tools[{index}]: whole numbers have at most 64 bits, and at most {_TOOL_LEVELS} levels nest",
            param="tools",
        )
    return tool


def storable(value: Any, levels: int) -> bool:
    """Whether whoever handles the JSON `value` later can write and read it, however deep their own stacks are."""
    if isinstance(value, dict | list):
        inner = value.values() if isinstance(value, dict) else value
        return levels > 0 and all(storable(each, levels - 1) for each in inner)
    return not isinstance(value, int) or -(2**63) <= value < 2**63
