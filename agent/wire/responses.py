"""OpenAI's responses, read: a body becomes the same `ChatRequest` as a chat's. Decisions only.

Served: text in and out, function tools, `instructions`, `previous_response_id`, `text.format`, `metadata`. Images,
files, tools of OpenAI's own servers, `background`, `conversation` and `prompt` are refused by name.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from agent.wire.errors import ApiError
from agent.wire.request import ChatRequest, canonical, chat_request, decoded
from agent.wire.wishes import IGNORED, Wishes, read_wishes

_SAME = ("model", "stream", "temperature", "top_p", "user", "session", "seed", "top_k", "parallel_tool_calls")
_OWN = (
    *("input", "instructions", "previous_response_id", "tools", "tool_choice", "max_output_tokens", "text", "include"),
    *("top_logprobs", "reasoning", "truncation", "background"),
)
_LOGPROBS = "message.output_text.logprobs"
_INCLUDED = (_LOGPROBS, "reasoning.encrypted_content")  # the second is asked for by habit; there is none


class ResponsesRequest(msgspec.Struct, frozen=True):
    """`request.messages` are the new ones only where `previous` names the response that they go on from.

    `echo`: what the answer repeats of the request.
    """

    request: ChatRequest
    wishes: Wishes
    previous: str
    instructions: str
    echo: dict[str, Any]


def read_responses_request(data: bytes, session_header: str) -> ResponsesRequest:
    """Read the body of /v1/responses; raises `ApiError` 400 that names the key."""
    raw = decoded(data)
    for key, value in raw.items():
        if key not in _SAME and key not in _OWN and key not in IGNORED and value is not None:
            raise ApiError(400, f"unknown parameter {key!r}", param=key, code="unknown_parameter")
    _refuse(raw, "background", (False,))
    _refuse(raw, "truncation", ("disabled",))
    for key in ("effort", "summary", "generate_summary"):
        if isinstance(raw.get("reasoning"), dict) and raw["reasoning"].get(key) not in (None, "auto"):
            raise _wrong("reasoning", f"reasoning.{key} is the recipe's: runtime.chat.template_kwargs")
    include = raw.get("include") or []
    if not isinstance(include, list) or not all(item in _INCLUDED for item in include):
        raise _wrong("include", f"include: only {', '.join(_INCLUDED)}")
    instructions, previous = raw.get("instructions") or "", raw.get("previous_response_id") or ""
    if not isinstance(instructions, str) or not isinstance(previous, str):
        raise _wrong("instructions", "instructions and previous_response_id are text")
    messages = _messages(raw.get("input"))
    chat: dict[str, Any] = {key: raw[key] for key in _SAME if raw.get(key) is not None}
    chat |= {
        "messages": [*([{"role": "system", "content": instructions}] if instructions else []), *messages],
        "tools": [_tool(tool, i) for i, tool in enumerate(_list(raw, "tools"))],
        "tool_choice": _choice(raw.get("tool_choice")),
        "max_tokens": raw.get("max_output_tokens"),
    }
    wishes: dict[str, Any] = {key: chat.get(key) for key in ("tools", "tool_choice", "parallel_tool_calls")}
    wishes |= {"response_format": _format(raw.get("text")), "top_logprobs": raw.get("top_logprobs")}
    wishes["logprobs"] = True if _LOGPROBS in include or raw.get("top_logprobs") else None
    return ResponsesRequest(
        request=chat_request(chat, session_header),
        wishes=_read_wishes(wishes),
        previous=previous,
        instructions=instructions,
        echo={
            "instructions": instructions or None,
            "metadata": raw.get("metadata") or {},
            "parallel_tool_calls": raw.get("parallel_tool_calls") is not False,
            "previous_response_id": previous or None,
            "temperature": raw.get("temperature"),
            "top_p": raw.get("top_p"),
            "max_output_tokens": raw.get("max_output_tokens"),
            "tool_choice": raw.get("tool_choice") or "auto",
            "tools": raw.get("tools") or [],
            "text": raw.get("text") or {"format": {"type": "text"}},
            "truncation": "disabled",
            "store": raw.get("store") is not False,
            "user": raw.get("user"),
        },
    )


def _read_wishes(wishes: dict[str, Any]) -> Wishes:
    try:
        return read_wishes(wishes, known=("tools", "tool_choice"), most_n=1)
    except ApiError as error:
        if error.param == "response_format":
            raise _wrong("text", error.message.replace("response_format", "text.format")) from error
        raise


def transcript_before(messages: Sequence[dict[str, Any]], turns: int, turn: int) -> list[dict[str, Any]]:
    """The messages of a conversation of `turns` responses, up to and including response number `turn` (from 0)."""
    places = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
    return list(messages[: places[turn - turns] + 1])


def going_on(asked: ResponsesRequest, before: Sequence[dict[str, Any]], tools: Sequence[dict[str, Any]]) -> ChatRequest:
    """The request with all that was said `before`. Instructions and tools hold until others are given."""
    new = list(asked.request.messages)
    old = list(before)
    if asked.instructions:
        if old and old[0]["role"] == "system":
            old[0] = new[0]
        else:
            old.insert(0, new[0])
        new = new[1:]
    return msgspec.structs.replace(
        asked.request, messages=[*old, *new], tools=list(asked.request.tools or ([] if _no_tools(asked) else tools))
    )


def _no_tools(asked: ResponsesRequest) -> bool:
    return asked.echo["tool_choice"] == "none"


def _messages(given: Any) -> list[dict[str, Any]]:
    if isinstance(given, str):
        return [{"role": "user", "content": given}]
    if not isinstance(given, list) or not given or not all(isinstance(item, dict) for item in given):
        raise _wrong("input", "input must be text or a list of items, and not empty")
    messages: list[dict[str, Any]] = []
    for index, item in enumerate(given):
        place = f"input[{index}]"
        match item.get("type", "message"):
            case "message":
                messages.append(canonical({"role": item.get("role"), "content": _parts(item.get("content"), place)}))
            case "function_call":
                call = {key: item.get(key) for key in ("name", "arguments")}
                if not all(isinstance(value, str) for value in call.values()):
                    raise _wrong(place, f"{place}: a function_call needs a name and arguments")
                made = {"id": str(item.get("call_id", "")), "type": "function", "function": call}
                if not messages or messages[-1]["role"] != "assistant":
                    messages.append({"role": "assistant", "content": ""})
                messages[-1] = {**messages[-1], "tool_calls": [*messages[-1].get("tool_calls", ()), made]}
            case "function_call_output":
                output = _parts(item.get("output"), place)
                messages.append({"role": "tool", "content": output, "tool_call_id": str(item.get("call_id", ""))})
            case "reasoning":
                pass  # it is in the tokens of the conversation that is gone on with
            case kind:
                raise _wrong(place, f"{place}: an item of type {kind!r} is not supported here")
    return messages


def _parts(content: Any, place: str) -> str:
    if isinstance(content, str):
        return content
    if isinstance(content, list) and all(
        isinstance(part, dict)
        and part.get("type") in ("input_text", "output_text", "text", "refusal")
        and isinstance(part.get("text", part.get("refusal")), str)
        for part in content
    ):
        return "".join(part.get("text", part.get("refusal")) for part in content)
    raise _wrong(place, f"{place}: content must be text, or parts of type input_text")


def _list(raw: dict[str, Any], key: str) -> list[Any]:
    value = raw.get(key) or []
    if not isinstance(value, list):
        raise _wrong(key, f"{key} must be a list")
    return value


def _tool(tool: Any, index: int) -> dict[str, Any]:
    if not isinstance(tool, dict) or tool.get("type") != "function":
        kind = tool.get("type") if isinstance(tool, dict) else tool
        raise _wrong("tools", f"tools[{index}]: {kind!r} is not supported, only functions of your own")
    kept = ("name", "description", "parameters", "strict")
    function = {key: tool[key] for key in kept if tool.get(key) is not None}
    return {"type": "function", "function": function}


def _choice(choice: Any) -> Any:
    if isinstance(choice, dict) and choice.get("type") == "function":
        return {"type": "function", "function": {"name": choice.get("name")}}
    return choice


def _format(text: Any) -> dict[str, Any] | None:
    form = text.get("format") if isinstance(text, dict) else None
    if not isinstance(form, dict) or form.get("type") != "json_schema":
        return form if isinstance(form, dict) else None
    return {"type": "json_schema", "json_schema": {"name": form.get("name"), "schema": form.get("schema")}}


def _refuse(raw: dict[str, Any], key: str, harmless: tuple[Any, ...]) -> None:
    if raw.get(key) is not None and raw[key] not in harmless:
        raise ApiError(400, f"{key}={raw[key]!r} is not supported", param=key, code="unsupported_parameter")


def _wrong(param: str, message: str) -> ApiError:
    return ApiError(400, message, param=param)
