"""The agent runtime: many episodes at once on one event loop, from leased tickets to delivered episodes."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Callable

from agent.backoff import Unreachable, backoff_s
from agent.doors.door import DoorFault
from agent.engines.base import Engine, EngineFault
from agent.engines.pool import EnginePool, Seat
from agent.episode import Episode, EpisodeError, StopReason
from agent.runtime.assignments import Assignment, UnknownEnvironment, assignment_of
from agent.runtime.delivery import Delivery, Store
from agent.runtime.progress import NOT_KEPT, Progress
from agent.runtime.rollout import PromptTooLong, Renderer, RunEpisode, rollout
from agent.runtime.settings import ConfigError, EnvConfig, RolloutSettings, RuntimeConfig
from agent.runtime.slot_environments import SlotEnvironments
from agent.runtime.tickets import TicketSource
from agent.runtime.watching.watch import EpisodeWatch, Watching
from agent.store.protocol import Ticket
from envs.core import AsyncEnv, EnvironmentFault

log = logging.getLogger(__name__)


class NothingWorks(RuntimeError):
    """Ticket after ticket failed though store and engines answer: something is configured wrongly."""


class Runtime:
    """N episode slots over one store and some engines. The life of one slot:

            ┌────────────────────────────────────────────────────────────────────────────┐
            ▼                                                                            │
          idle ──ticket leased──▶ running ──episode──▶ delivering ──acknowledged─────────┤
                                    │  │                    └─ store away: again, until store_patience_s
                                    │  └─ EnvironmentFault, EngineFault, EpisodeError    │
                                    │        └─▶ ticket failed (redealt) ──▶ backing off ┘
                                    └─ cancelled ─▶ engine request aborted ─▶ environment closed ─▶ gone

    A slot holds a ticket from the lease to the acknowledgement (or the failure); the store counts it as leased
    for as long. Tickets are leased for all idle slots together, one request at a time. Every retry has one home. A
    request that its engine failed is made again by `agent.runtime.engine_requests`, at the engine that the pool
    names, so an engine that dies costs tokens and no episode. Any other fault, and a request that keeps failing, fails
    the ticket; the store deals it again up to its cap. Nothing else tries twice.
    Delivery is no retry: the episode is done, and it is held until the store has it on disk (or, when the runtime
    must leave first, until it lies in the spool).

        runtime = Runtime(config, store=client, engines={url: HttpEngine(url)}, renderer=renderer, make_env=make)
        task = asyncio.create_task(runtime.run())   # runs until it is cancelled, or the store or engines stay away
        task.cancel()                               # aborts, gives tickets back, closes environments
        await task                                  # within limits.shutdown_s

    `run` closes what it opened (environments); store, engines and renderer stay their owner's.
    """

    def __init__(
        self,
        config: RuntimeConfig,
        *,
        store: Store,
        engines: dict[str, Engine],
        renderer: Renderer,
        make_env: Callable[[EnvConfig], AsyncEnv],
        watching: Watching | None = None,
        run_episode: RunEpisode = rollout,
    ) -> None:
        self.config = config
        self.watching = watching or Watching()
        self._run_episode = run_episode
        self.progress = Progress(config.concurrency)
        self._renderer = renderer
        self._make_env = make_env
        self._worker = config.worker_name
        limits = config.limits
        self._pool = EnginePool(
            engines,
            patience_s=limits.engine_patience_s,
            check_every_s=limits.engine_check_every_s,
            check_s=limits.engine_check_s,
        )
        self._tickets = TicketSource(
            store, self._worker, wait_s=config.lease_wait_s, patience_s=limits.store_patience_s, gate=self._pool.ready
        )
        self._delivery = Delivery(store, config, self.progress.counters)
        self._faults_in_a_row = 0

    @property
    def counters(self) -> Counter[str]:
        """What has happened so far; see `agent.runtime.progress.Progress`."""
        return self.progress.counters

    @property
    def engines(self) -> EnginePool:
        """The engines that episodes use."""
        return self._pool

    @property
    def worker(self) -> str:
        """What the store knows it by."""
        return self._worker

    async def run(self) -> None:
        """Run episodes until cancelled.

        Raises `Unreachable` when store or engines stay away, `NothingWorks` when one ticket after the other fails,
        `ConfigError` when the environment cannot be made as configured, and `DoorFault` where one of them refuses the
        shared key.
        """
        self.progress.start()
        try:
            await self._delivery.begin()
            async with asyncio.TaskGroup() as group:
                group.create_task(self._pool.run(), name="engines")
                group.create_task(self._tickets.run(), name="lease")
                group.create_task(self._log_progress(), name="progress")
                for index in range(self.config.concurrency):
                    group.create_task(self._slot(index), name=f"slot {index}")
        except ExceptionGroup as group_error:
            # It stops for the first reason; the others are the same one, seen from other slots.
            if (first := _first_that_says_what_to_do(group_error)) is not None:
                raise first from None
            raise
        finally:
            # The slots are gone: what this worker still holds at the store goes back to other workers.
            await self._delivery.end()
            log.info("stopped; %s", self._progress_line())

    async def _slot(self, index: int) -> None:
        limits = self.config.limits
        envs = SlotEnvironments(self._make_env, limits.reset_s)
        faults = 0
        try:
            while True:
                self.progress.state(index, "idle")
                ticket = await self._tickets.next()
                self.progress.ticket_begins(index)
                try:
                    with self.watching.ticket(ticket, index) as watch:
                        clean = await self._run_ticket(index, ticket, envs, watch)
                finally:
                    self.progress.ticket_ends(index)
                faults = 0 if clean else faults + 1
                if faults:
                    self.progress.state(index, "backing off")
                    await asyncio.sleep(backoff_s(faults))
        finally:
            self.progress.state(index, "closed")
            await envs.close(limits.shutdown_s / 4)

    async def _run_ticket(self, index: int, ticket: Ticket, envs: SlotEnvironments, watch: EpisodeWatch) -> bool:
        """One ticket to its end: delivered (True) or failed (False)."""
        self.progress.state(index, "running")
        key = (ticket.kind, ticket.environment)
        try:
            assignment = assignment_of(self.config, ticket)
            async with self._pool.seat() as seat:
                watch.sits(lambda: seat.name)
                await self._await_pinned_version(ticket, seat)
                env = await envs.get(key, assignment.env)
                settings = self._settings(assignment)
                episode = await self._run_episode(
                    ticket, env, seat, self._renderer, settings, recover=seat.move, watch=watch
                )
                _check_pinned_version(ticket, episode)
        except EngineFault as fault:
            return await self._fail(ticket, "engine", fault, watch)
        except EnvironmentFault as fault:
            await envs.discard(key, self.config.limits.shutdown_s / 4)
            return await self._fail(ticket, "environment", fault, watch)
        except (PromptTooLong, UnknownEnvironment) as error:
            return await self._fail(ticket, "rejected", error, watch, retry=False)
        except EpisodeError as error:
            return await self._fail(ticket, "rejected", error, watch)
        self.progress.state(index, "delivering")
        watch.delivering()
        return await self._deliver(episode)

    def _settings(self, assignment: Assignment) -> RolloutSettings:
        return RolloutSettings(
            env_id=assignment.env.id,
            sampling=assignment.sampling,
            max_context_tokens=assignment.max_context_tokens,
            max_tokens_per_turn=assignment.max_tokens_per_turn,
            limits=self.config.limits,
            worker=self._worker,
            environment=assignment.name,
        )

    async def _await_pinned_version(self, ticket: Ticket, seat: Seat) -> None:
        """An evaluation waits until its engine has the version it is pinned to, and is refused once that is past."""
        if ticket.pinned_version is None:
            return
        deadline = time.monotonic() + self.config.limits.generate_s
        while True:
            try:
                version = await seat.version()
            except EngineFault as fault:
                await seat.move(fault)
                continue
            if version == ticket.pinned_version:
                return
            if version > ticket.pinned_version or time.monotonic() > deadline:
                raise EpisodeError(f"evaluation is pinned to version {ticket.pinned_version}, the engine has {version}")

    async def _fail(
        self, ticket: Ticket, kind: str, error: Exception, watch: EpisodeWatch, *, retry: bool = True
    ) -> bool:
        """Give the ticket's capacity back. The store decides whether it has attempts left."""
        reason = f"{kind}: {error}"
        watch.failed(reason)
        ending = await self._delivery.failure(ticket, reason, retry=retry)
        log.warning("ticket %s, attempt %d, %s: %s", ticket.id, ticket.attempt, ending.outcome, reason)
        return self._failed(kind, reason)

    def _failed(self, kind: str, reason: str) -> bool:
        """Count a failed ticket; always False. Raises `NothingWorks` after too many in a row."""
        self.counters[kind] += 1
        self._faults_in_a_row += 1
        most = self.config.most_faults_in_a_row
        if self._faults_in_a_row > most:
            raise NothingWorks(f"more than {most} tickets in a row have failed, the last one with: {reason}")
        return False

    async def _deliver(self, episode: Episode) -> bool:
        """True once the store has it and its ticket is done; False if its ticket is dealt again."""
        ending = await self._delivery.episode(episode)
        if ending.outcome not in ("accepted", "duplicate"):
            log.info("episode %s: %s %s", episode.id, ending.outcome, ending.reason)
        self.progress.delivered(episode, ending.outcome)
        if ending.outcome in ("retry", "given_up"):
            return self._failed("rejected", f"the store does not keep episode {episode.id}: {ending.reason}")
        if episode.stop_reason is StopReason.ABORTED or ending.outcome in NOT_KEPT:
            return False
        self._faults_in_a_row = 0
        return True

    async def _log_progress(self) -> None:
        while True:
            await asyncio.sleep(self.config.progress_every_s)
            log.info("%s", self._progress_line())

    def _progress_line(self) -> str:
        return f"{self.progress.line()}; engines: {self._pool.loads()}"


def _first_that_says_what_to_do(group: ExceptionGroup) -> Exception | None:
    """The first error of `group` if it holds nothing but errors that say what to do; None if there is a bug in it."""
    known, bugs = group.split((Unreachable, NothingWorks, ConfigError, DoorFault))
    if bugs is not None or known is None:
        return None
    error: Exception = known
    while isinstance(error, ExceptionGroup):
        error = error.exceptions[0]
    return error


def _check_pinned_version(ticket: Ticket, episode: Episode) -> None:
    versions = episode.sampled_by
    if ticket.pinned_version is not None and set(versions) - {ticket.pinned_version}:
        raise EpisodeError(
            f"evaluation is pinned to version {ticket.pinned_version}, tokens were sampled by {versions}"
        )
