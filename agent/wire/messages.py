"""Anthropic's messages for whoever serves people: wishes read, and replies written as they come. Decisions only."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any

import msgspec

from agent.wire.answer import Answer, Event, Said
from agent.wire.anthropic import STOP_REASONS, messages_request, tool_use
from agent.wire.errors import ApiError
from agent.wire.request import ChatRequest, decoded
from agent.wire.wishes import Wishes, read_wishes

_KEYS = (
    *("messages", "model", "max_tokens", "system", "tools", "tool_choice", "stop_sequences", "stream", "temperature"),
    *("top_p", "top_k", "metadata", "thinking", "service_tier", "session"),
)


def read_messages(data: bytes, session_header: str, *, count_only: bool = False) -> tuple[ChatRequest, Wishes, bool]:
    """The request, its wishes, and whether thinking is to be shown; raises `ApiError` 400 that names the key."""
    raw = decoded(data)
    for key, value in raw.items():
        if key not in _KEYS and value is not None:
            raise ApiError(400, f"unknown parameter {key!r}", param=key, code="unknown_parameter")
    asked = messages_request(raw, count_only=count_only)
    choice = raw.get("tool_choice") or {}
    wishes = read_wishes(
        {
            "tools": asked.tools,
            "tool_choice": _choice(choice),
            "parallel_tool_calls": False if choice.get("disable_parallel_tool_use") is True else None,
        },
        known=("tools", "tool_choice"),
        most_n=1,
    )
    user = raw.get("metadata", {}).get("user_id") if isinstance(raw.get("metadata"), dict) else None
    session = raw.get("session") or session_header
    if not isinstance(session, str) or len(session) > 256 or len(str(user or "")) > 256:
        raise ApiError(400, "session and metadata.user_id are text of at most 256 characters", param="session")
    thinking = raw.get("thinking")
    shown = isinstance(thinking, dict) and thinking.get("type") in ("enabled", "adaptive")
    return msgspec.structs.replace(asked, user=str(user or ""), session=session), wishes, shown


def _choice(choice: dict[str, Any]) -> Any:
    match choice.get("type", "auto"):
        case "any":
            return "required"
        case "tool":
            return {"type": "function", "function": {"name": choice.get("name")}}
        case kind:
            return kind


class MessagesWire:
    """See `agent.wire.answer.Wire`. `name` is the message's id; thinking is told only if it `shows_thinking`.

    A block of blanks is never begun, because Anthropic's clients refuse it when it is sent back.
    """

    mark = False

    def __init__(self, name: str, model: str, *, shows_thinking: bool) -> None:
        self._head = {"id": name, "type": "message", "role": "assistant", "model": model}
        self._shows_thinking = shows_thinking
        self._kind, self._place, self._blank = "", 0, ""

    def whole(self, answers: Sequence[Answer]) -> dict[str, Any]:
        """A `message`."""
        answer = answers[0]
        blocks: list[dict[str, Any]] = []
        if answer.reasoning and self._shows_thinking:
            blocks.append({"type": "thinking", "thinking": answer.reasoning, "signature": ""})
        if answer.message["content"].strip():
            blocks.append({"type": "text", "text": answer.message["content"]})
        blocks += map(tool_use, answer.message.get("tool_calls", ()))
        usage = {"input_tokens": answer.prompt_tokens, "output_tokens": answer.completion_tokens}
        return {**self._head, "content": blocks, **_stop(answer), "usage": usage, **answer.extras}

    def opening(self) -> Iterator[Event]:
        """The message, with nothing in it."""
        usage = {"input_tokens": 0, "output_tokens": 0}
        empty: dict[str, Any] = {
            **self._head,
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            "usage": usage,
        }
        yield _event("message_start", message=empty)

    def said(self, index: int, said: Said) -> Iterator[Event]:
        """A piece of a block."""
        if said.reasoning and self._shows_thinking:
            if self._kind != "thinking":
                yield from self._open("thinking", {"type": "thinking", "thinking": "", "signature": ""})
            yield self._delta({"type": "thinking_delta", "thinking": said.reasoning})
        text = self._blank + said.content
        if self._kind != "text" and not text.strip():
            self._blank = text
            return
        self._blank = ""
        if text:
            if self._kind != "text":
                yield from self._open("text", {"type": "text", "text": ""})
            yield self._delta({"type": "text_delta", "text": text})

    def answered(self, answer: Answer) -> Iterator[Event]:
        """The rest, the calls, and why it ended."""
        yield from self.said(0, answer.rest)
        for call in map(tool_use, answer.message.get("tool_calls", ())):
            yield from self._open("tool_use", {**call, "input": {}})
            written = json.dumps(call["input"], ensure_ascii=False)
            yield self._delta({"type": "input_json_delta", "partial_json": written})
        yield from self._close()
        usage = {"input_tokens": answer.prompt_tokens, "output_tokens": answer.completion_tokens}
        yield _event("message_delta", delta=_stop(answer), usage=usage, **answer.extras)

    def ending(self, answers: Sequence[Answer]) -> Iterator[Event]:
        """The last event."""
        yield _event("message_stop")

    def failed(self, error: ApiError) -> Event:
        """An `error` event."""
        return "error", error.anthropic_body

    def alive(self) -> Event | None:
        """Anthropic's own."""
        return _event("ping")

    def _open(self, kind: str, block: dict[str, Any]) -> Iterator[Event]:
        yield from self._close()
        self._kind = kind
        yield _event("content_block_start", index=self._place, content_block=block)

    def _close(self) -> Iterator[Event]:
        if self._kind:
            yield _event("content_block_stop", index=self._place)
            self._kind, self._place = "", self._place + 1

    def _delta(self, delta: dict[str, Any]) -> Event:
        return _event("content_block_delta", index=self._place, delta=delta)


def _stop(answer: Answer) -> dict[str, Any]:
    return {"stop_reason": STOP_REASONS.get(answer.finish_reason, "end_turn"), "stop_sequence": None}


def _event(name: str, /, **data: Any) -> Event:
    return name, {"type": name, **data}
