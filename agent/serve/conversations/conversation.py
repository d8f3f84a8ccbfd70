"""What a served conversation is, which one a request goes on with, and the episode it becomes. Decisions only.

open ──final feedback, or its time is over with some feedback──▶ answered ──in the store──▶ delivered
  └──its time is over without feedback──▶ expired      (sampled otherwise than the learner assumes: unlearned)
any of them ──deleted, or past its retention──▶ wiping ──the store has forgotten it too──▶ wiped
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any, Protocol

import msgspec

from agent.episode import Episode, SamplingParams, Segment, StopReason, Timings, validate
from agent.packed import TokenIds
from agent.wire.request import ChatRequest

ENV_ID = "serve"
CLOSED = ("answered", "delivered", "unlearned")


class Turn(msgspec.Struct, frozen=True):
    """One served response. `observation` is what stands between it and the response before it (the first has none).

    `reward` is None until there is feedback.
    """

    response_id: str
    action: Segment
    observation: Segment | None
    version: int
    created_at: float
    generate_s: float = 0.0
    reward: float | None = None
    final: bool = False
    metadata: dict[str, Any] = {}
    answered_at: float = 0.0


class Conversation(msgspec.Struct, frozen=True):
    """An episode in the making. `messages` is the transcript with the assistant's answers, as the client has it."""

    id: str
    key: str
    user: str
    session: str
    status: str
    trainable: bool
    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]]
    prompt: Segment
    sampling: SamplingParams
    created_at: float
    updated_at: float
    turns: list[Turn] = []

    @property
    def token_ids(self) -> TokenIds:
        """Everything so far, as it was given to and sampled by the engine."""
        return TokenIds.join(segment.token_ids for segment in self.segments())

    def segments(self, turns: int | None = None) -> list[Segment]:
        """The prompt, and the first `turns` turns (None: all)."""
        segments = [self.prompt]
        for turn in self.turns[:turns]:
            segments += [turn.action] if turn.observation is None else [turn.observation, turn.action]
        return segments

    @property
    def answered(self) -> int:
        """How many turns there are up to the last one with feedback."""
        return max((i + 1 for i, turn in enumerate(self.turns) if turn.reward is not None), default=0)


class Plan(msgspec.Struct, frozen=True):
    """What to generate from, and where the response will belong.

    `base` is the open conversation that it extends as turn number `turn`; "" begins a new one. `added` is the
    observation (or, without a base, the prompt): the last tokens of `prompt_ids`.
    """

    base: str
    turn: int
    prompt_ids: TokenIds
    prompt_text: str
    added: Segment

    def as_prompt(self) -> Segment:
        """The whole prefix as the prompt of a new episode."""
        return Segment("prompt", self.prompt_ids, self.prompt_text)


class Rendered(Protocol):
    """Tokens and text that a renderer adds."""

    @property
    def token_ids(self) -> tuple[int, ...]:
        """The tokens that are added."""
        ...

    @property
    def text(self) -> str:
        """The same as text."""
        ...


class Renderer(Protocol):
    """What is needed of `agent.chat.renderer.ChatRenderer`."""

    def start(self, messages: Sequence[dict[str, Any]], tools: Sequence[dict[str, Any]] | None = None) -> Rendered:
        """The prompt of a new episode."""
        ...

    def extend(
        self,
        transcript: Sequence[dict[str, Any]],
        action_ids: Sequence[int],
        messages: Sequence[dict[str, Any]],
        tools: Sequence[dict[str, Any]] | None = None,
    ) -> Rendered:
        """What comes after `transcript`, whose last action was sampled as `action_ids`: the new `messages`."""
        ...


def plan_turn(request: ChatRequest, known: Sequence[Conversation], renderer: Renderer) -> Plan:
    """Where `request` goes on. `known` are the conversations of its session.

    The conversation whose whole transcript the request's messages repeat, before new ones, is extended: its tokens stay
    as they are and new ones are appended (case B1). If it has had its final feedback, a new episode begins whose
    prompt is exactly those tokens. Where no transcript is repeated, because the client edited it, the messages are
    rendered afresh as the prompt of a new episode: a fork.
    """
    repeated = [c for c in known if _goes_on(request, c)]
    if not repeated:
        start = renderer.start(request.messages, request.tools)
        opening = Segment("prompt", start.token_ids, start.text)
        return Plan("", 0, opening.token_ids, start.text, opening)
    base = max(repeated, key=lambda c: (len(c.messages), c.status == "open", c.updated_at))
    new = request.messages[len(base.messages) :]
    observed = renderer.extend(base.messages, base.turns[-1].action.token_ids, new, request.tools)
    added = Segment("observation", observed.token_ids, observed.text)
    text = "".join(segment.text for segment in base.segments()) + observed.text
    return Plan(
        base.id if base.status == "open" else "",
        len(base.turns),
        base.token_ids + added.token_ids,
        text,
        added,
    )


def _goes_on(request: ChatRequest, conversation: Conversation) -> bool:
    length = len(conversation.messages)
    return (
        0 < length < len(request.messages)
        and bool(conversation.turns)
        and conversation.tools == request.tools
        and request.messages[:length] == conversation.messages
        and all(message["role"] != "assistant" for message in request.messages[length:])
    )


def episode_of(conversation: Conversation, worker: str) -> Episode:
    """The episode up to the last response with feedback; later ones are not learned from.

    A response without feedback before that has reward 0. Raises `EpisodeError` for a record that nobody may train on.
    """
    turns = conversation.turns[: conversation.answered]
    prompt = ",".join(map(str, conversation.prompt.token_ids))
    return validate(
        Episode(
            id=conversation.id,
            env_id=ENV_ID,
            task_id="prompt-" + hashlib.blake2b(prompt.encode(), digest_size=8).hexdigest(),
            segments=tuple(conversation.segments(len(turns))),
            turn_rewards=tuple(turn.reward or 0.0 for turn in turns),
            # However the last response ended, the user judged it as it stands.
            stop_reason=StopReason.TERMINATED,
            sampling=conversation.sampling,
            timings=Timings(
                issued_at=conversation.created_at,
                finished_at=max(turn.answered_at for turn in turns),
                generate_s=sum(turn.generate_s for turn in turns),
            ),
            worker=worker,
            metrics={
                "source": "served",
                "responses": [turn.response_id for turn in turns],
                "feedback": [turn.metadata for turn in turns],
            },
        )
    )
