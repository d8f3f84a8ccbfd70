"""Which of a session's chains a request goes on with, and the episode's segments that come of it. Decisions only.

A chain is a conversation whose tokens are kept as they were given and sampled. What a request repeats of one is never
rendered again: only its new messages are. So the record is what the policy saw, whatever a client makes of the text.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from agent.episode import Branch, Segment
from agent.runtime.engine_requests import Action

Message = dict[str, Any]


@dataclass(slots=True)
class Turn:
    """One action of a chain. `observation` is what stands between it and the action before it; the first has none.

    `length`: how many messages of the chain stand before its reply. `delivered`: a client has had the reply.
    """

    observation: Segment | None
    action: Segment
    message: Message
    length: int
    reward: float = 0.0
    delivered: bool = False


@dataclass(slots=True)
class Chain:
    """One conversation: a prompt, then actions and observations. `messages` is the transcript, replies included.

    `busy`: a request is going on with it. A chain grows at its end only: whoever wants something else begins a branch.
    """

    prompt: Segment
    tools: list[dict[str, Any]]
    messages: list[Message]
    keys: list[str]
    turns: list[Turn] = field(default_factory=list)
    busy: bool = False

    def token_ids(self, turns: int) -> list[int]:
        """The tokens up to the end of its first `turns` actions."""
        return [token for segment in self.segments(turns) for token in segment.token_ids]

    def segments(self, turns: int) -> list[Segment]:
        """The prompt, and the first `turns` turns."""
        found = [self.prompt]
        for turn in self.turns[:turns]:
            found += [turn.action] if turn.observation is None else [turn.observation, turn.action]
        return found

    def as_branch(self) -> Branch | None:
        """The record, up to the last action that a client has had; None where there is no such action."""
        count = max((i + 1 for i, turn in enumerate(self.turns) if turn.delivered), default=0)
        if not count:
            return None
        return Branch(tuple(self.segments(count)), tuple(turn.reward for turn in self.turns[:count]))


@dataclass(frozen=True, slots=True)
class Place:
    """Where a request goes on: behind the first `turns` turns of `chain`; `chain` None: nothing is repeated."""

    chain: Chain | None
    turns: int = 0

    @property
    def extends(self) -> bool:
        """Whether the chain itself may grow, and no branch begins."""
        return self.chain is not None and not self.chain.busy and self.turns == len(self.chain.turns)

    @property
    def length(self) -> int:
        """How many of the request's messages are in the chain."""
        if self.chain is None:
            return 0
        return self.chain.turns[self.turns - 1].length + 1


def key_of(message: Message) -> str:
    """What has to be equal for a message to be the same, whatever clients change of it on its way back.

    Of the assistant's own: blanks around its text, no content or an empty one, how the arguments of its calls are
    written as JSON. Of all: the identities of calls.
    """
    role, content = message["role"], message["content"]
    if role != "assistant":
        return json.dumps([role, content, message.get("name")], ensure_ascii=False)
    calls = [
        [call["function"]["name"], _arguments(call["function"]["arguments"])] for call in message.get("tool_calls", ())
    ]
    return json.dumps([role, content.strip(), calls], ensure_ascii=False, sort_keys=True)


def _arguments(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text


def place_of(keys: Sequence[str], tools: Sequence[dict[str, Any]], chains: Sequence[Chain]) -> Place:
    """Where a request with messages of these `keys` goes on.

    That is behind the longest beginning that it shares with a chain of the same tools, up to and with one of its
    replies; what follows there must not be the assistant's, since nobody sampled it here. Of several such chains the
    one that can grow.
    """
    best = Place(None)
    for chain in chains:
        if chain.tools != tools:
            continue
        shared = 0
        while shared < min(len(keys) - 1, len(chain.keys)) and keys[shared] == chain.keys[shared]:
            shared += 1
        turns = sum(turn.length < shared for turn in chain.turns)
        here = Place(chain, turns) if turns else best
        if (here.length, here.extends) > (best.length, best.extends) and not any(map(_is_reply, keys[here.length :])):
            best = here
    return best


def _is_reply(key: str) -> bool:
    return key.startswith('["assistant"')


def action_segment(action: Action, text: str) -> Segment:
    """An action as it was sampled."""
    return Segment(
        kind="action",
        token_ids=tuple(action.token_ids),
        text=text,
        logprobs=tuple(action.logprobs),
        versions=tuple(action.versions),
        finish_reason=action.finish_reason,
    )


def added_segment(kind: Literal["prompt", "observation"], token_ids: Sequence[int], text: str) -> Segment:
    """Tokens that nobody sampled."""
    return Segment(kind=kind, token_ids=tuple(token_ids), text=text)
