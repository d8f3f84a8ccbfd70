"""A session: what one harness asks, sampled, and kept as the chains of one episode.

open ──ask()*, call()*, post()*──▶ open ──the clock, a fault, an engine that goes away──▶ over ──close()──▶ closed
  └──────────────────────────────the harness has ended──────────────────────────────────────────close()──▶ closed
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from agent.engines.base import ContextOverflow, EngineFault
from agent.engines.prompt import Prompt
from agent.episode import EpisodeError, Segment, StopReason
from agent.harness.chains import Chain, Message, Place, Turn, action_segment, added_segment, key_of, place_of
from agent.harness.task import HarnessTask
from agent.runtime.engine_requests import Action, ActionSampler
from agent.runtime.environment_calls import EnvironmentCalls, Outcome
from agent.runtime.rollout import LONG_TRANSCRIPT, Rendered, Renderer, tool_format_of
from agent.runtime.settings import RolloutSettings
from agent.runtime.watching.watch import EpisodeWatch
from agent.wire.errors import ApiError
from agent.wire.reply import assistant_message
from agent.wire.request import ChatRequest, storable
from envs.core import EnvironmentFault
from envs.tool_calls import FamilyFormat, parse_calls, write_calls
from envs.tool_formats.reading import ToolCall

log = logging.getLogger(__name__)

_OVERRIDDEN = ("temperature", "top_p", "top_k", "seed")
_LEVELS = 16
_LONG = 20_000  # characters from which on rendering would hold up the other episodes


@dataclass(frozen=True, slots=True)
class Reply:
    """What a client is given: the assistant's message in canonical form, and how much was read and sampled for it."""

    message: Message
    finish_reason: str
    prompt_tokens: int
    completion_tokens: int


@dataclass(slots=True)
class _Asked:
    """A request whose reply nobody has had yet. `gone`: of each client that waits for it, whether it has hung up."""

    name: bytes
    task: asyncio.Task[tuple[Turn, Reply]]
    gone: list[Callable[[], bool]] = field(default_factory=list)

    @property
    def turn(self) -> Turn | None:
        """What came of it; None so far, or if nothing did."""
        if not self.task.done() or self.task.cancelled() or self.task.exception() is not None:
            return None
        return self.task.result()[0]


class Session:
    """See the module's docstring. Belongs to one event loop; requests may come side by side.

    `over` is set once nothing more can come of it: then `ended` says how the episode ends, or `fault` what to raise.
    """

    def __init__(
        self,
        task: HarnessTask,
        env: EnvironmentCalls,
        sampler: ActionSampler,
        renderer: Renderer,
        settings: RolloutSettings,
        *,
        max_branches: int = 64,
        environment_grades: bool = True,
        watch: EpisodeWatch | None = None,
    ) -> None:
        self._watch = watch or EpisodeWatch()
        self.task, self._env, self._sampler = task, env, sampler
        self._renderer, self._settings, self._max_branches = renderer, settings, max_branches
        self._environment_grades = environment_grades
        written = tool_format_of(renderer)
        self._family: FamilyFormat = "hermes" if written == "fenced" else written
        self.chains: list[Chain] = []
        self.over = asyncio.Event()
        self.ended: StopReason | None = None
        self.fault: Exception | None = None
        self.outcome: Outcome | None = None
        """What the environment said at its end, where a call ended it."""
        self.answer: str | None = None
        self.posted: float | None = None
        """The sum of the rewards that were posted; None: none was."""
        self.overflowed = False
        """Whether the last request was refused because its prompt was too long."""
        self.metrics: dict[str, Any] = {}
        self._asked: list[_Asked] = []
        self._last: Turn | None = None
        self._held = 0.0
        self._calling = asyncio.Lock()
        self._closed = False

    async def ask(self, request: ChatRequest, *, gone: Callable[[], bool] = lambda: False) -> tuple[Turn, Reply]:
        """The reply to `request`, and the turn that it is; tell `delivered` once the client has it.

        A client that hung up (`gone`) and asks the same again is given the reply that it has missed. Raises `ApiError`
        for what cannot be served, `ContextOverflow` for a prompt that is too long.
        """
        self._require_open()
        name = _name_of(request)
        asked = next((a for a in self._asked if a.name == name and all(left() for left in a.gone)), None)
        if asked is None:
            asked = _Asked(name, asyncio.create_task(self._turn(request), name="turn of a harness"))
            self._asked.append(asked)
        asked.gone.append(gone)
        try:
            return await asyncio.shield(asked.task)
        except asyncio.CancelledError:
            if asked.task.cancelled():
                raise ApiError(410, "the session has ended", code="session_ended") from None
            raise
        finally:
            if asked.task.done() and asked.turn is None and asked in self._asked:
                self._asked.remove(asked)

    async def count(self, request: ChatRequest) -> int:
        """How many tokens the prompt of `request` has, rendered afresh."""
        rendered = await self._rendered(self._renderer.start, 0, request.messages, request.tools)
        return len(rendered.token_ids)

    def delivered(self, turn: Turn) -> None:
        """A client has had the reply of `turn`: it is a part of the episode."""
        turn.delivered, turn.reward = True, turn.reward + self._held
        self._last, self._held = turn, 0.0
        self._asked = [a for a in self._asked if a.turn is not turn]

    async def call(self, name: str, arguments: dict[str, Any]) -> dict[str, Any]:
        """Have the environment carry out a call of one of its own tools; what it answers, and whether it has ended.

        Raises `ApiError`, `EnvironmentFault` after which the session is over.
        """
        self._require_open()
        if name not in [tool["function"]["name"] for tool in self.task.tools]:
            known = ", ".join(tool["function"]["name"] for tool in self.task.tools) or "none"
            raise ApiError(404, f"the environment has no tool {name!r}; its tools: {known}", param="name")
        async with self._calling:
            if self.outcome is not None:
                raise ApiError(409, "the environment's episode has ended", code="environment_ended")
            outcome = await self.step(write_calls([ToolCall(name, arguments)], self._family))
        content = "\n".join(str(message.get("content") or "") for message in outcome.messages)
        return {"content": content, "messages": outcome.messages, "ended": outcome.ended is not None}

    async def step(self, action: str) -> Outcome:
        """One step of the environment, whose reward is credited to the last reply that was delivered."""
        try:
            outcome = await self._env.step(action)
        except EnvironmentFault as fault:
            self._fail(fault)
            raise
        self.take(outcome)
        return outcome

    def take(self, outcome: Outcome) -> None:
        """Credit an outcome of the environment, and remember the one that ends it."""
        self.metrics.update(outcome.metrics)
        if outcome.ended is not None:
            self.outcome = outcome
        if not self._environment_grades:
            return
        if self._last is None:
            self._held += outcome.reward  # a call before the first reply
        else:
            self._last.reward += outcome.reward

    def post(self, reward: float, metrics: dict[str, Any]) -> None:
        """A reward from the harness, for the last reply that was delivered; several add up. Raises `ApiError`."""
        self._require_open()
        if not math.isfinite(reward):
            raise ApiError(422, f"reward must be a finite number, got {reward}", param="reward")
        if not storable(metrics, _LEVELS):
            raise ApiError(422, "metrics: whole numbers have at most 64 bits, and little may nest", param="metrics")
        if self._last is None:
            raise ApiError(409, "no reply has been given yet that a reward could be for", code="nothing_to_reward")
        self._last.reward += reward
        self.posted = (self.posted or 0.0) + reward
        self.metrics.update(metrics)

    @property
    def last_words(self) -> str:
        """What the last reply that was delivered says, where it calls no tool; "" otherwise."""
        message = {} if self._last is None else self._last.message
        return "" if message.get("tool_calls") else str(message.get("content", ""))

    async def settle(self, within_s: float) -> None:
        """Wait until no request is being sampled any more, `within_s` seconds at most."""
        if tasks := [asked.task for asked in self._asked if not asked.task.done()]:
            await asyncio.wait(tasks, timeout=within_s)

    async def close(self) -> None:
        """Take no more requests, and give up those that are being sampled."""
        self._closed = True
        self.over.set()
        tasks = [asked.task for asked in self._asked]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if self._asked:
            self.metrics["unheard_replies"] = sum(asked.turn is not None for asked in self._asked)
        self._asked.clear()

    def _require_open(self) -> None:
        if self._closed or self.over.is_set():
            raise ApiError(410, "the session has ended", code="session_ended")

    def _fail(self, fault: Exception) -> None:
        self.fault = self.fault or fault
        self.over.set()

    def _end(self, reason: StopReason) -> None:
        self.ended = self.ended or reason
        self.over.set()

    async def _turn(self, request: ChatRequest) -> tuple[Turn, Reply]:
        if any(getattr(request, name) is not None for name in _OVERRIDDEN):
            self.metrics["sampling_overridden"] = True
        keys = [key_of(message) for message in request.messages]
        place = place_of(keys, request.tools, self.chains)
        self._were_delivered(place)
        chain = place.chain if place.chain is not None and place.extends else self._new_chain(request)
        chain.busy = True
        try:
            return await self._sampled(request, keys, place, chain)
        except (EngineFault, EpisodeError) as error:
            if not isinstance(error, ContextOverflow):
                self._fail(error)
            raise
        finally:
            chain.busy = False
            if not chain.turns:
                self.chains.remove(chain)

    def _new_chain(self, request: ChatRequest) -> Chain:
        if len(self.chains) > self._max_branches:
            raise ApiError(
                400,
                f"this episode has {self._max_branches} branches (runtime.harness.max_branches): go on with one",
                code="too_many_branches",
            )
        chain = Chain(Segment("prompt", ()), list(request.tools), [], [])
        self.chains.append(chain)  # here already: chains stand in the order in which they began
        return chain

    def _were_delivered(self, place: Place) -> None:
        """What a request repeats has reached its client, whatever the connection looked like."""
        for turn in [] if place.chain is None else place.chain.turns[: place.turns]:
            if not turn.delivered:
                self.delivered(turn)

    async def _sampled(self, request: ChatRequest, keys: list[str], place: Place, chain: Chain) -> tuple[Turn, Reply]:
        """Render, sample, and append to `chain`, which is this request's alone meanwhile."""
        repeated = place.length
        known = [] if place.chain is None else place.chain.messages[:repeated]
        before = [] if place.chain is None else place.chain.token_ids(place.turns)
        new = request.messages[repeated:]
        if place.chain is None:
            added = await self._rendered(self._renderer.start, 0, new, request.tools)
        else:
            last = place.chain.turns[place.turns - 1].action.token_ids
            added = await self._rendered(self._renderer.extend, len(before), known, last, new, request.tools)
        prompt = [*before, *added.token_ids]
        observation = None
        if chain is place.chain:
            observation = added_segment("observation", added.token_ids, added.text)
        else:
            text = "" if place.chain is None else "".join(s.text for s in place.chain.segments(place.turns))
            chain.prompt = added_segment("prompt", prompt, text + added.text)
        action = await self._action(request, prompt)
        text = self._renderer.decode(action.token_ids)
        self._watch.grew("prompt" if observation is None else "observation", len(added.token_ids), added.text)
        self._watch.grew("action", len(action.token_ids), text)
        # Only the form of calls is checked: whoever owns the tools answers for names and arguments.
        shown = _before_stop(text, request.stops)
        message = assistant_message(shown, request.tools, self._family, read_calls=parse_calls)
        chain.messages, chain.keys = [*known, *new, message], [*keys, key_of(message)]
        turn = Turn(observation, action_segment(action, text), message, len(request.messages))
        chain.turns.append(turn)
        if action.finish_reason == "wall_clock":
            self.delivered(turn)  # cut, but a part of the episode that is graded as it stands
            self._end(StopReason.TRUNCATED_WALL_CLOCK)
        reason = "tool_calls" if "tool_calls" in message else action.finish_reason
        return turn, Reply(message, reason, len(prompt), len(action.token_ids))

    async def _action(self, request: ChatRequest, prompt: list[int]) -> Action:
        """The tokens of one reply; whatever leaves none is raised."""
        most, room = self._settings.max_tokens_per_turn, self._settings.max_context_tokens - len(prompt)
        action = Action()
        if room > 0:
            most = min(most, room, request.max_tokens or most)
            with self._watch.stage("generate"):
                action = await self._sampler.sample(Prompt(prompt), most, stop=request.stops)
        self.overflowed = not action.token_ids and action.finish_reason in ("", "length")
        if self.overflowed:
            # In the words by which clients of both wires know it, and compact what they ask.
            raise ContextOverflow(
                f"This model's maximum context length is {self._settings.max_context_tokens} tokens, and the prompt is "
                f"too long: {len(prompt)} tokens. Shorten the messages"
            )
        if action.finish_reason == "abort":
            self._end(StopReason.ABORTED)
            raise ApiError(503, "the engine is going away, and the episode ends", code="session_ended")
        if not action.token_ids and action.finish_reason == "wall_clock":
            self._end(StopReason.TRUNCATED_WALL_CLOCK)
            raise ApiError(410, "the episode's time is over", code="session_ended")
        if not action.token_ids:
            raise EpisodeError(f"the engine ended a turn ({action.finish_reason!r}) without a token")
        return action

    async def _rendered(self, render: Callable[..., Rendered], length: int, *arguments: Any) -> Rendered:
        """Render in a thread when that takes milliseconds: nothing may hold up the other episodes of the loop."""
        characters = sum(len(m["content"]) for m in arguments[-2])
        if length < LONG_TRANSCRIPT and characters < _LONG:
            return render(*arguments)
        return await asyncio.to_thread(render, *arguments)


def _before_stop(text: str, stops: Sequence[str]) -> str:
    """`text` up to the first of the strings that end it."""
    return text[: min((at for stop in stops if (at := text.find(stop)) >= 0), default=len(text))]


def _name_of(request: ChatRequest) -> bytes:
    """By what a request is known again."""
    return hashlib.blake2b(msgspec.json.encode(request), digest_size=16).digest()
