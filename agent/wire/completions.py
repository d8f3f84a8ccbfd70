"""OpenAI's older completions: a bare prompt goes on, no template around it. Read and written; decisions only."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from agent.wire.answer import Answer, Event, Said
from agent.wire.chat import usage_of
from agent.wire.errors import ApiError
from agent.wire.reply import usage
from agent.wire.request import KEYS, ChatRequest, chat_request, decoded
from agent.wire.wishes import Wishes, read_wishes

# A bare prompt has no tools, and is no conversation that is gone on with.
_NOT_OF_PROMPTS = (
    *("messages", "tools", "tool_choice", "parallel_tool_calls", "top_logprobs", "max_completion_tokens", "session"),
)
_HARMLESS = {"echo": (False,), "suffix": ("",), "add_special_tokens": (True,)}


def read_completion_request(data: bytes, *, most_n: int) -> tuple[ChatRequest, Wishes, tuple[str | list[int], ...]]:
    """The request, its wishes and its prompts; raises `ApiError` 400 that names the key."""
    raw = decoded(data)
    for key in _NOT_OF_PROMPTS:
        if raw.get(key) is not None:
            raise ApiError(400, f"unknown parameter {key!r} of completions", param=key, code="unknown_parameter")
    for key, harmless in _HARMLESS.items():
        if raw.get(key) is not None and raw[key] not in harmless:
            raise ApiError(400, f"{key} is not supported", param=key, code="unsupported_parameter")
    prompts = _prompts(raw.get("prompt"))
    if len(prompts) > most_n:
        raise ApiError(400, f"prompt: at most {most_n} of them", param="prompt")
    # What stands for the prompt in the record of the conversation.
    shown = "\n".join(prompt if isinstance(prompt, str) else str(prompt) for prompt in prompts)
    messages = [{"role": "user", "content": shown}]
    request = chat_request({**raw, "messages": messages, "max_tokens": raw.get("max_tokens", 16)})
    wishes = read_wishes(raw, known=(*KEYS, "prompt", *_HARMLESS), most_n=most_n, legacy_logprobs=True)
    return request, wishes, prompts


def _prompts(given: Any) -> tuple[str | list[int], ...]:
    match given:
        case str():
            return (given,)
        case [*texts] if texts and all(isinstance(text, str) for text in texts):
            return tuple(texts)
        case [*ids] if ids and all(_is_token(i) for i in ids):
            return (list(ids),)
        case [*lists] if lists and all(isinstance(ids, list) and all(map(_is_token, ids)) for ids in lists):
            return tuple(list(ids) for ids in lists)
    raise ApiError(400, "prompt must be text, tokens, or a list of one of them", param="prompt")


def _is_token(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**31


class CompletionWire:
    """See `agent.wire.answer.Wire`; `head` as in `agent.wire.chat.ChatWire`, `n` responses to each prompt."""

    mark = True

    def __init__(self, head: dict[str, Any], *, include_usage: bool, n: int = 1) -> None:
        self._head, self._include_usage, self._n = {**head, "object": "text_completion"}, include_usage, n
        self._offsets: dict[int, int] = {}

    def whole(self, answers: Sequence[Answer]) -> dict[str, Any]:
        """A `text_completion`."""
        choices = [
            {
                **self._choice(answer.index, answer.reasoning + answer.message["content"], answer.logprobs),
                **_end(answer),
            }
            for answer in answers
        ]
        return {**self._head, "choices": choices, "usage": self._usage(answers), **answers[0].extras}

    def opening(self) -> Iterator[Event]:
        """Nothing."""
        return iter(())

    def said(self, index: int, said: Said) -> Iterator[Event]:
        """A chunk."""
        choice = self._choice(index, said.reasoning + said.content, said.logprobs or None)
        yield "", {**self._head, "choices": [{**choice, "finish_reason": None}]}

    def answered(self, answer: Answer) -> Iterator[Event]:
        """The rest, and why it ended."""
        rest = self._choice(answer.index, answer.rest.reasoning + answer.rest.content, answer.rest.logprobs or None)
        yield "", {**self._head, "choices": [{**rest, **_end(answer)}], **answer.extras}

    def ending(self, answers: Sequence[Answer]) -> Iterator[Event]:
        """The account, if it is wanted."""
        if self._include_usage:
            yield "", {**self._head, "choices": [], "usage": self._usage(answers)}

    def failed(self, error: ApiError) -> Event:
        """OpenAI's error as a chunk."""
        return "", error.body

    def alive(self) -> Event | None:
        """A comment."""
        return None

    def _usage(self, answers: Sequence[Answer]) -> dict[str, int]:
        read = sum(answer.prompt_tokens for answer in answers if answer.index % self._n == 0)
        return usage(read, usage_of(answers)["completion_tokens"])

    def _choice(self, index: int, text: str, entries: list[dict[str, Any]] | None) -> dict[str, Any]:
        choice: dict[str, Any] = {"index": index, "text": text, "logprobs": None}
        if entries is not None:
            offsets = []
            for entry in entries:
                offsets.append(self._offsets.get(index, 0))
                self._offsets[index] = offsets[-1] + len(entry["token"])
            choice["logprobs"] = {
                "tokens": [entry["token"] for entry in entries],
                "token_logprobs": [entry["logprob"] for entry in entries],
                "top_logprobs": [{top["token"]: top["logprob"] for top in entry["top_logprobs"]} for entry in entries],
                "text_offset": offsets,
            }
        return choice


def _end(answer: Answer) -> dict[str, Any]:
    return {"finish_reason": answer.finish_reason, "response_id": answer.response_id}
