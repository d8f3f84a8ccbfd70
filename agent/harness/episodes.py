"""One ticket, one harness, one episode: the environment is reset, the harness runs, and somebody grades."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator

from agent.engines.base import Engine, EngineFault
from agent.episode import Episode, StopReason
from agent.harness.call import posts_of
from agent.harness.door import SessionDoor
from agent.harness.process import HarnessFailed, Solve, harness_of
from agent.harness.session import Session
from agent.harness.task import task_at
from agent.runtime.asked_engine import AskedEngine
from agent.runtime.engine_requests import ABORT_GRACE_S, ActionSampler, Recover
from agent.runtime.environment_calls import EnvironmentCalls
from agent.runtime.episode_clock import EpisodeClock
from agent.runtime.record import record
from agent.runtime.rollout import PromptTooLong, Renderer, RunEpisode, task_of, tool_format_of
from agent.runtime.settings import ConfigError, HarnessConfig, RolloutSettings, RuntimeConfig
from agent.runtime.watching.watch import EpisodeWatch, figures_of
from agent.store.protocol import Ticket
from agent.wire.errors import ApiError
from envs.asking.model import CountedModel
from envs.core import AsyncEnv, EnvironmentFault

log = logging.getLogger(__name__)

_STOP_S = 10.0
_SETTLE_S = 3 * ABORT_GRACE_S
"""How long requests may take to hand over what was sampled when the episode's time is over."""


@contextlib.asynccontextmanager
async def harness_turns(config: RuntimeConfig) -> AsyncIterator[RunEpisode]:
    """Episodes that the harness of `config` makes, for as long as the door of its sessions is open.

    Raises `ConfigError` without a harness, for a function that is not there, and for a port that cannot be had.
    """
    if config.harness is None:
        raise ConfigError("`harness` is missing: say which agent makes the turns, or run `python -m agent.runtime`")
    for name in ("httpx", "httpx2"):  # clients inside this process say every address, and so every session's secret
        logging.getLogger(name).setLevel(logging.WARNING)
    solve = await asyncio.to_thread(harness_of, config.harness)
    async with SessionDoor.listening(config.harness) as door:
        yield HarnessEpisodes(config.harness, door, solve)


def _one_at_a_time(recover: Recover) -> Recover:
    """A seat is left once for several requests that failed side by side, not by each at the same time."""
    lock = asyncio.Lock()

    async def recovered(fault: EngineFault) -> None:
        async with lock:
            await recover(fault)

    return recovered


class HarnessEpisodes:
    """Makes an episode of a ticket as `agent.runtime.rollout.rollout` does, but the harness makes the turns.

        reset -> session opened -> harness started -> [ request -> action ]* -> it ends -> graded -> Episode

    How it ends, and what that means:

    - by itself (exit code 0, or the function returns): `TERMINATED`. With `reward: environment`, its answer is the
      environment's last step: what was posted as the answer, else what its last reply says, if that calls no tool. An
      environment that goes on after that, or had no answer, is graded as it stands. With `reward: posted` the posts
      count, and none at all is a fault.
    - by the episode's clock (`limits.episode_s`): `TRUNCATED_WALL_CLOCK`, graded as it stands. With `reward: posted`,
      what was posted by then, perhaps nothing.
    - with an error: a fault of the environment's, never a reward of 0. Two exceptions: once a reward was posted, it
      stands; and an agent that gives up as its prompt has become too long is `TRUNCATED_CONTEXT`.
    - an engine that goes away: `ABORTED`.
    """

    def __init__(self, config: HarnessConfig, door: SessionDoor, solve: Solve) -> None:
        self._config, self._door, self._solve = config, door, solve

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
    ) -> Episode:
        """As `agent.runtime.rollout.rollout`, in what it raises and when it is cancelled too."""
        watch = watch or EpisodeWatch()
        calls = EnvironmentCalls(env, settings.env_id, settings.limits)
        task_id = task_of(ticket, calls, settings.env_id)
        with watch.episode(ticket, task_id, settings.env_id) as span:
            episode = await self._episode(ticket, task_id, calls, engine, renderer, settings, recover, watch)
            span.set_attributes(figures_of(episode))
        watch.ended(episode)
        return episode

    async def _episode(
        self,
        ticket: Ticket,
        task_id: str,
        calls: EnvironmentCalls,
        engine: Engine,
        renderer: Renderer,
        settings: RolloutSettings,
        recover: Recover | None,
        watch: EpisodeWatch,
    ) -> Episode:
        issued_at, clock = time.time(), EpisodeClock(settings.limits.episode_s)
        if recover is not None:
            recover = _one_at_a_time(recover)
        seeded = settings.sampling.seeded
        asked = CountedModel(AskedEngine(engine, ticket, renderer, settings.limits, recover, seeded=seeded))
        with watch.stage("reset"):
            opening = await calls.reset(ticket.seed, task_id, tool_format_of(renderer), asked)
        url = self._door.new_url()
        task = task_at(
            url,
            task_id=task_id,
            seed=ticket.seed,
            messages=opening.messages,
            tools=opening.tools,
            model=self._config.model,
            evaluation=ticket.kind == "evaluate",
        )
        sampler = ActionSampler(
            engine,
            ticket,
            settings.sampling,
            tuple(renderer.stop_token_ids),
            request_limit_s=settings.limits.generate_s,
            clock=clock,
            recover=recover,
            patience_s=settings.limits.engine_patience_s,
        )
        session = Session(
            task,
            calls,
            sampler,
            renderer,
            settings,
            max_branches=self._config.max_branches,
            environment_grades=self._config.reward == "environment",
            watch=watch,
        )
        with self._door.open(url, session):
            try:
                failure = await self._run(session, clock)
                with watch.stage("grade"):
                    ended = await self._graded(session, calls, failure)
            finally:
                await session.close()
        chains = [branch for chain in session.chains if (branch := chain.as_branch()) is not None]
        return record(
            ticket,
            settings,
            task_id=task_id,
            segments=chains[0].segments,
            turn_rewards=chains[0].turn_rewards,
            branches=chains[1:],
            stop_reason=ended,
            stop_token_ids=renderer.stop_token_ids,
            issued_at=issued_at,
            sampler=sampler,
            calls=calls,
            asked=asked,
            metrics={**session.metrics, "branches": len(chains) - 1},
        )

    async def _run(self, session: Session, clock: EpisodeClock) -> HarnessFailed | None:
        """Run the harness until it ends or its session is over; how it failed, if it did by itself."""
        work = asyncio.ensure_future(self._solve(session.task))
        over = asyncio.ensure_future(session.over.wait())
        try:
            while not (work.done() or over.done() or clock.over):
                # Again: the clock may have stood still meanwhile.
                await asyncio.wait({work, over}, timeout=clock.left_s, return_when=asyncio.FIRST_COMPLETED)
            if work.done():
                return self._returned(session, work.result())
            if not over.done():
                await session.settle(_SETTLE_S)
                session.ended = session.ended or StopReason.TRUNCATED_WALL_CLOCK
            return None
        except HarnessFailed as failure:
            return failure
        finally:
            over.cancel()
            work.cancel()
            _, still = await asyncio.wait({over, work}, timeout=self._config.grace_s + _STOP_S)
            if still:
                log.error("task %s: the harness does not end when it is cancelled", session.task.task_id)
            await session.close()

    def _returned(self, session: Session, value: object) -> HarnessFailed | None:
        """Take what a function has returned for the post that it is."""
        for kind, posted in posts_of(value).items():
            if kind == "answer":
                session.answer = posted
            elif self._config.reward != "posted":
                return HarnessFailed(f"it returned the reward {posted}, and runtime.harness.reward is `environment`")
            else:
                try:
                    session.post(posted, {})
                except ApiError as error:
                    return HarnessFailed(error.message)
        return None

    async def _graded(self, session: Session, calls: EnvironmentCalls, failure: HarnessFailed | None) -> StopReason:
        """How the episode ends, with its reward credited. Raises what makes it void."""
        if session.fault is not None:
            raise session.fault
        heard = any(turn.delivered for chain in session.chains for turn in chain.turns)
        if session.ended is StopReason.ABORTED:
            if not heard:
                raise EngineFault("the engine went away before the harness had a reply")
            return session.ended
        if session.overflowed and not heard:
            raise PromptTooLong(
                f"task {session.task.task_id}: the first prompt of the harness leaves no room for an action; raise "
                "max_context_tokens, or leave the task out"
            )
        if not heard:
            reason = f": {failure}" if failure else "; does it ask at OPENAI_BASE_URL or ANTHROPIC_BASE_URL?"
            raise EnvironmentFault(f"the harness ended without a reply that it was given{reason}")
        ended = session.ended or StopReason.TERMINATED
        # Whoever is refused because the session is over may well fail of it.
        if failure is not None and session.ended is None and session.posted is None and session.outcome is None:
            if not session.overflowed:
                raise EnvironmentFault(f"the harness failed: {failure}") from failure
            ended = StopReason.TRUNCATED_CONTEXT
        if self._config.reward == "posted":
            if session.posted is None and ended is StopReason.TERMINATED:
                raise EnvironmentFault("the harness ended well and posted no reward (runtime.harness.reward is posted)")
            return ended
        if session.outcome is not None:
            assert session.outcome.ended is not None
            return session.outcome.ended
        if ended is StopReason.TERMINATED and (answer := session.answer or session.last_words):
            await session.step(answer)
        if session.outcome is None:
            reason = "turns" if ended is StopReason.TERMINATED else ended.value.removeprefix("truncated_")
            session.take(await calls.truncate(reason, ""))
        return ended
