"""The agent runtime: many episodes at once on one event loop, from leased tickets to delivered episodes.

python -m agent.runtime --config runtime.yaml
python -m agent.runtime < runtime.json        # the configuration on standard input
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import logging
import os
import signal
import sys
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Literal, Protocol, TypeVar

from agent import STARTED_BY
from agent.engines.base import Engine, EngineFault, EngineRefused
from agent.engines.pool import EnginePool, Seat
from agent.episode import Episode, EpisodeError, StopReason
from agent.patience import Unreachable, backoff_s
from agent.rollout import PromptTooLong, Renderer, RolloutSettings, rollout
from agent.runtime_config import EXAMPLE, ConfigError, EnvConfig, RuntimeConfig, load_config, parse_config
from agent.runtime_parts import NothingWorks, SlotEnvs, Spool, TicketSource
from agent.store.protocol import Ending, StoreFault, Ticket
from envs.core import AsyncEnv, EnvironmentFault

log = logging.getLogger(__name__)

T = TypeVar("T")

EVALUATION_POLL_S = 0.2
"""Seconds between two looks at an engine that has not reached an evaluation's version yet."""


class Store(Protocol):
    """What a runtime needs of `agent.store.client.StoreClient`."""

    async def lease(self, n: int, worker: str, wait_s: float = 0.0) -> list[Ticket]: ...

    async def put(self, ticket_id: str, episode: Episode) -> Ending: ...

    async def fail(self, ticket_id: str, reason: str, retry: bool = True, worker: str = "") -> Ending: ...

    async def release_worker(self, worker: str) -> int: ...

    async def close(self) -> None: ...


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
    request that its engine failed is made again by `agent.rollout`, at the engine that the pool names, so an engine
    that dies costs tokens and no episode. Any other fault, and a request that keeps failing, fails the ticket; the
    store deals it again up to its cap. Nothing else tries twice.
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
    ) -> None:
        self.config = config
        self.counters: Counter[str] = Counter()
        self._store = store
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
        self._spool = Spool(Path(config.spool) if config.spool else None)
        self._state = ["idle"] * config.concurrency
        self._busy_s = 0.0
        self._busy_since: dict[int, float] = {}
        self._generate_s = self._environment_s = 0.0
        self._reward = 0.0
        self._faults_in_a_row = 0
        self._started = time.monotonic()

    async def run(self) -> None:
        """Run episodes until cancelled.

        Raises `Unreachable` when store or engines stay away, `NothingWorks` when
        one ticket after the other fails, and `ConfigError` when the environment cannot be made as configured.
        """
        self._started = time.monotonic()
        try:
            # A predecessor of this name may have died with tickets in its hands.
            await self._told_store(lambda: self._store.release_worker(self._worker), f"the start of {self._worker}")
            await self._deliver_kept()
            async with asyncio.TaskGroup() as group:
                group.create_task(self._pool.run(), name="engines")
                group.create_task(self._tickets.run(), name="lease")
                group.create_task(self._log_progress(), name="progress")
                for index in range(self.config.concurrency):
                    group.create_task(self._slot(index), name=f"slot {index}")
        except ExceptionGroup as group_error:
            # It stops for the first reason; the others are the same one, seen from other slots.
            if (first := _first_known(group_error)) is not None:
                raise first from None
            raise
        finally:
            # The slots are gone: what this worker still holds at the store goes back to other workers.
            with contextlib.suppress(StoreFault, TimeoutError):
                await asyncio.wait_for(self._store.release_worker(self._worker), self.config.limits.shutdown_s / 4)
            log.info("stopped; %s", self.progress())

    async def _slot(self, index: int) -> None:
        limits = self.config.limits
        envs = SlotEnvs(self._make_env, self.config.env, self.config.evaluation_env, limits.reset_s)
        faults = 0
        try:
            while True:
                self._state[index] = "idle"
                ticket = await self._tickets.next()
                self._busy_since[index] = time.monotonic()
                try:
                    clean = await self._run_ticket(index, ticket, envs)
                finally:
                    self._busy_s += time.monotonic() - self._busy_since.pop(index)
                faults = 0 if clean else faults + 1
                if faults:
                    self._state[index] = "backing off"
                    await asyncio.sleep(backoff_s(faults))
        finally:
            self._state[index] = "closed"
            await envs.close(limits.shutdown_s / 4)

    async def _run_ticket(self, index: int, ticket: Ticket, envs: SlotEnvs) -> bool:
        """One ticket to its end: delivered (True) or failed (False)."""
        self._state[index] = "running"
        try:
            async with self._pool.seat() as seat:
                await self._await_pinned_version(ticket, seat)
                env = await envs.get(ticket.kind)
                settings = self._settings(ticket.kind)
                episode = await rollout(ticket, env, seat, self._renderer, settings, recover=seat.move)
                _check_pinned_version(ticket, episode)
        except EngineFault as fault:
            return await self._fail(ticket, "engine", fault)
        except EnvironmentFault as fault:
            await envs.discard(ticket.kind, self.config.limits.shutdown_s / 4)
            return await self._fail(ticket, "environment", fault)
        except PromptTooLong as error:
            return await self._fail(ticket, "rejected", error, retry=False)
        except EpisodeError as error:
            return await self._fail(ticket, "rejected", error)
        self._state[index] = "delivering"
        return await self._deliver(episode)

    def _settings(self, kind: Literal["train", "evaluate"]) -> RolloutSettings:
        config = self.config
        evaluating = kind == "evaluate"
        return RolloutSettings(
            env_id=(config.evaluation_env or config.env).id if evaluating else config.env.id,
            sampling=(config.evaluation_sampling or config.sampling) if evaluating else config.sampling,
            max_context_tokens=config.max_context_tokens,
            max_tokens_per_turn=config.max_tokens_per_turn,
            limits=config.limits,
            worker=self._worker,
        )

    async def _await_pinned_version(self, ticket: Ticket, seat: Seat) -> None:
        """An evaluation waits until its engine has the version it is pinned to, and is refused once that is past."""
        if ticket.pinned_version is None:
            return
        deadline = time.monotonic() + self.config.limits.generate_s
        while True:
            try:
                version = (await seat.health()).version
            except EngineRefused:
                raise
            except EngineFault as fault:
                await seat.move(fault)
                continue
            if version == ticket.pinned_version:
                return
            if version > ticket.pinned_version or time.monotonic() > deadline:
                raise EpisodeError(f"evaluation is pinned to version {ticket.pinned_version}, the engine has {version}")
            await asyncio.sleep(EVALUATION_POLL_S)

    async def _fail(self, ticket: Ticket, kind: str, error: Exception, *, retry: bool = True) -> bool:
        """Give the ticket's capacity back. The store decides whether it has attempts left."""
        self.counters[kind] += 1
        reason = f"{kind}: {error}"
        ending = await self._told_store(
            lambda: self._store.fail(ticket.id, reason, retry, self._worker), f"the failure of ticket {ticket.id}"
        )
        log.warning("ticket %s, attempt %d, %s: %s", ticket.id, ticket.attempt, ending.outcome, reason)
        self._faults_in_a_row += 1
        most = self.config.most_faults_in_a_row
        if self._faults_in_a_row > most:
            raise NothingWorks(f"more than {most} tickets in a row have failed, the last one with: {reason}")
        return False

    async def _deliver(self, episode: Episode) -> bool:
        """Hold a finished episode until the store has acknowledged it."""
        taken = False

        async def put() -> Ending:
            nonlocal taken
            ending = await self._store.put(episode.id, episode)
            taken = True
            return ending

        try:
            ending = await self._told_store(put, f"episode {episode.id}")
        except (Unreachable, asyncio.CancelledError):
            if not taken:
                self._spool.keep(episode)
            raise
        if ending.outcome not in ("accepted", "duplicate"):
            log.info("episode %s: %s %s", episode.id, ending.outcome, ending.reason)
        self.counters[episode.stop_reason.value] += 1
        if episode.stop_reason is StopReason.ABORTED:  # the store deals its ticket again
            return False
        self.counters["episodes"] += 1
        self.counters["action_tokens"] += episode.action_tokens
        self._generate_s += episode.timings.generate_s
        self._environment_s += episode.timings.environment_s
        self._reward += episode.reward
        self._faults_in_a_row = 0
        return True

    async def _deliver_kept(self) -> None:
        """Deliver what an earlier runtime had to keep; each once, for the slots must not wait for a bad one."""
        for episode in await asyncio.to_thread(self._spool.kept):
            try:
                async with asyncio.timeout(self.config.limits.put_s):
                    ending = await self._store.put(episode.id, episode)
            except (StoreFault, TimeoutError) as error:
                log.error("kept episode %s stays in the spool: %s", episode.id, error or "time limit")
                continue
            log.info("kept episode %s: %s %s", episode.id, ending.outcome, ending.reason)
            self._spool.forget(episode.id)

    async def _told_store(self, message: Callable[[], Awaitable[T]], what: str) -> T:
        """Say something to the store until it has heard it; returns its answer.

        Shielded: a finished episode is the most expensive thing here, so a shutdown gives it a last chance. The
        store takes everything idempotently by id, so an answer that got lost costs one more message.
        """
        telling = asyncio.create_task(self._tell_store(message, what), name=what)
        try:
            return await asyncio.shield(telling)
        except asyncio.CancelledError:
            await asyncio.wait({telling}, timeout=self.config.limits.shutdown_s / 4)
            if not telling.done():
                telling.cancel()
                await asyncio.wait({telling})
                log.error("the store did not hear of %s before the shutdown", what)
            elif not telling.cancelled() and (error := telling.exception()):
                log.error("%s", error)
            raise

    async def _tell_store(self, message: Callable[[], Awaitable[T]], what: str) -> T:
        limits = self.config.limits
        deadline = time.monotonic() + limits.store_patience_s
        tries = 0
        while True:
            try:
                async with asyncio.timeout(limits.put_s):
                    return await message()
            except (StoreFault, TimeoutError) as error:
                tries += 1
                self.counters["store_retries"] += 1
                if time.monotonic() > deadline:
                    raise Unreachable(
                        f"the store at {self.config.store} has not taken {what} for {limits.store_patience_s:g} s "
                        f"({error or 'time limit'}); start it again, or raise limits.store_patience_s"
                    ) from error
                if tries == 1:
                    log.warning("%s waits for the store: %s", what, error or "time limit")
            await asyncio.sleep(backoff_s(tries, most_s=5.0))

    def busy_share(self) -> float:
        """The share of all slots' time since the start in which they held a ticket."""
        now = time.monotonic()
        busy = self._busy_s + sum(now - since for since in self._busy_since.values())
        return busy / max(1e-9, (now - self._started) * self.config.concurrency)

    def progress(self) -> str:
        """One line for the log: what was done since the start, and what the slots do now."""
        elapsed = max(1e-9, time.monotonic() - self._started)
        episodes = self.counters["episodes"]
        states = ", ".join(f"{count} {state}" for state, count in sorted(Counter(self._state).items()))
        ends = ", ".join(f"{self.counters[r.value]} {r.value}" for r in StopReason if self.counters[r.value])
        faults = ", ".join(
            f"{self.counters[kind]} {kind}" for kind in ("engine", "environment", "rejected") if self.counters[kind]
        )
        rate = self.counters["action_tokens"] / elapsed
        return (
            f"{episodes} episodes in {elapsed:.0f} s ({ends or 'none ended'}); faults: {faults or 'none'}; "
            f"mean reward {self._reward / max(1, episodes):.3f}; {rate:.0f} tokens/s; "
            f"an episode spends {self._generate_s / max(1, episodes):.2f} s in the engine and "
            f"{self._environment_s / max(1, episodes):.2f} s in the environment; busy {self.busy_share():.0%}; "
            f"slots: {states}; engines: {self._pool.loads()}"
        )

    async def _log_progress(self) -> None:
        while True:
            await asyncio.sleep(self.config.progress_every_s)
            log.info("%s", self.progress())


def _first_known(group: ExceptionGroup) -> Exception | None:
    """The first error of `group` if it holds nothing but errors that say what to do; None if there is a bug in it."""
    known, bugs = group.split((Unreachable, NothingWorks, ConfigError))
    if bugs is not None or known is None:
        return None
    error: Exception = known
    while isinstance(error, ExceptionGroup):
        error = error.exceptions[0]
    return error


def _check_pinned_version(ticket: Ticket, episode: Episode) -> None:
    versions = {version for action in episode.actions for version in action.versions}
    if ticket.pinned_version is not None and versions - {ticket.pinned_version}:
        raise EpisodeError(
            f"evaluation is pinned to version {ticket.pinned_version}, tokens were sampled by {sorted(versions)}"
        )


async def _watch_parent(parent: int) -> None:
    """Return when the process that started this one is gone."""
    while os.getppid() == parent:  # noqa: ASYNC110 - nothing tells of a parent's death; one has to ask
        await asyncio.sleep(1.0)


async def _main(config: RuntimeConfig, *, exit_with_parent: bool) -> int:
    # Imported here: `--help` and a configuration error need none of it.
    from agent.chat import ChatRenderer, ChatTemplateError
    from agent.engines.client import HttpEngine
    from agent.store.client import StoreClient
    from envs import make_core

    try:
        renderer = await asyncio.to_thread(ChatRenderer.from_pretrained, Path(config.model))
    except ChatTemplateError as error:
        print(f"agent.runtime: `model`: {error}", file=sys.stderr)
        return 2
    store = StoreClient(config.store)
    engines: dict[str, Engine] = {url: HttpEngine(url) for url in config.engines}
    runtime = Runtime(
        config,
        store=store,
        engines=engines,
        renderer=renderer,
        make_env=lambda env: make_core(env.id, **env.kwargs),
    )
    loop = asyncio.get_running_loop()
    running = asyncio.create_task(runtime.run(), name="runtime")
    signals = 0

    def stop(why: str) -> None:
        nonlocal signals
        signals += 1
        if signals == 1:
            log.info("%s: stopping; a second signal forces it", why)
            running.cancel()
            loop.call_later(config.limits.shutdown_s, force, "the shutdown took too long")
        else:
            force(why)

    def force(why: str) -> None:
        # Nothing is left behind even so: sandboxes die with this process, and the store's lease runs out.
        log.error("%s: leaving at once", why)
        logging.shutdown()
        os._exit(130)

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop, signal.Signals(number).name)
    watch = asyncio.create_task(_watch_parent(STARTED_BY), name="parent") if exit_with_parent else None
    if watch is not None:
        watch.add_done_callback(lambda task: None if task.cancelled() else stop("the parent process is gone"))
    try:
        await running
    except asyncio.CancelledError:
        return 0
    except (Unreachable, NothingWorks, ConfigError) as error:
        print(f"agent.runtime: {error}", file=sys.stderr)
        return 2 if isinstance(error, ConfigError) else 3
    finally:
        if watch is not None:
            watch.cancel()
            await asyncio.wait({watch})
        await asyncio.gather(store.close(), *(engine.close() for engine in engines.values()), return_exceptions=True)
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    """Command line; returns the exit status (0 stopped, 2 bad configuration, 3 store or engines unreachable)."""
    parser = argparse.ArgumentParser(
        prog="python -m agent.runtime",
        description="Run episodes: tickets from the store, tokens from the engines, episodes back to the store.",
        epilog="Example configuration:\n\n" + EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--config", metavar="FILE", help="YAML or JSON; without it, read from standard input")
    parser.add_argument("--exit-with-parent", action="store_true", help="stop when the starting process is gone")
    arguments = parser.parse_args(argv)
    try:
        if arguments.config:
            config = load_config(Path(arguments.config))
        elif sys.stdin.isatty():
            parser.error("give --config FILE, or the configuration on standard input")
        else:
            config = parse_config(sys.stdin.read(), source="standard input")
    except ConfigError as error:
        print(f"agent.runtime: {error}", file=sys.stderr)
        return 2
    logging.basicConfig(
        level=config.log_level.upper(), format="%(asctime)s %(levelname)s %(name)s: %(message)s", stream=sys.stderr
    )
    return asyncio.run(_main(config, exit_with_parent=arguments.exit_with_parent))


if __name__ == "__main__":
    raise SystemExit(main())
