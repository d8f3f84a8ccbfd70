"""One action: the tokens of one turn, sampled in as many engine requests as it takes.

This is the one home of retries of engine requests.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field

from agent.backoff import backoff_s
from agent.engines.base import Completion, ContextOverflow, Engine, EngineBusy, EngineFault, EngineRefused, OutOfTime
from agent.engines.overtime import Overtime
from agent.engines.prompt import Prompt
from agent.episode import EpisodeError, Experts, SamplingParams
from agent.runtime.episode_clock import EpisodeClock
from agent.runtime.settings import SamplingConfig
from agent.store.protocol import Ticket

log = logging.getLogger(__name__)

ABORT_GRACE_S = 2.0
"""How long an engine may take to hand over the tokens of a request that was aborted, by its own client or from here."""

FRUITLESS_ABORTS = 5
"""After so many aborts in a row without a single token, the engine is going away: the episode is aborted."""

REQUEST_FAULTS = 5
"""A turn whose requests have failed more often than this, without a token in between, fails its episode: a request
that kills every engine it meets must end somewhere."""

Recover = Callable[[EngineFault], Awaitable[None]]
"""Returns once requests may be made again to the engine of the episode (another one behind the same object, or the
same one, which is sound); raises when that is not to be expected. See `agent.engines.pool.Seat.move`."""


@dataclass(slots=True)
class Action:
    """One turn's tokens as they were sampled, perhaps over several requests.

    `logprobs` and `versions` have one entry a token. `finish_reason` is the last request's ("stop", "length",
    "abort"), or "wall_clock" where `limits.episode_s` cut it. `experts`: see `Completion`; of the last request, which
    ran all that came before it.
    """

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    finish_reason: str = ""
    experts: Experts | None = None

    def add(self, completion: Completion) -> None:
        """Append what a request sampled; raises `EpisodeError` if its sequences differ in length."""
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
        self.experts = completion.experts

    def ended(self, finish_reason: str) -> Action:
        """The same action, ended for a reason that no request gave."""
        self.finish_reason = finish_reason
        return self


class _Pauses:
    """How long to wait for an engine that asks to come later, within a turn's patience."""

    def __init__(self, patience_s: float) -> None:
        self._left_s, self._patience_s = patience_s, patience_s
        self._count = 0

    def next_s(self, busy: EngineBusy) -> float:
        """Its own figure, or a growing one; raises `EngineFault` once the patience is used up."""
        self._count += 1
        pause = backoff_s(self._count) if busy.retry_after_s is None else busy.retry_after_s
        self._left_s -= pause
        if self._left_s < 0:
            raise EngineFault(
                f"{busy}; {self._count} requests of one turn were put off, for more than limits.engine_patience_s="
                f"{self._patience_s:g} s: run fewer episodes at once, or raise the gateway's rate"
            ) from busy
        return pause


def _sampled(task: asyncio.Task[Completion]) -> Completion:
    """What a request gave; one that its engine's client cut at the limit gave the tokens so far."""
    try:
        return task.result()
    except OutOfTime as late:
        if late.completion is None or not late.completion.token_ids:
            raise
        return late.completion


class ActionSampler:
    """Samples the actions of one episode.

    `request_limit_s` is `limits.generate_s`, the time of one request; `clock` is the episode's; `patience_s` is how
    long one turn waits for an engine that asks to come later. `generate_s` sums up the seconds spent in requests,
    `faults` counts those that failed and were made again.
    """

    def __init__(
        self,
        engine: Engine,
        ticket: Ticket,
        sampling: SamplingConfig,
        stop_token_ids: tuple[int, ...],
        *,
        request_limit_s: float,
        clock: EpisodeClock,
        recover: Recover | None,
        patience_s: float = 600.0,
    ) -> None:
        self._engine, self._ticket, self._sampling, self._recover = engine, ticket, sampling, recover
        self._stop_token_ids, self._request_limit_s, self._clock = stop_token_ids, request_limit_s, clock
        self._patience_s = patience_s
        self._requests = 0
        self.generate_s = 0.0
        self.faults = 0

    async def sample(self, prompt: Prompt, most_tokens: int, *, stop: tuple[str, ...] = ()) -> Action:
        """Sample at most `most_tokens` tokens after `prompt`. `stop`: strings that end this action, beside the usual.

        A request that failed or was aborted is followed by another one, from prompt and tokens so far. Raises
        `EngineFault` when the turn cannot go on (see `agent.runtime.rollout.rollout`), `EpisodeError` for an answer
        that nobody may train on, and what `recover` raises.
        """
        action, fruitless, faults, pauses = Action(), 0, 0, _Pauses(self._patience_s)
        sampling = self._sampling.model_copy(update={"stop": (*self._sampling.stop, *stop)}) if stop else self._sampling
        while True:
            params = sampling.params(
                max_tokens=most_tokens - len(action.token_ids),
                stop_token_ids=self._stop_token_ids,
                seed=self._next_seed(),
            )
            try:
                completion, timed_out = await self._request(prompt + action.token_ids, params)
            except ContextOverflow:  # the engine's context is smaller than max_context_tokens
                return action.ended("length")
            except EngineRefused:
                raise
            except EngineBusy as busy:
                with self._clock.stopped():
                    await asyncio.sleep(pauses.next_s(busy))
                continue
            except EngineFault as fault:
                faults += 1
                if isinstance(fault, OutOfTime) and fault.completion is not None:
                    action.add(fault.completion)
                    faults = 1 if fault.completion.token_ids else faults
                await self._recovered(fault, faults)
                if self._clock.over:
                    return action.ended("wall_clock")
                if len(action.token_ids) >= most_tokens:
                    return action.ended("length")
                continue
            action.add(completion)
            faults = 0 if completion.token_ids else faults
            if completion.finish_reason != "abort":
                return action
            if timed_out:
                return action.ended("wall_clock")
            if len(action.token_ids) >= most_tokens:
                return action.ended("length")
            fruitless = 0 if completion.token_ids else fruitless + 1
            if fruitless >= FRUITLESS_ABORTS:
                return action
            await asyncio.sleep(0.05 * 2**fruitless)

    async def _recovered(self, fault: EngineFault, faults: int) -> None:
        """Return once the turn may go on after `fault`, the `faults`-th in a row; raises it if it may not."""
        if self._recover is None or faults > REQUEST_FAULTS:
            raise fault
        log.info("ticket %s: a request failed, and will be made again: %s", self._ticket.id, fault)
        self.faults += 1
        if self._clock.over:
            return
        with self._clock.stopped():
            await asyncio.sleep(backoff_s(faults))
            await self._recover(fault)

    def _next_seed(self) -> int | None:
        """A seed of its own for every request: the same one again would replay the same random numbers."""
        self._requests += 1
        if not self._sampling.seeded:
            return None
        key = f"{self._ticket.seed}:{self._requests}".encode()
        return int.from_bytes(hashlib.blake2b(key, digest_size=4).digest(), "big") >> 1

    async def _request(self, prompt: Sequence[int], params: SamplingParams) -> tuple[Completion, bool]:
        """One engine request. The second value is true when the episode's wall clock cut it short."""
        began = time.monotonic()
        limit_s, left_s = self._request_limit_s, self._clock.left_s
        request_id = f"{self._ticket.id}.{self._ticket.attempt}.{self._requests}"
        wall_clock = left_s <= limit_s
        # Aborting hands over the tokens so far: they were sampled, so they belong to the episode.
        overtime = Overtime(left_s if wall_clock else limit_s + ABORT_GRACE_S, self._abort(request_id), ABORT_GRACE_S)
        too_long = f"a turn took longer than limits.generate_s={limit_s:g} s"
        try:
            async with overtime:
                completion = await self._engine.generate(prompt, params, request_id=request_id, timeout_s=limit_s)
        except OutOfTime as late:  # the engine's client cut it at the limit
            if overtime.reached or late.completion is None or not late.completion.token_ids:
                raise
            return late.completion, False
        except TimeoutError as error:
            if wall_clock:
                return Completion((), (), (), "abort"), True
            raise OutOfTime(too_long) from error
        except asyncio.CancelledError:
            with contextlib.suppress(EngineFault):
                await self._abort(request_id)()
            raise
        finally:
            self.generate_s += time.monotonic() - began
        if overtime.reached and not wall_clock and completion.finish_reason == "abort":
            raise OutOfTime(too_long, completion)
        return completion, overtime.reached and wall_clock

    def _abort(self, request_id: str) -> Callable[[], Awaitable[None]]:
        async def abort() -> None:
            try:
                async with asyncio.timeout(ABORT_GRACE_S):
                    await self._engine.abort(request_id)
            except TimeoutError as error:
                raise EngineFault(f"the engine did not answer an abort within {ABORT_GRACE_S:g} s") from error

        return abort
