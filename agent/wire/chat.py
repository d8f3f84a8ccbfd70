"""OpenAI's chat completions, written: the body, and the chunks of a stream. Decisions only."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from agent.wire.answer import Answer, Event, Said
from agent.wire.errors import ApiError
from agent.wire.reply import shown_message, usage


def usage_of(answers: Sequence[Answer]) -> dict[str, int]:
    """OpenAI's account of a request: a prompt counts once, however many responses there are to it."""
    prompts = {answer.index: answer.prompt_tokens for answer in answers}
    return usage(prompts[min(prompts)], sum(answer.completion_tokens for answer in answers))


class ChatWire:
    """`head`: id, created, model and what else stands in every chunk. See `agent.wire.answer.Wire`.

    Each choice has the `response_id` that feedback on it names; the id of the whole is the first one's.
    """

    mark = True

    def __init__(self, head: dict[str, Any], *, include_usage: bool, wants_logprobs: bool = False) -> None:
        self._head, self._include_usage, self._logprobs = head, include_usage, wants_logprobs
        self._begun: set[int] = set()

    def whole(self, answers: Sequence[Answer]) -> dict[str, Any]:
        """A `chat.completion`."""
        choices = [
            {
                "index": answer.index,
                "message": shown_message(answer.message, answer.reasoning),
                "finish_reason": answer.finish_reason,
                "logprobs": None if answer.logprobs is None else {"content": answer.logprobs},
                **_own(answer),
            }
            for answer in answers
        ]
        body = {**self._head, "object": "chat.completion", "choices": choices, "usage": usage_of(answers)}
        return {**body, **answers[0].extras}

    def opening(self) -> Iterator[Event]:
        """Nothing: each choice opens itself."""
        return iter(())

    def said(self, index: int, said: Said) -> Iterator[Event]:
        """A chunk, and before the first one of a choice its role."""
        if index not in self._begun:
            self._begun.add(index)
            yield self._chunk(index, {"role": "assistant", "content": ""})
        delta: dict[str, Any] = {}
        if said.reasoning:
            delta = {"reasoning_content": said.reasoning, "reasoning": said.reasoning}
        if said.content:
            delta["content"] = said.content
        if delta or said.logprobs:
            yield self._chunk(index, delta, logprobs=said.logprobs)

    def answered(self, answer: Answer) -> Iterator[Event]:
        """What was held back, the calls, and why it ended."""
        yield from self.said(answer.index, answer.rest)
        if "tool_calls" in answer.message:
            calls = [{"index": i, **call} for i, call in enumerate(answer.message["tool_calls"])]
            yield self._chunk(answer.index, {"tool_calls": calls})
        name, data = self._chunk(answer.index, {}, answer.finish_reason)
        data["choices"][0] |= _own(answer)
        yield name, {**data, **answer.extras}

    def ending(self, answers: Sequence[Answer]) -> Iterator[Event]:
        """The account, if it is wanted."""
        if self._include_usage:
            yield "", {**self._head, "object": "chat.completion.chunk", "choices": [], "usage": usage_of(answers)}

    def failed(self, error: ApiError) -> Event:
        """OpenAI's error as a chunk."""
        return "", error.body

    def alive(self) -> Event | None:
        """A comment."""
        return None

    def _chunk(
        self,
        index: int,
        delta: dict[str, Any],
        finish_reason: str | None = None,
        logprobs: list[dict[str, Any]] | None = None,
    ) -> Event:
        told = {"content": logprobs} if self._logprobs and logprobs else None
        choice = {"index": index, "delta": delta, "finish_reason": finish_reason, "logprobs": told}
        return "", {**self._head, "object": "chat.completion.chunk", "choices": [choice]}


def _own(answer: Answer) -> dict[str, Any]:
    """What a choice says of itself beside OpenAI's fields."""
    kept = ("conversation", "trainable", "untrainable_because")
    return {"response_id": answer.response_id, **{k: answer.extras[k] for k in kept if k in answer.extras}}
