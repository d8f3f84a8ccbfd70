"""/tokenize and /detokenize, in vLLM's shape."""

from __future__ import annotations

from typing import Any

import msgspec

from agent.chat.renderer import ChatRenderer
from agent.wire.errors import ApiError
from agent.wire.request import canonical, checked_tool


class _Text(msgspec.Struct, forbid_unknown_fields=True):
    prompt: str
    model: str | None = None
    add_special_tokens: bool = True
    return_token_strs: bool | None = False


class _Chat(msgspec.Struct, forbid_unknown_fields=True):
    messages: list[dict[str, Any]]
    model: str | None = None
    tools: list[dict[str, Any]] | None = None
    add_generation_prompt: bool = True
    return_token_strs: bool | None = False


class _Tokens(msgspec.Struct, forbid_unknown_fields=True):
    tokens: list[int]
    model: str | None = None


def tokenized(raw: dict[str, Any], renderer: ChatRenderer, max_context: int) -> dict[str, Any]:
    """The tokens of a text, or of a chat as the model is given it; raises `ApiError` 400."""
    if "messages" in raw:
        chat = _read(raw, _Chat)
        messages = [canonical(message, i) for i, message in enumerate(chat.messages)]
        tools = [checked_tool(tool, i) for i, tool in enumerate(chat.tools or [])]
        ids = renderer.render(messages, tools, add_generation_prompt=chat.add_generation_prompt).token_ids
        strings = chat.return_token_strs
    else:
        text = _read(raw, _Text)
        ids = renderer.encode_text(text.prompt, add_special_tokens=text.add_special_tokens)
        strings = text.return_token_strs
    shown = [renderer.piece(token) for token in ids] if strings else None
    return {"count": len(ids), "max_model_len": max_context, "tokens": ids, "token_strs": shown}


def detokenized(raw: dict[str, Any], renderer: ChatRenderer, max_context: int) -> dict[str, Any]:
    """The text of tokens, special ones included; raises `ApiError` 400."""
    tokens = _read(raw, _Tokens).tokens
    try:
        return {"prompt": renderer.text_of(tokens)}
    except (OverflowError, TypeError) as error:
        raise ApiError(400, f"tokens: not the tokens of this model: {error}", param="tokens") from error


def _read(raw: dict[str, Any], kind: type[Any]) -> Any:
    try:
        return msgspec.convert(raw, kind)
    except msgspec.ValidationError as error:
        raise ApiError(400, f"bad request: {error}") from error
