"""What a served conversation is, which one a request goes on with, and the episode it becomes. Decisions only.

open ──final feedback, or silent with some feedback──▶ answered ──in the store──▶ delivered
  └──its time is over without feedback──▶ expired      (sampled otherwise than the learner assumes: unlearned)
answered, delivered ──another verdict, before the learner has it──▶ the same
any of them ──deleted, or past its retention──▶ wiping ──the store has forgotten it too──▶ wiped
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any, Literal, Protocol

import msgspec

from agent.episode import Episode, SamplingParams, Segment, StopReason, Timings, validate
from agent.packed import TokenIds
from agent.wire.request import ChatRequest

ENV_ID = "serve"
Aggregate = Literal["mean", "sum", "last"]
CLOSED = ("answered", "delivered", "unlearned")


class Turn(msgspec.Struct, frozen=True):
    """One served response. `observation` is what stands between it and the response before it (the first has none).

    `reward` is None until there is feedback, which is not known to be bad. `explicit`: it is a verdict and no signal.
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
    explicit: bool = True
    comment: str = ""
    correction: str = ""


class Conversation(msgspec.Struct, frozen=True):
    """An episode in the making. `messages` is the transcript with the assistant's answers, as the client has it.

    `key` is the name of the bearer key and `user` what the caller said under it ("": nothing); the two own it.
    """

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
    observation (or, without a base, the prompt): the last tokens of `prompt_ids`. `after` is the conversation whose
    tokens come first, open or not; if it is deleted meanwhile, its words must not come back.
    """

    base: str
    turn: int
    prompt_ids: TokenIds
    prompt_text: str
    added: Segment
    after: str = ""

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
    as they are and new ones are appended (case B1); white space at the ends of the assistant's lines, which clients
    strip, makes no difference. If it has had its final feedback, a new episode begins whose
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
        base.id,
    )


def _goes_on(request: ChatRequest, conversation: Conversation) -> bool:
    length = len(conversation.messages)
    return (
        0 < length < len(request.messages)
        and bool(conversation.turns)
        and conversation.tools == request.tools
        and same_messages(request.messages[:length], conversation.messages)
        and all(message["role"] != "assistant" for message in request.messages[length:])
    )


def same_messages(one: Sequence[dict[str, Any]], other: Sequence[dict[str, Any]]) -> bool:
    """Whether they say the same, but for white space at the ends of lines and texts of the assistant's."""
    return [_stripped(message) for message in one] == [_stripped(message) for message in other]


def _stripped(message: dict[str, Any]) -> dict[str, Any]:
    if message["role"] != "assistant":
        return message
    lines = message["content"].strip().splitlines()
    return {**message, "content": "\n".join(line.rstrip() for line in lines)}


def before_turn(conversation: Conversation, number: int) -> list[dict[str, Any]]:
    """The messages that turn `number` answered."""
    answers = [i for i, message in enumerate(conversation.messages) if message["role"] == "assistant"]
    return conversation.messages[: answers[number - len(conversation.turns)]]


def credited(verdicts: Sequence[float | None], aggregate: Aggregate = "mean") -> tuple[float, ...]:
    """The reward of each turn; their sum is what the episode is worth. None: nobody said anything of that turn.

    mean: each verdict counts its share, so that a conversation is worth as much as its judged turns are on average,
    however many there are: ten turns of .6 do not beat a single turn of 1. sum: they do. last: the last verdict is of
    the conversation as a whole.

    A silent turn is unknown and no thumbs down. It is in no mean, and adds 0, which changes no sum: its tokens are
    credited by the verdicts that follow, as all of an episode's are. What follows the last verdict is no part of it.
    """
    judged = [reward for reward in verdicts if reward is not None]
    if aggregate == "last":
        last = max((i for i, reward in enumerate(verdicts) if reward is not None), default=-1)
        return tuple(reward if i == last and reward is not None else 0.0 for i, reward in enumerate(verdicts))
    share = len(judged) if aggregate == "mean" else 1
    return tuple(0.0 if reward is None else reward / share for reward in verdicts)


def episode_of(conversation: Conversation, worker: str, aggregate: Aggregate = "mean") -> Episode:
    """The episode up to the last response with feedback, with rewards as `credited`; later ones are not learned from.

    Raises `EpisodeError` for a record that nobody may train on.
    """
    turns = conversation.turns[: conversation.answered]
    prompt = ",".join(map(str, conversation.prompt.token_ids))
    return validate(
        Episode(
            id=conversation.id,
            env_id=ENV_ID,
            task_id="prompt-" + hashlib.blake2b(prompt.encode(), digest_size=8).hexdigest(),
            segments=tuple(conversation.segments(len(turns))),
            turn_rewards=credited([turn.reward for turn in turns], aggregate),
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
                "verdicts": [turn.reward for turn in turns],
            },
        )
    )
