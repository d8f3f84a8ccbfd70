"""What a caller wishes beyond what a policy is trained under: served, and said not to be learned from. Decisions only.

Whoever serves people reads a body with `read_wishes` and `agent.wire.request.chat_request`. Together they know every
key that is served; any other is refused by name, because a wish that is ignored is one that looks granted.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from typing import Any

import msgspec

from agent.engines.steering import NO_STEERING, Steering
from agent.wire.errors import ApiError

MOST_LOGPROBS = 20
_GUIDED = {"guided_json": "json", "guided_regex": "regex", "guided_choice": "choice", "guided_grammar": "grammar"}
_STRUCTURES = ("json", "json_object", "regex", "choice", "grammar")
IGNORED = ("metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key", "prompt_cache_retention")
"""Keys that ask for nothing that is in an answer."""
# Keys that are known and not served, each with the values that ask for nothing.
_HARMLESS: dict[str, tuple[Any, ...]] = {
    "best_of": (1,),
    "modalities": (["text"],),
    "audio": (),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "include_reasoning": (True,),
    "ignore_eos": (False,),
    "skip_special_tokens": (True,),
    "add_generation_prompt": (True,),
    "continue_final_message": (False,),
}


class _Body(msgspec.Struct):
    n: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    min_tokens: int | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    parallel_tool_calls: bool | None = None
    structured_outputs: dict[str, Any] | None = None
    response_format: dict[str, Any] | None = None
    guided_json: str | dict[str, Any] | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None


KEYS = _Body.__struct_fields__


class Wishes(msgspec.Struct, frozen=True):
    """`bending` names the keys that change what is drawn, so that nothing is learned from it.

    `forced`: the reply is JSON that is read as tool calls: "*" any of the tools (a list of name and parameters), else
    the arguments of the tool of that name; "" a reply as the model writes it.
    """

    n: int = 1
    logprobs: bool = False
    one_call: bool = False
    forced: str = ""
    steering: Steering = NO_STEERING
    bending: tuple[str, ...] = ()


NO_WISHES = Wishes()


def read_wishes(
    raw: Mapping[str, Any], *, known: Collection[str], most_n: int, legacy_logprobs: bool = False
) -> Wishes:
    """The wishes of a body; raises `ApiError` 400 whose `param` is the key.

    `known`: the keys that somebody else reads. `legacy_logprobs`: `logprobs` is a number, as completions have it.
    """
    for key, value in raw.items():
        if key in KEYS or key in known or key in IGNORED or value is None:
            continue
        if key not in _HARMLESS:
            raise _wrong(key, f"unknown parameter {key!r}", "unknown_parameter")
        if value not in _HARMLESS[key]:
            raise _wrong(key, f"{key}={_short(value)} is not supported", "unsupported_parameter")
    if legacy_logprobs and raw.get("logprobs") is not None:
        raw = {**raw, "logprobs": True, "top_logprobs": raw["logprobs"]}
    try:
        body = msgspec.convert(dict(raw), _Body)
    except msgspec.ValidationError as error:
        found = re.search(r"at `\$\.?(\w*)", str(error))
        raise _wrong(found[1] if found else "", f"bad request: {error}") from error
    if not 1 <= (body.n or 1) <= most_n or body.n == 0:
        raise _wrong("n", f"n must be from 1 to {most_n}, got {body.n}")
    top = body.top_logprobs or 0
    if not 0 <= top <= MOST_LOGPROBS:
        raise _wrong("top_logprobs", f"top_logprobs must be from 0 to {MOST_LOGPROBS}, got {top}")
    if top and not body.logprobs:
        raise _wrong("top_logprobs", "top_logprobs needs logprobs=true")
    bending: dict[str, Any] = {}
    for key, low, high, nothing in (
        ("min_tokens", 0, 2**31, 0),
        ("min_p", 0, 1, 0),
        ("presence_penalty", -2, 2, 0),
        ("frequency_penalty", -2, 2, 0),
        ("repetition_penalty", 0.01, 100, 1),
    ):
        value = getattr(body, key)
        if value is not None and not low <= value <= high:
            raise _wrong(key, f"{key} must be in [{low}, {high}], got {value}")
        if value is not None and value != nothing:
            bending[key] = value
    if body.logit_bias:
        bending["logit_bias"] = _bias(body.logit_bias)
    structure = _structure(body)
    forced = _forced(raw)
    if forced:
        if structure:
            raise _wrong(structure[0], f"{structure[0]} does not go with a forced tool_choice")
        structure = ("tool_choice", _schema_of_calls(forced, raw, one=body.parallel_tool_calls is False))
    steering = msgspec.convert(
        {**bending, "structured_outputs": structure[1] if structure else None, "top_logprobs": top}, Steering
    )
    return Wishes(
        n=body.n or 1,
        logprobs=bool(body.logprobs),
        one_call=body.parallel_tool_calls is False,
        forced=forced,
        steering=steering if steering != NO_STEERING else NO_STEERING,
        bending=(*bending, *(structure[:1] if structure else ())),
    )


def _structure(body: _Body) -> tuple[str, dict[str, Any]] | None:
    """The one form that the reply is to have, and the key that asked for it."""
    found: list[tuple[str, dict[str, Any]]] = []
    if body.response_format and (form := _format(body.response_format)):
        found.append(("response_format", form))
    for key, kind in _GUIDED.items():
        if (value := getattr(body, key)) is not None:
            found.append((key, {kind: value}))
    if body.structured_outputs is not None:
        given = {k: v for k, v in body.structured_outputs.items() if v is not None}
        if len(given) != 1 or next(iter(given)) not in _STRUCTURES:
            raise _wrong("structured_outputs", f"structured_outputs holds one of {', '.join(_STRUCTURES)}")
        found.append(("structured_outputs", given))
    if len(found) > 1:
        raise _wrong(found[1][0], f"{found[0][0]} and {found[1][0]} both say which form the reply is to have")
    for key, form in found:  # the engine finds out in mid-stream only, as a fault of its own
        try:
            re.compile(form.get("regex", ""))
        except (re.error, TypeError) as error:
            raise _wrong(key, f"{key}: no regular expression: {error}") from error
    return found[0] if found else None


def _format(given: dict[str, Any]) -> dict[str, Any] | None:
    match given.get("type"):
        case "text":
            return None
        case "json_object":
            return {"json_object": True}
        case "json_schema":
            schema = (given.get("json_schema") or {}).get("schema")
            if not isinstance(schema, dict):
                raise _wrong("response_format", "response_format.json_schema.schema must be a JSON schema")
            return {"json": schema}
    raise _wrong("response_format", "response_format.type must be text, json_object or json_schema")


def _bias(given: dict[str, float]) -> dict[int, float]:
    if not all(key.isascii() and key.isdecimal() and -100 <= bias <= 100 for key, bias in given.items()):
        raise _wrong("logit_bias", "logit_bias holds token ids, each with a number in [-100, 100]")
    if len(given) > 1024:
        raise _wrong("logit_bias", "logit_bias holds at most 1024 tokens")
    return {int(key): bias for key, bias in given.items()}


def _forced(raw: Mapping[str, Any]) -> str:
    """Which tool the reply must call: its name, "*" for any, "" for none."""
    choice = raw.get("tool_choice")
    names = [(tool.get("function") or {}).get("name") for tool in raw.get("tools") or () if isinstance(tool, dict)]
    match choice:
        case None | "auto" | "none":
            return ""
        case "required" if names:
            return "*"
        case "required":
            raise _wrong("tool_choice", "tool_choice=required needs tools")
        case {"type": "function", "function": {"name": str(name)}}:
            if name not in names:
                raise _wrong("tool_choice", f"tool_choice names {name!r}, which is none of the tools")
            return name
    raise _wrong("tool_choice", "tool_choice must be auto, none, required, or a function by its name")


def _schema_of_calls(forced: str, raw: Mapping[str, Any], *, one: bool) -> dict[str, Any]:
    functions = {tool["function"]["name"]: tool["function"].get("parameters") for tool in raw["tools"]}
    free = {"type": "object"}
    if forced != "*":
        return {"json": functions[forced] or free}
    calls = [
        {
            "type": "object",
            "properties": {"name": {"type": "string", "enum": [name]}, "parameters": parameters or free},
            "required": ["name", "parameters"],
        }
        for name, parameters in functions.items()
    ]
    most = {"maxItems": 1} if one else {}
    return {"json": {"type": "array", "minItems": 1, **most, "items": {"type": "object", "anyOf": calls}}}


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."


def _wrong(param: str, message: str, code: str | None = None) -> ApiError:
    return ApiError(400, message, param=param or None, code=code)
