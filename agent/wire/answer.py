"""A reply as every wire is given it, piece by piece and whole, and what a wire is. Decisions only."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Protocol

import msgspec

from agent.wire.errors import ApiError

Event = tuple[str, dict[str, Any]]
"""One event of a stream: its name ("" where the wire names none) and its data."""


class Said(msgspec.Struct, frozen=True):
    """A piece of a reply: thinking, and what is said to the user. `logprobs`: entries as OpenAI has them, if asked."""

    reasoning: str = ""
    content: str = ""
    logprobs: list[dict[str, Any]] = []

    def __bool__(self) -> bool:
        return bool(self.reasoning or self.content or self.logprobs)


class Answer(msgspec.Struct, frozen=True):
    """One finished choice. `message` is canonical (`agent.wire.request.canonical`), without the `reasoning`.

    `rest`: what no piece of the stream has told yet. `extras`: fields of the server's own, such as `trainable`.
    """

    index: int
    response_id: str
    message: dict[str, Any]
    reasoning: str
    rest: Said
    finish_reason: str
    prompt_tokens: int
    completion_tokens: int
    logprobs: list[dict[str, Any]] | None = None
    extras: dict[str, Any] = {}


class Wire(Protocol):
    """How one request's answers are written. One object a request; a stream calls its methods in this order."""

    mark: bool
    """Whether a stream ends in OpenAI's `[DONE]`."""

    def whole(self, answers: Sequence[Answer]) -> dict[str, Any]:
        """The body of an answer that is no stream."""
        ...

    def opening(self) -> Iterator[Event]:
        """The first events, before anything is sampled."""
        ...

    def said(self, index: int, said: Said) -> Iterator[Event]:
        """A piece of the choice `index`."""
        ...

    def answered(self, answer: Answer) -> Iterator[Event]:
        """The end of a choice."""
        ...

    def ending(self, answers: Sequence[Answer]) -> Iterator[Event]:
        """The last events, once all choices have ended."""
        ...

    def failed(self, error: ApiError) -> Event:
        """A fault after the first event."""
        ...

    def alive(self) -> Event | None:
        """What says that a silent stream lives; None: a comment."""
        ...
