"""A request once its wire has read it, and each response that it asks for on its way. Plain values."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import msgspec

from agent.episode import SamplingParams
from agent.serve.conversations.conversation import Conversation, Plan
from agent.wire.request import ChatRequest
from agent.wire.wishes import NO_WISHES, Wishes


@dataclass(frozen=True)
class Work:
    """One response on its way: what was asked, from where it goes on, how it is sampled, and what bends that."""

    key: str
    request: ChatRequest
    wishes: Wishes
    plan: Plan
    sampling: SamplingParams
    untrainable_because: tuple[str, ...]
    index: int
    bare: bool
    response_id: str
    version: int
    started_at: float

    @property
    def trainable(self) -> bool:
        """Whether it is drawn from the distribution that the learner assumes."""
        return not self.untrainable_because


class Asked(msgspec.Struct, frozen=True):
    """A request as its wire reads it. `prompts`: bare texts or tokens, without a template; else its messages count.

    `known`: conversations that it may go on with beside those of its session. `more`: what its wire keeps for itself.
    """

    request: ChatRequest
    wishes: Wishes = NO_WISHES
    prompts: tuple[str | list[int], ...] = ()
    known: tuple[Conversation, ...] = ()
    more: Any = None


class Begun(msgspec.Struct, frozen=True):
    """What every wire says of an answer before it is there."""

    response_id: str
    created: int
    model: str
    version: int


def size_of(asked: ChatRequest) -> int:
    """About how many characters there are to render: short messages cost as well."""
    tools = sum(len(msgspec.json.encode(tool)) for tool in asked.tools)
    return tools + sum(200 + len(message["content"]) for message in asked.messages)
