"""The chat wire, pure: what a request says, what a reply holds, and what an error means."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from agent.evaluate.config import Endpoint, Sampling
from agent.evaluate.sample import Tokens

OTHER_LIMIT = "max_completion_tokens"
"""What some models call `max_tokens`; it comes with `Endpoint.body`."""
CHARACTERS_A_TOKEN = 4
"""What a prompt is taken for before the endpoint has counted it; only a limit of tokens a minute reads it."""

_OVERFLOW = re.compile(
    r"context_length_exceeded|exceed_context_size|(?:maximum|model'?s|available|max) context"
    r"|context (?:length|window|size)|(?:prompt|input|request) (?:is )?too (?:long|large)"
    r"|too many (?:input )?tokens|input token count",
    re.IGNORECASE,
)
_ABOUT_ONE_PROMPT = re.compile(r"content[ _]?(?:filter|policy|management)|moderation|safety|flagged", re.IGNORECASE)
_NO_MONEY = re.compile(r"insufficient_quota|billing|insufficient (?:balance|credits)|exceeded your current quota", re.I)
_CUT = ("length", "max_tokens", "model_length")
_LATER = frozenset({408, 409, 425, 429, 500, 502, 503, 504, 520, 522, 523, 524, 529})
_HINTS: Mapping[str, str] = {
    r"max_completion_tokens": "give --body max_completion_tokens=N instead of --max-tokens",
    r"tool.choice|tool-call-parser|enable-auto-tool": "this server reads no calls: give --calls text (and "
    "--tool-format, the form of the model's family), or start it with its parser of tool calls",
    r"not support.{0,20}(?:tool|function)|(?:tool|function).{0,30}not support": "this model takes no tools: an "
    "environment without tools is needed (for sao/PythonTIR-v0: --env-arg tool_format=fenced)",
    r"temperature": "leave --temperature out: this model takes no other than its own",
    r"top_p": "leave --top-p out: this model takes no other than its own",
}
_BY_STATUS: Mapping[int, str] = {
    301: "give the address that it redirects to",
    302: "give the address that it redirects to",
    307: "give the address that it redirects to",
    308: "give the address that it redirects to",
    401: "the key in {key} is missing or wrong",
    402: "the account has no credit",
    403: "the key in {key} may not use this model",
    404: "check --url (it must end where /chat/completions follows, mostly in /v1) and --model",
    405: "check --url: it must end where /chat/completions follows, mostly in /v1",
}


@dataclass(frozen=True, slots=True)
class WireCall:
    """One structured call as the endpoint wrote it; `arguments` is text that need not be JSON."""

    id: str
    name: str
    arguments: str


@dataclass(frozen=True, slots=True)
class Reply:
    """One turn. `finish` is the endpoint's finish reason. `reasoning_key`: where the reasoning stood."""

    content: str
    calls: tuple[WireCall, ...] = ()
    reasoning: str = ""
    reasoning_key: str = "reasoning_content"
    finish: str = ""
    tokens: Tokens = field(default_factory=Tokens)


class Unreadable(Exception):
    """A reply that is no chat completion."""


Meaning = Literal["later", "context", "unusable", "refused"]
"""What an error means: come again, the context is full, nothing here will ever work, or this request alone won't."""


def request_body(
    endpoint: Endpoint,
    sampling: Sampling,
    messages: Sequence[Mapping[str, Any]],
    tools: Sequence[Mapping[str, Any]],
    seed: int | None,
    *,
    bounded: bool = True,
) -> dict[str, Any]:
    """The body of one request. Without `bounded` the turn's own limit is left out, so that it ends with the context."""
    body: dict[str, Any] = {"model": endpoint.model, "messages": list(messages), **endpoint.body}
    if tools:
        body["tools"] = list(tools)
        if endpoint.calls == "text":
            body["tool_choice"] = "none"
    given = {"temperature": sampling.temperature, "top_p": sampling.top_p, "seed": seed}
    if bounded:
        given["max_tokens"] = sampling.max_tokens
    else:
        body.pop(OTHER_LIMIT, None)
    return body | {key: value for key, value in given.items() if value is not None}


def turn_limit(endpoint: Endpoint, sampling: Sampling) -> int | None:
    """How many tokens one turn may have, as far as requests say it."""
    limit = sampling.max_tokens or endpoint.body.get(OTHER_LIMIT)
    return limit if isinstance(limit, int) else None


def estimated_tokens(body: Mapping[str, Any]) -> int:
    """What a request may cost, before anybody has counted: its characters, and its limit."""
    written = len(json.dumps(body.get("messages"))) + len(json.dumps(body.get("tools") or ""))
    limit = body.get("max_tokens") or body.get(OTHER_LIMIT) or 0
    return written // CHARACTERS_A_TOKEN + (limit if isinstance(limit, int) else 0)


def read_reply(body: Any) -> Reply:
    """The one choice of a chat completion. Raises `Unreadable`."""
    try:
        choice = body["choices"][0]
        message = choice["message"]
        content, reasoning = _texts(message.get("content"))
        reasoning_key = "reasoning" if message.get("reasoning") else "reasoning_content"
        reasoning = reasoning or _text(message.get(reasoning_key))
        calls = [_call(entry) for entry in message.get("tool_calls") or ()]
        if not calls and message.get("function_call"):
            calls = [_call({"function": message["function_call"]})]
        content = content or _text(message.get("refusal"))
        finish = _text(choice.get("finish_reason"))
        finish = "length" if finish.lower() in _CUT else finish
    except (AttributeError, KeyError, IndexError, TypeError) as error:
        raise Unreadable(f"no chat completion with a choice: {error!r}") from error
    return Reply(content, tuple(calls), reasoning, reasoning_key, finish, _tokens(body.get("usage")))


def error_in(body: Any) -> tuple[int, str] | None:
    """The error of an answer of 200 that holds one, as gateways write it when the model behind them failed."""
    error = body.get("error") if isinstance(body, dict) and not body.get("choices") else None
    if not error:
        return None
    code = error.get("code") if isinstance(error, dict) else None
    return (code if isinstance(code, int) and 300 <= code < 600 else 502), json.dumps(error)[:2000]


def meaning(status: int, said: str, *, worked_before: bool) -> Meaning:
    """What an answer of `status` with the text `said` means. Where nothing has ever worked (`worked_before` false) a
    refusal is the configuration's, unless it is about what one prompt says."""
    if status in (400, 413, 422, 500) and _OVERFLOW.search(said):
        return "context"
    if status in (401, 402, 404, 405) or 300 <= status < 400 or (status == 429 and _NO_MONEY.search(said)):
        return "unusable"
    if status in _LATER or status >= 500:
        return "later"
    return "refused" if worked_before or _ABOUT_ONE_PROMPT.search(said) else "unusable"


def advice(status: int, said: str, key_variable: str) -> str:
    """What to do about an error; "" where nobody knows."""
    if status == 429:
        return "the account's quota is used up"
    if status in _BY_STATUS:
        return _BY_STATUS[status].format(key=key_variable)
    return next((hint for pattern, hint in _HINTS.items() if re.search(pattern, said, re.IGNORECASE)), "")


def clean(text: str) -> str:
    """`text` as it can be sent and stored: half a surrogate pair is a question mark."""
    return text.encode("utf-8", "replace").decode()


def _call(entry: Any) -> WireCall:
    function = entry["function"]
    arguments = function.get("arguments")
    if not isinstance(arguments, str):  # some servers send an object, and nothing for no arguments
        arguments = "" if arguments is None else json.dumps(arguments)
    return WireCall(_text(entry.get("id")), _text(function.get("name")), clean(arguments))


def _texts(content: Any) -> tuple[str, str]:
    """What is said and what is thought, of a text or of parts."""
    if not isinstance(content, list):
        return _text(content), ""
    said = [_text(part.get("text")) for part in content if part.get("type") in ("text", "output_text", None)]
    thought = [_texts(part["thinking"])[0] for part in content if part.get("type") == "thinking"]
    return "".join(said), "".join(thought)


def _text(value: Any) -> str:
    return clean(value) if isinstance(value, str) else ""


def _tokens(usage: Any) -> Tokens:
    if not isinstance(usage, dict):
        return Tokens()
    parts = {name: usage.get(f"{name}_tokens_details") or {} for name in ("prompt", "completion")}
    return Tokens(
        _count(usage.get("prompt_tokens")),
        _count(usage.get("completion_tokens")),
        _count(parts["prompt"].get("cached_tokens")) if isinstance(parts["prompt"], dict) else 0,
        _count(parts["completion"].get("reasoning_tokens")) if isinstance(parts["completion"], dict) else 0,
    )


def _count(value: Any) -> int:
    return value if isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**53 else 0
