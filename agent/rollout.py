"""`rollout`: one ticket, one environment, one engine in; one `Episode` out.

The tokens that the engine was given and sampled are the record. Text is decoded from them for the environment
only, and no token is ever computed from that text.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

import msgspec

from agent.chat_template import ChatTemplateError
from agent.engines.base import Completion, ContextOverflow, Engine, EngineFault, EngineRefused
from agent.episode import Episode, EpisodeError, SamplingParams, Segment, StopReason, Timings, validate
from agent.patience import backoff_s
from agent.runtime_config import SamplingConfig, StageLimits
from agent.store.protocol import Ticket
from envs.core import AsyncEnv, EnvironmentFault, Step

log = logging.getLogger(__name__)

ABORT_GRACE_S = 2.0
"""How long an engine may take to hand over the tokens of a request that was aborted."""

FRUITLESS_ABORTS = 5
"""After so many aborts in a row without a single token, the engine is going away: the episode is aborted."""

REQUEST_FAULTS = 5
"""A turn whose requests have failed more often than this, without a token in between, fails its episode: a request
that kills every engine it meets must end somewhere."""

LONG_TRANSCRIPT = 30_000
"""Tokens from which on rendering the next turn takes more than about 2 ms."""

T = TypeVar("T")
Message = dict[str, Any]


class Rendered(Protocol):
    """Tokens and text that a renderer adds to a transcript."""

    @property
    def token_ids(self) -> Sequence[int]: ...

    @property
    def text(self) -> str: ...


class Renderer(Protocol):
    """What a rollout needs of `agent.chat.ChatRenderer`: it only ever appends."""

    @property
    def stop_token_ids(self) -> Sequence[int]: ...

    def start(self, messages: Sequence[Message], tools: Sequence[dict[str, Any]]) -> Rendered: ...

    def extend(
        self,
        transcript: Sequence[Message],
        action_ids: Sequence[int],
        messages: Sequence[Message],
        tools: Sequence[dict[str, Any]],
    ) -> Rendered: ...

    def decode(self, ids: Sequence[int]) -> str: ...


@dataclass(frozen=True, slots=True)
class RolloutSettings:
    """The part of a runtime's configuration that one episode needs."""

    env_id: str
    sampling: SamplingConfig
    max_context_tokens: int
    max_tokens_per_turn: int
    limits: StageLimits
    worker: str = ""


class PromptTooLong(EpisodeError):
    """The prompt leaves no room for an action: a second attempt would end the same way."""


@dataclass(slots=True)
class _Action:
    """One turn's tokens as they were sampled, perhaps over several requests."""

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    finish_reason: str = ""

    def add(self, completion: Completion) -> None:
        tokens, logprobs, versions = map(len, (completion.token_ids, completion.logprobs, completion.versions))
        if not tokens == logprobs == versions:
            # Checked at the door: after a continuation nobody could say which log-prob is whose.
            raise EpisodeError(
                f"the engine returned {logprobs} log-probs and {versions} versions for {tokens} tokens; "
                "the episode is rejected, log-probs are never padded"
            )
        self.token_ids += completion.token_ids
        self.logprobs += completion.logprobs
        self.versions += completion.versions
        self.finish_reason = completion.finish_reason


class _TooSlow(EngineFault):
    """A request reached its time limit; `completion` is what the engine handed over of it, if it did."""

    def __init__(self, message: str, completion: Completion | None) -> None:
        super().__init__(message)
        self.completion = completion


Recover = Callable[[EngineFault], Awaitable[None]]
"""Returns once requests may be made again to the engine of the episode (another one behind the same object, or the
same one restarted); raises when that is not to be expected. See `agent.engines.pool.Seat.move`."""


async def rollout(
    ticket: Ticket,
    env: AsyncEnv,
    engine: Engine,
    renderer: Renderer,
    settings: RolloutSettings,
    *,
    recover: Recover | None = None,
) -> Episode:
    """Run one episode of `env` under the policy behind `engine`, and return it validated.

        reset -> prompt -> [ generate -> action -> step -> observation ]* -> graded -> Episode

    The context limit (also a turn's own limit) and the wall clock end an episode through `env.atruncate`, which
    grades it as it stands. A request that is aborted from outside (an engine being restarted) keeps its tokens with
    their own log-probs and versions, and the turn goes on from there, in the same segment; an engine that aborts
    again and again without a token ends the episode as `StopReason.ABORTED`. An observation that fills the context
    is not recorded, because no action follows it: no episode is longer than `max_context_tokens`.

    This is the one home of retries of engine requests. An engine that fails in mid-turn is no end: `recover` is
    awaited, and the turn goes on in the same segment from prompt and tokens so far (tokens that were never received
    are sampled again), at most `REQUEST_FAULTS` times in a row. That time is not counted to the episode's wall clock.
    What an engine refuses (`EngineRefused`) is never asked again. Without `recover` the first fault is raised.

    Raises `EnvironmentFault`, `EngineFault` (infrastructure) or `EpisodeError` (a record nobody may train on).
    Cancelled, it aborts its request at the engine before it leaves; the environment stays its owner's to close.
    """
    return await _Rollout(ticket, env, engine, renderer, settings, recover).run()


class _Rollout:
    def __init__(
        self,
        ticket: Ticket,
        env: AsyncEnv,
        engine: Engine,
        renderer: Renderer,
        settings: RolloutSettings,
        recover: Recover | None,
    ) -> None:
        self.ticket, self.env, self.engine, self.renderer, self.settings = ticket, env, engine, renderer, settings
        self.recover = recover
        self.transcript: list[int] = []
        self.segments: list[Segment] = []
        self.rewards: list[float] = []
        self.metrics: dict[str, Any] = {}
        self.issued_at = time.time()
        self.deadline = time.monotonic() + settings.limits.episode_s
        self.generate_s = self.environment_s = 0.0
        self.requests = 0

    async def run(self) -> Episode:
        limits = self.settings.limits
        task_id = self._task_id()
        options = {"task_id": task_id}
        _, info = await self._environment(
            self.env.areset(seed=self.ticket.seed, options=options), limits.reset_s, "reset"
        )
        tools = list(info.get("tools") or [])
        conversation = self._messages(info)
        prompt = await self._rendered(self.renderer.start, conversation, tools)
        self._append("prompt", prompt.token_ids, prompt.text)
        while True:
            if self._room() <= 0:
                return await self._truncate("context", "")
            action = await self._act()
            if not action.token_ids and action.finish_reason not in ("wall_clock", "abort", "length"):
                raise EpisodeError(f"the engine ended a turn ({action.finish_reason!r}) without a token")
            if action.finish_reason == "abort":
                self._record(action)
                return self._episode(StopReason.ABORTED)
            text = self._record(action)
            if action.finish_reason == "wall_clock":
                return await self._truncate("wall_clock", text)
            if action.finish_reason == "length":
                return await self._truncate("context", text)
            step = await self._environment(self.env.astep(text), limits.step_s, "step")
            ended = self._settle(step)
            if ended is not None:
                return self._episode(ended)
            conversation.append({"role": "assistant", "content": text})
            messages = self._messages(step[4])
            extend = self.renderer.extend
            observation = await self._rendered(extend, conversation, action.token_ids, messages, tools)
            conversation += messages
            if len(observation.token_ids) >= self._room():
                self.metrics["observation_tokens_dropped"] = len(observation.token_ids)
                return await self._truncate("context", "")
            self._append("observation", observation.token_ids, observation.text)
            if time.monotonic() >= self.deadline:
                return await self._truncate("wall_clock", "")

    async def _rendered(self, render: Callable[..., Rendered], *arguments: Any) -> Rendered:
        """Render in a thread when that takes milliseconds: nothing may hold up the other episodes of the loop."""
        try:
            if len(self.transcript) < LONG_TRANSCRIPT:
                return render(*arguments)
            return await asyncio.to_thread(render, *arguments)
        except ChatTemplateError as error:
            raise EpisodeError(f"the chat template cannot render task {self._task_id()}: {error}") from error

    def _task_id(self) -> str:
        task_ids = self.env.task_ids
        if not 0 <= self.ticket.task_index < len(task_ids):
            raise EnvironmentFault(
                f"ticket {self.ticket.id} asks for {self.ticket.kind} task {self.ticket.task_index}, but "
                f"{self.settings.env_id} has {len(task_ids)}: runtime and store disagree on the environment's arguments"
            )
        return task_ids[self.ticket.task_index]

    def _room(self) -> int:
        """Tokens that still fit in the context."""
        return self.settings.max_context_tokens - len(self.transcript)

    def _append(self, kind: Any, token_ids: Sequence[int], text: str) -> None:
        self.segments.append(Segment(kind=kind, token_ids=tuple(token_ids), text=text))
        self.transcript += token_ids

    def _record(self, action: _Action) -> str:
        """Append `action` as it was sampled, and return its text for the environment ("" if it has no token)."""
        if not action.token_ids:
            return ""
        text = self.renderer.decode(action.token_ids)
        self.segments.append(
            Segment(
                kind="action",
                token_ids=tuple(action.token_ids),
                text=text,
                logprobs=tuple(action.logprobs),
                versions=tuple(action.versions),
                finish_reason=action.finish_reason,
            )
        )
        self.transcript += action.token_ids
        self.rewards.append(0.0)
        return text

    async def _act(self) -> _Action:
        """Sample one turn. `finish_reason` is the engine's, or "wall_clock"."""
        budget = min(self.settings.max_tokens_per_turn, self._room())
        action, fruitless, faults = _Action(), 0, 0
        while True:
            sampling = self.settings.sampling.params(
                max_tokens=budget - len(action.token_ids),
                stop_token_ids=tuple(self.renderer.stop_token_ids),
                seed=self._seed(),
            )
            try:
                completion, timed_out = await self._request(self.transcript + action.token_ids, sampling)
            except ContextOverflow:  # the engine's context is smaller than max_context_tokens
                action.finish_reason = "length"
                return action
            except EngineRefused:
                raise
            except EngineFault as fault:
                faults += 1
                if isinstance(fault, _TooSlow) and fault.completion is not None:
                    action.add(fault.completion)
                    faults = 1 if fault.completion.token_ids else faults
                await self._recovered(fault, faults)
                if time.monotonic() >= self.deadline:
                    action.finish_reason = "wall_clock"
                    return action
                if len(action.token_ids) >= budget:
                    action.finish_reason = "length"
                    return action
                continue
            action.add(completion)
            faults = 0 if completion.token_ids else faults
            if completion.finish_reason != "abort":
                return action
            if timed_out:
                action.finish_reason = "wall_clock"
                return action
            if len(action.token_ids) >= budget:
                action.finish_reason = "length"
                return action
            fruitless = 0 if completion.token_ids else fruitless + 1
            if fruitless >= FRUITLESS_ABORTS:
                return action
            await asyncio.sleep(0.05 * 2**fruitless)

    async def _recovered(self, fault: EngineFault, faults: int) -> None:
        """Return once the turn may go on after `fault`, the `faults`-th in a row; raises it if it may not."""
        if self.recover is None or faults > REQUEST_FAULTS:
            raise fault
        log.info("ticket %s: a request failed, and will be made again: %s", self.ticket.id, fault)
        self.metrics["engine_faults"] = self.metrics.get("engine_faults", 0) + 1
        began = time.monotonic()
        if began >= self.deadline:
            return
        await asyncio.sleep(backoff_s(faults))
        await self.recover(fault)
        self.deadline += time.monotonic() - began

    def _seed(self) -> int | None:
        """A seed of its own for every request: the same one again would replay the same random numbers."""
        self.requests += 1
        if not self.settings.sampling.seeded:
            return None
        key = f"{self.ticket.seed}:{self.requests}".encode()
        return int.from_bytes(hashlib.blake2b(key, digest_size=4).digest(), "big") >> 1

    async def _request(self, prompt: list[int], sampling: SamplingParams) -> tuple[Completion, bool]:
        """One engine request. The second value is true when the episode's wall clock cut it short."""
        began = time.monotonic()
        limit = self.settings.limits.generate_s
        request_id = f"{self.ticket.id}.{self.ticket.attempt}.{self.requests}"
        left = max(0.0, self.deadline - began)
        wall_clock = left <= limit
        task = asyncio.create_task(
            self.engine.generate(prompt, sampling, request_id=request_id, timeout_s=limit),
            name=f"generate {request_id}",
        )
        try:
            await asyncio.wait({task}, timeout=left if wall_clock else limit + ABORT_GRACE_S)
            if task.done():
                return task.result(), False
            # Aborting hands over the tokens so far: they were sampled, so they belong to the episode.
            await asyncio.wait_for(self.engine.abort(request_id), ABORT_GRACE_S)
            await asyncio.wait({task}, timeout=ABORT_GRACE_S)
            if not wall_clock:
                handed_over = task.result() if task.done() else None
                if handed_over is not None and handed_over.finish_reason != "abort":
                    return handed_over, False
                raise _TooSlow(f"a turn took longer than limits.generate_s={limit:g} s", handed_over)
            if task.done():
                return task.result(), True
            return Completion((), (), (), "abort"), True
        except TimeoutError as error:
            raise EngineFault(f"the engine did not answer an abort within {ABORT_GRACE_S:g} s") from error
        finally:
            self.generate_s += time.monotonic() - began
            if not task.done():
                task.cancel()
                with contextlib.suppress(EngineFault, TimeoutError):
                    await asyncio.wait_for(self.engine.abort(request_id), ABORT_GRACE_S)
                await asyncio.wait({task}, timeout=ABORT_GRACE_S)

    async def _environment(self, call: Awaitable[T], limit_s: float, stage: str) -> T:
        """Await the environment within `limit_s`; whatever else it raises becomes an `EnvironmentFault`."""
        began = time.monotonic()
        try:
            async with asyncio.timeout(limit_s):
                return await call
        except EnvironmentFault:
            raise
        except TimeoutError as error:
            raise EnvironmentFault(f"{self.settings.env_id}: {stage} took longer than {limit_s:g} s") from error
        except Exception as error:
            # An environment is other people's code: its bug voids this episode, not the 63 beside it.
            log.exception("%s: %s raised", self.settings.env_id, stage)
            raise EnvironmentFault(f"{self.settings.env_id}: {stage} raised {type(error).__name__}: {error}") from error
        finally:
            self.environment_s += time.monotonic() - began

    def _messages(self, info: dict[str, Any]) -> list[Message]:
        messages = info.get("messages")
        if not isinstance(messages, list | tuple) or not all(isinstance(message, dict) for message in messages):
            raise EnvironmentFault(f"{self.settings.env_id}: info['messages'] must be a list of chat messages")
        return list(messages)

    def _settle(self, step: Step) -> StopReason | None:
        """Credit a step's reward to the last action, and say how the episode ended, if it did."""
        _, reward, terminated, truncated, info = step
        try:
            self.rewards[-1] += float(reward)
            metrics = dict(info.get("metrics") or {})
            msgspec.msgpack.encode(metrics)  # what cannot be delivered must not cost more than this episode
        except (TypeError, ValueError, OverflowError) as error:
            raise EnvironmentFault(
                f"{self.settings.env_id}: a reward or a metric is no plain value: {error}"
            ) from error
        self.metrics.update(metrics)
        if terminated:
            return StopReason.TERMINATED
        if not truncated:
            return None
        try:
            return StopReason(f"truncated_{info['truncation']}")
        except (KeyError, ValueError) as error:
            raise EnvironmentFault(
                f"{self.settings.env_id}: a truncation must name its reason in info['truncation'], "
                f"not {info.get('truncation')!r}"
            ) from error

    async def _truncate(self, reason: str, text: str) -> Episode:
        """End the episode from outside, graded as it stands; `text` is the action that was cut, if one was."""
        if not self.rewards and reason == "context":
            raise PromptTooLong(
                f"task {self._task_id()}: its prompt of {len(self.transcript)} tokens leaves no room for an action; "
                f"max_context_tokens is {self.settings.max_context_tokens}: raise it, or leave the task out"
            )
        if not self.rewards:
            raise EpisodeError(f"task {self._task_id()}: the episode ended ({reason}) before its first action token")
        step = await self._environment(self.env.atruncate(reason, text), self.settings.limits.step_s, "grading")
        ended = self._settle(step)
        if ended is None:
            raise EnvironmentFault(f"{self.settings.env_id}: atruncate({reason!r}) did not end the episode")
        return self._episode(ended)

    def _episode(self, stop_reason: StopReason) -> Episode:
        sampling = self.settings.sampling.params(
            max_tokens=self.settings.max_tokens_per_turn,
            stop_token_ids=tuple(self.renderer.stop_token_ids),
            seed=self.ticket.seed if self.settings.sampling.seeded else None,
        )
        figures = {"turns": len(self.rewards), "generate_s": self.generate_s, "environment_s": self.environment_s}
        return validate(
            Episode(
                id=self.ticket.id,
                env_id=self.settings.env_id,
                task_id=self._task_id(),
                segments=tuple(self.segments),
                turn_rewards=tuple(self.rewards),
                stop_reason=stop_reason,
                sampling=sampling,
                timings=Timings(
                    issued_at=self.issued_at,
                    finished_at=time.time(),
                    generate_s=self.generate_s,
                    environment_s=self.environment_s,
                ),
                worker=self.settings.worker,
                group_id=self.ticket.group_id,
                attempt=self.ticket.attempt,
                metrics={**self.metrics, **figures},
            )
        )
