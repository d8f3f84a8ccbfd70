"""The parts of a runtime beside its slots: where tickets come from, what is kept for later, which environments live."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Literal, Protocol
from urllib.parse import quote

from agent.episode import Episode, EpisodeError, decode, encode
from agent.patience import Unreachable, backoff_s
from agent.runtime_config import ConfigError, EnvConfig
from agent.store.protocol import StoreFault, Ticket
from envs.core import AsyncEnv, EnvironmentFault

log = logging.getLogger(__name__)

Kind = Literal["train", "evaluate"]


class NothingWorks(RuntimeError):
    """Ticket after ticket failed though store and engines answer: something is configured wrongly."""


class _Leasing(Protocol):
    async def lease(self, n: int, worker: str, wait_s: float = 0.0) -> list[Ticket]: ...


class TicketSource:
    """Leases tickets for all idle slots together, so that 64 idle slots make one request and not 64.

    `run` must be running for `next` to return. One lease request is open at a time, for as many tickets as
    slots are waiting; evaluation tickets are handed out first.
    """

    def __init__(
        self,
        store: _Leasing,
        worker: str,
        *,
        wait_s: float,
        patience_s: float,
        gate: Callable[[], Awaitable[None]],
    ) -> None:
        self._store, self._worker, self._wait_s, self._patience_s = store, worker, wait_s, patience_s
        self._gate = gate
        self._waiting: deque[asyncio.Future[Ticket]] = deque()
        self._spare: deque[Ticket] = deque()
        self._wanted = asyncio.Event()

    async def next(self) -> Ticket:
        """The next ticket for one slot."""
        if self._spare:
            return self._spare.popleft()
        future: asyncio.Future[Ticket] = asyncio.get_running_loop().create_future()
        self._waiting.append(future)
        self._wanted.set()
        return await future

    async def run(self) -> None:
        """Lease until cancelled; raises `Unreachable` when the store stays away longer than `patience_s`."""
        tries, away_since = 0, 0.0
        while True:
            await self._wanted.wait()
            await self._gate()
            await asyncio.sleep(0)  # slots that became idle in this turn of the loop join the request
            idle = sum(not future.done() for future in self._waiting)
            # From the first request that failed: before it nothing was asked, perhaps for longer than the patience.
            away_since = away_since if tries else time.monotonic()
            try:
                async with asyncio.timeout(self._wait_s + 30.0):
                    tickets = await self._store.lease(max(1, idle), self._worker, self._wait_s)
            except (StoreFault, TimeoutError) as error:
                tries += 1
                if time.monotonic() - away_since > self._patience_s:
                    raise Unreachable(
                        f"the store has not answered for {self._patience_s:g} s ({error or 'time limit'}); "
                        "start it again, or raise limits.store_patience_s"
                    ) from error
                log.warning("no tickets: %s", error or "the store did not answer in time")
                await asyncio.sleep(backoff_s(tries, most_s=5.0))
                continue
            tries = 0
            if not tickets:
                # A store without long polling must not be asked in a tight loop.
                await asyncio.sleep(0.05)
            self._hand_out(sorted(tickets, key=lambda ticket: ticket.kind != "evaluate"))

    def _hand_out(self, tickets: list[Ticket]) -> None:
        self._spare.extend(tickets)
        while self._spare and self._waiting:
            future = self._waiting.popleft()
            if not future.done():  # a slot that was cancelled while it waited
                future.set_result(self._spare.popleft())
        if not self._waiting:
            self._wanted.clear()


class Spool:
    """A folder for finished episodes that the store could not take before the runtime had to leave.

    `path=None` keeps nothing. A file is named after its episode's id, so keeping one twice is harmless.
    """

    def __init__(self, path: Path | None) -> None:
        self._path = path

    def keep(self, episode: Episode) -> bool:
        """Put `episode` on disk; False (and a line in the log) if that is not possible either."""
        if self._path is None:
            log.error("episode %s is lost: the store is away and no `spool` is configured", episode.id)
            return False
        try:
            self._path.mkdir(parents=True, exist_ok=True)
            target = self._file(episode.id)
            part = target.with_suffix(".part")
            part.write_bytes(encode(episode))
            part.replace(target)
        except OSError as error:
            log.error("episode %s is lost: cannot write to %s: %s", episode.id, self._path, error)
            return False
        log.warning("episode %s is kept in %s", episode.id, target)
        return True

    def kept(self) -> list[Episode]:
        """The episodes that are kept; a file that holds none is left where it is and logged."""
        found = []
        for file in sorted(self._path.glob("*.episode")) if self._path is not None else []:
            try:
                found.append(decode(file.read_bytes()))
            except (OSError, EpisodeError) as error:
                log.error("%s: %s", file, error)
        return found

    def forget(self, episode_id: str) -> None:
        """The store has it now."""
        if self._path is not None:
            self._file(episode_id).unlink(missing_ok=True)

    def _file(self, episode_id: str) -> Path:
        assert self._path is not None
        return self._path / f"{quote(episode_id, safe='')}.episode"


class SlotEnvs:
    """The environments of one slot: made when first needed, used again for every episode, closed with the slot.

    Held-out tickets have their own environment if there is a configuration for it. After a fault the
    environment is discarded, because nobody knows what state its machinery is in.
    """

    def __init__(
        self, make: Callable[[EnvConfig], AsyncEnv], training: EnvConfig, evaluation: EnvConfig | None, limit_s: float
    ) -> None:
        self._make, self._limit_s = make, limit_s
        self._configs: dict[Kind, EnvConfig] = {"train": training, "evaluate": evaluation or training}
        self._open: dict[Kind, AsyncEnv] = {}

    async def get(self, kind: Kind) -> AsyncEnv:
        """The environment for tickets of `kind`; raises `EnvironmentFault` when it cannot be made in time."""
        if kind not in self._open:
            config = self._configs[kind]
            try:
                async with asyncio.timeout(self._limit_s):
                    self._open[kind] = await asyncio.to_thread(self._made, config)
            except TimeoutError as error:
                raise EnvironmentFault(f"making {config.id} took longer than {self._limit_s:g} s") from error
            except EnvironmentFault:
                raise
            except Exception as error:
                # Wrong arguments stay wrong: better to say so once than to fail every ticket.
                raise ConfigError(f"`env`: cannot make {config.id}: {type(error).__name__}: {error}") from error
        return self._open[kind]

    def _made(self, config: EnvConfig) -> AsyncEnv:
        # In a thread, with the list of tasks: they may come from files, a data set, or a generator.
        env = self._make(config)
        _ = env.task_ids
        return env

    async def discard(self, kind: Kind, limit_s: float) -> None:
        """Close one environment; the next `get` makes a new one."""
        env = self._open.pop(kind, None)
        if env is not None:
            await _close(env, limit_s)

    async def close(self, limit_s: float) -> None:
        """Close them all, within `limit_s` seconds together."""
        envs, self._open = list(self._open.values()), {}
        await asyncio.gather(*(_close(env, limit_s) for env in envs))


async def _close(env: AsyncEnv, limit_s: float) -> None:
    try:
        async with asyncio.timeout(limit_s):
            await env.aclose()
    except TimeoutError:
        log.error("%s did not close within %g s", type(env).__name__, limit_s)
    except EnvironmentFault as fault:
        log.error("%s did not close: %s", type(env).__name__, fault)
