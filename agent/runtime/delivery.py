"""What a runtime says to its store: finished episodes, failed tickets, and that it is gone."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Protocol, TypeVar

from agent.backoff import Unreachable, backoff_s
from agent.doors.door import DoorFault
from agent.episode import Episode
from agent.runtime.settings import RuntimeConfig
from agent.runtime.spool import Spool
from agent.store.protocol import Ending, StoreFault, Ticket

log = logging.getLogger(__name__)

T = TypeVar("T")


class Store(Protocol):
    """What a runtime needs of `agent.store.client.StoreClient`."""

    async def lease(self, n: int, worker: str, wait_s: float = 0.0) -> list[Ticket]: ...

    async def put(self, ticket_id: str, episode: Episode) -> Ending: ...

    async def fail(self, ticket_id: str, reason: str, retry: bool = True, worker: str = "") -> Ending: ...

    async def release_worker(self, worker: str) -> int: ...

    async def close(self) -> None: ...


class Delivery:
    """Says everything until the store has heard it, for `limits.store_patience_s`.

    The store takes everything idempotently by id, so an answer that got lost costs one more message. A finished
    episode is the most expensive thing here: a shutdown gives it a last chance, and if that does not help either it
    goes to the spool, from which the next runtime delivers it. `counters["store_retries"]` counts messages that were
    not heard.
    """

    def __init__(self, store: Store, config: RuntimeConfig, counters: Counter[str]) -> None:
        self._store, self._address, self._counters = store, config.store, counters
        self._worker, self._limits = config.worker_name, config.limits
        self._spool = Spool(Path(config.spool) if config.spool else None)

    async def begin(self) -> None:
        """Give back what a predecessor of this name may have died with, and deliver what it had to keep."""
        await self._tell(lambda: self._store.release_worker(self._worker), f"the start of {self._worker}")
        await self._deliver_kept()

    async def failure(self, ticket: Ticket, reason: str, *, retry: bool) -> Ending:
        """Give the ticket's capacity back; raises `Unreachable`."""
        return await self._tell(
            lambda: self._store.fail(ticket.id, reason, retry, self._worker), f"the failure of ticket {ticket.id}"
        )

    async def episode(self, episode: Episode) -> Ending:
        """Hold a finished episode until the store has it on disk; raises `Unreachable` once it lies in the spool."""
        taken = False

        async def put() -> Ending:
            nonlocal taken
            ending = await self._store.put(episode.id, episode)
            taken = True
            return ending

        try:
            return await self._tell(put, f"episode {episode.id}")
        except (Unreachable, asyncio.CancelledError):
            if not taken:
                self._spool.keep(episode)
            raise

    async def end(self) -> None:
        """Give back what this worker still holds; said once, for the store may be why the runtime stops."""
        try:
            await asyncio.wait_for(self._store.release_worker(self._worker), self._limits.shutdown_s / 4)
        except (StoreFault, DoorFault, TimeoutError):
            return

    async def _deliver_kept(self) -> None:
        """Each once, for the slots must not wait for a bad one."""
        for episode in await asyncio.to_thread(self._spool.kept):
            try:
                async with asyncio.timeout(self._limits.put_s):
                    ending = await self._store.put(episode.id, episode)
            except (StoreFault, TimeoutError) as error:
                log.error("kept episode %s stays in the spool: %s", episode.id, error or "time limit")
                continue
            log.info("kept episode %s: %s %s", episode.id, ending.outcome, ending.reason)
            self._spool.forget(episode.id)

    async def _tell(self, message: Callable[[], Awaitable[T]], what: str) -> T:
        """The store's answer to `message`, shielded from a shutdown for a quarter of `limits.shutdown_s`."""
        telling = asyncio.create_task(self._repeat(message, what), name=what)
        try:
            return await asyncio.shield(telling)
        except asyncio.CancelledError:
            await asyncio.wait({telling}, timeout=self._limits.shutdown_s / 4)
            if not telling.done():
                telling.cancel()
                await asyncio.wait({telling})
                log.error("the store did not hear of %s before the shutdown", what)
            elif not telling.cancelled() and (error := telling.exception()):
                log.error("%s", error)
            raise

    async def _repeat(self, message: Callable[[], Awaitable[T]], what: str) -> T:
        limits = self._limits
        deadline = time.monotonic() + limits.store_patience_s
        tries = 0
        while True:
            try:
                async with asyncio.timeout(limits.put_s):
                    return await message()
            except (StoreFault, TimeoutError) as error:
                tries += 1
                self._counters["store_retries"] += 1
                if time.monotonic() > deadline:
                    raise Unreachable(
                        f"the store at {self._address} has not taken {what} for {limits.store_patience_s:g} s "
                        f"({error or 'time limit'}); start it again, or raise limits.store_patience_s"
                    ) from error
                if tries == 1:
                    log.warning("%s waits for the store: %s", what, error or "time limit")
            await asyncio.sleep(backoff_s(tries, most_s=5.0))
