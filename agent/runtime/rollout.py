"""`rollout`: one ticket, one environment, one engine in; one `Episode` out.

The tokens that the engine was given and sampled are the record. Text is decoded from them for the environment
only, and no token is ever computed from that text.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import msgspec
import numpy as np

from agent.chat.template import ChatTemplateError
from agent.engines.base import Engine
from agent.engines.prompt import Prompt
from agent.episode import Episode, EpisodeError, Experts, Segment, StopReason
from agent.runtime.asked_engine import AskedEngine
from agent.runtime.engine_requests import Action, ActionSampler, Recover
from agent.runtime.environment_calls import EnvironmentCalls, Outcome
from agent.runtime.episode_clock import EpisodeClock
from agent.runtime.record import record
from agent.runtime.settings import RolloutSettings
from agent.runtime.watching.watch import EpisodeWatch, figures_of
from agent.store.protocol import Ticket
from envs.asking.model import CountedModel
from envs.core import AsyncEnv, EnvironmentFault, Message
from envs.tool_calls import ToolFormat

log = logging.getLogger(__name__)

LONG_TRANSCRIPT = 30_000
"""Tokens from which on a template that looks far back takes more than about 2 ms for the next turn."""


class Rendered(Protocol):
    """Tokens and text that a renderer adds to a transcript."""

    @property
    def token_ids(self) -> Sequence[int]: ...

    @property
    def text(self) -> str: ...


class Renderer(Protocol):
    """What a rollout needs of `agent.chat.renderer.ChatRenderer`: it only ever appends."""

    @property
    def stop_token_ids(self) -> Sequence[int]: ...

    @property
    def tool_format(self) -> ToolFormat: ...

    def start(self, messages: Sequence[Message], tools: Sequence[dict[str, Any]]) -> Rendered: ...

    def extend(
        self,
        transcript: Sequence[Message],
        action_ids: Sequence[int],
        messages: Sequence[Message],
        tools: Sequence[dict[str, Any]],
    ) -> Rendered: ...

    def decode(self, ids: Sequence[int]) -> str: ...


def tool_format_of(renderer: Renderer) -> ToolFormat:
    """The form in which the policy behind `renderer` writes tool calls."""
    return getattr(renderer, "tool_format", "hermes")  # one of the reader's own may know of no forms


def task_of(ticket: Ticket, env: EnvironmentCalls, env_id: str) -> str:
    """The task that `ticket` asks for; raises `EnvironmentFault` where the environment has none of that number."""
    task_ids = env.task_ids()
    if not 0 <= ticket.task_index < len(task_ids):
        raise EnvironmentFault(
            f"ticket {ticket.id} asks for {ticket.kind} task {ticket.task_index}, but "
            f"{env_id} has {len(task_ids)}: runtime and store disagree on the environment's arguments"
        )
    return task_ids[ticket.task_index]


class RunEpisode(Protocol):
    """How a runtime makes an episode of a ticket: `rollout`, or what runs another agent in its place."""

    async def __call__(
        self,
        ticket: Ticket,
        env: AsyncEnv,
        engine: Engine,
        renderer: Renderer,
        settings: RolloutSettings,
        *,
        recover: Recover | None = None,
        watch: EpisodeWatch | None = None,
    ) -> Episode: ...


class PromptTooLong(EpisodeError):
    """The prompt leaves no room for an action: a second attempt would end the same way."""


async def rollout(
    ticket: Ticket,
    env: AsyncEnv,
    engine: Engine,
    renderer: Renderer,
    settings: RolloutSettings,
    *,
    recover: Recover | None = None,
    watch: EpisodeWatch | None = None,
) -> Episode:
    """Run one episode of `env` under the policy behind `engine`, and return it validated.

        reset -> prompt -> [ generate -> action -> step -> observation ]* -> graded -> Episode

    The context limit, a turn's own limit and the wall clock end an episode through `env.atruncate`, which grades it
    as it stands. A request that is aborted from outside (an engine being restarted) keeps its tokens with
    their own log-probs and versions, and the turn goes on from there, in the same segment; an engine that aborts
    again and again without a token ends the episode as `StopReason.ABORTED`. An observation that fills the context
    is not recorded, because no action follows it: no episode is longer than `max_context_tokens`.

    An engine that fails in mid-turn is no end: `recover` is awaited, and the turn goes on in the same segment from
    prompt and tokens so far (tokens that were never received are sampled again), at most
    `agent.runtime.engine_requests.REQUEST_FAULTS` times in a row. That time is not counted to the episode's wall clock.
    What an engine refuses (`EngineRefused`) is never asked again. Without `recover` the first fault is raised.
    All clocks that an episode lives by are drawn in docs/runtime.md. `watch` is told what the episode does.

    Raises `EnvironmentFault`, `EngineFault` (infrastructure) or `EpisodeError` (a record nobody may train on).
    Cancelled, it aborts its request at the engine before it leaves; the environment stays its owner's to close.
    """
    return await _Rollout(ticket, env, engine, renderer, settings, recover, watch or EpisodeWatch()).run()


class _Rollout:
    def __init__(
        self,
        ticket: Ticket,
        env: AsyncEnv,
        engine: Engine,
        renderer: Renderer,
        settings: RolloutSettings,
        recover: Recover | None,
        watch: EpisodeWatch,
    ) -> None:
        self.watch = watch
        self.ticket, self.renderer, self.settings = ticket, renderer, settings
        self.env = EnvironmentCalls(env, settings.env_id, settings.limits)
        self.task_id = ""
        self.transcript = Prompt()
        self.segments: list[Segment] = []
        self.rewards: list[float] = []
        self.experts: list[np.ndarray[Any, Any]] = []  # of the transcript's first tokens, each as it was first run
        self.metrics: dict[str, Any] = {}
        self.issued_at = time.time()
        self.clock = EpisodeClock(settings.limits.episode_s)
        self.sampler = ActionSampler(
            engine,
            ticket,
            settings.sampling,
            tuple(renderer.stop_token_ids),
            request_limit_s=settings.limits.generate_s,
            clock=self.clock,
            recover=recover,
            patience_s=settings.limits.engine_patience_s,
        )
        seeded = settings.sampling.seeded
        self.asked = CountedModel(AskedEngine(engine, ticket, renderer, settings.limits, recover, seeded=seeded))

    async def run(self) -> Episode:
        self.task_id = task_of(self.ticket, self.env, self.settings.env_id)
        with self.watch.episode(self.ticket, self.task_id, self.settings.env_id) as span:
            episode = await self._run()
            span.set_attributes(figures_of(episode))
        self.watch.ended(episode)
        return episode

    async def _run(self) -> Episode:
        form = tool_format_of(self.renderer)
        with self.watch.stage("reset"):
            opening = await self.env.reset(self.ticket.seed, self.task_id, form, self.asked)
        tools, conversation = opening.tools, opening.messages
        prompt = await self._rendered(self.renderer.start, conversation, tools)
        self._append("prompt", prompt.token_ids, prompt.text)
        while True:
            if self._room() <= 0:
                return await self._truncate("context", "")
            most_tokens = min(self.settings.max_tokens_per_turn, self._room())
            action = await self._sample(most_tokens)
            if not action.token_ids and action.finish_reason not in ("wall_clock", "abort", "length"):
                raise EpisodeError(f"the engine ended a turn ({action.finish_reason!r}) without a token")
            if action.finish_reason == "abort":
                self._record(action)
                return self._episode(StopReason.ABORTED)
            text = self._record(action)
            if action.finish_reason == "wall_clock":
                return await self._truncate("wall_clock", text)
            if action.finish_reason == "length":
                own_limit = len(action.token_ids) >= self.settings.max_tokens_per_turn and self._room() > 0
                return await self._truncate("turn_tokens" if own_limit else "context", text)
            with self.watch.stage("step"):
                outcome = await self.env.step(text)
            ended = self._credit(outcome)
            if ended is not None:
                return self._episode(ended)
            conversation.append({"role": "assistant", "content": text})
            extend = self.renderer.extend
            observation = await self._rendered(extend, conversation, action.token_ids, outcome.messages, tools)
            conversation += outcome.messages
            if len(observation.token_ids) >= self._room():
                self.metrics["observation_tokens_dropped"] = len(observation.token_ids)
                return await self._truncate("context", "")
            self._append("observation", observation.token_ids, observation.text)
            if self.clock.over:
                return await self._truncate("wall_clock", "")

    async def _sample(self, most_tokens: int) -> Action:
        """The tokens of one turn."""
        with self.watch.stage("generate") as span:
            action = await self.sampler.sample(self.transcript, most_tokens)
            span.set_attributes(
                {
                    "sao.turn": len(self.rewards) + 1,
                    "sao.engine": self.watch.engine,
                    "sao.policy.version": action.versions[-1] if len(action.versions) else -1,
                    "gen_ai.usage.input_tokens": len(self.transcript),
                    "gen_ai.usage.output_tokens": len(action.token_ids),
                    "gen_ai.response.finish_reasons": (action.finish_reason,),
                }
            )
        return action

    async def _rendered(self, render: Callable[..., Rendered], *arguments: Any) -> Rendered:
        """Render in a thread when that takes milliseconds: nothing may hold up the other episodes of the loop."""
        try:
            if len(self.transcript) < LONG_TRANSCRIPT or not getattr(self.renderer, "looks_back", True):
                return render(*arguments)
            return await asyncio.to_thread(render, *arguments)
        except ChatTemplateError as error:
            raise EpisodeError(f"the chat template cannot render task {self.task_id}: {error}") from error

    def _room(self) -> int:
        """Tokens that still fit in the context."""
        return self.settings.max_context_tokens - len(self.transcript)

    def _append(self, kind: Any, token_ids: Sequence[int], text: str) -> None:
        self.segments.append(Segment(kind=kind, token_ids=token_ids, text=text))
        self.transcript += self.segments[-1].token_ids
        self.watch.grew(kind, len(token_ids), text)

    def _record(self, action: Action) -> str:
        """Append `action` as it was sampled, and return its text for the environment ("" if it has no token)."""
        if not action.token_ids:
            return ""
        self._note_experts(action)
        text = self.renderer.decode(action.token_ids)
        self.segments.append(
            Segment(
                kind="action",
                token_ids=action.token_ids,
                text=text,
                logprobs=action.logprobs,
                versions=action.versions,
                finish_reason=action.finish_reason,
            )
        )
        self.transcript += self.segments[-1].token_ids
        self.watch.grew("action", len(action.token_ids), text)
        self.rewards.append(0.0)
        return text

    def _note_experts(self, action: Action) -> None:
        """Keep what the engine returned of tokens of which nothing is known yet."""
        if action.experts is None:
            return
        rows, run = action.experts.array(), len(self.transcript) + len(action.token_ids)
        if len(rows) > run:
            raise EpisodeError(f"the engine returned experts of {len(rows)} tokens, and it was given or sampled {run}")
        if self.experts and rows.shape[1:] != self.experts[0].shape[1:]:
            raise EpisodeError(f"the engine's experts changed their shape, {self.experts[0].shape} to {rows.shape}")
        self.experts.append(rows[sum(map(len, self.experts)) :])

    def _with_experts(self) -> tuple[Segment, ...]:
        """The segments, each with the experts of its tokens, as far as they are known."""
        if not self.experts:
            return tuple(self.segments)
        rows, start, found = np.concatenate(self.experts), 0, []
        for segment in self.segments:
            own = rows[start : start + len(segment.token_ids)]
            start += len(segment.token_ids)
            found.append(msgspec.structs.replace(segment, experts=Experts.pack(own)) if len(own) else segment)
        return tuple(found)

    def _credit(self, outcome: Outcome) -> StopReason | None:
        """Credit an outcome's reward to the last action, and say how the episode ended, if it did."""
        self.rewards[-1] += outcome.reward
        self.metrics.update(outcome.metrics)
        return outcome.ended

    async def _truncate(self, reason: str, text: str) -> Episode:
        """End the episode from outside, graded as it stands; `text` is the action that was cut, if one was."""
        if not self.rewards and reason == "context":
            raise PromptTooLong(
                f"task {self.task_id}: its prompt of {len(self.transcript)} tokens leaves no room for an action; "
                f"max_context_tokens is {self.settings.max_context_tokens}: raise it, or leave the task out"
            )
        if not self.rewards:
            raise EpisodeError(f"task {self.task_id}: the episode ended ({reason}) before its first action token")
        with self.watch.stage("grade"):
            outcome = await self.env.truncate(reason, text)
        ended = self._credit(outcome)
        assert ended is not None  # `EnvironmentCalls.truncate` sees to it
        return self._episode(ended)

    def _episode(self, stop_reason: StopReason) -> Episode:
        return record(
            self.ticket,
            self.settings,
            task_id=self.task_id,
            segments=self._with_experts(),
            turn_rewards=self.rewards,
            stop_reason=stop_reason,
            stop_token_ids=self.renderer.stop_token_ids,
            issued_at=self.issued_at,
            sampler=self.sampler,
            calls=self.env,
            asked=self.asked,
            metrics=self.metrics,
        )
