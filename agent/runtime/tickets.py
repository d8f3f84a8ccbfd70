"""Where the slots of a runtime get their tickets: one lease request for all that are idle."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Awaitable, Callable
from typing import Protocol

from agent.backoff import Unreachable, backoff_s
from agent.store.protocol import StoreFault, Ticket

log = logging.getLogger(__name__)

HANDED_OUT_AT_ONCE = 32
"""Slots that begin in one turn of the loop. Resetting and rendering takes a millisecond for each, and thousands in a
row would hold up all that the loop has to hear meanwhile."""


class _Leasing(Protocol):
    async def lease(self, n: int, worker: str, wait_s: float = 0.0) -> list[Ticket]: ...


class TicketSource:
    """Leases tickets for all idle slots together, so that 64 idle slots make one request and not 64.

    `run` must be running for `next` to return. One lease request is open at a time, for as many tickets as
    slots are waiting; evaluation tickets are handed out first, and never to more than `HANDED_OUT_AT_ONCE` slots in one
    turn of the loop.
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
            await self._hand_out(sorted(tickets, key=lambda ticket: ticket.kind != "evaluate"))

    async def _hand_out(self, tickets: list[Ticket]) -> None:
        self._spare.extend(tickets)
        handed_out = 0
        while self._spare and self._waiting:
            future = self._waiting.popleft()
            if not future.done():  # a slot that was cancelled while it waited
                future.set_result(self._spare.popleft())
                handed_out += 1
                if handed_out % HANDED_OUT_AT_ONCE == 0:
                    await asyncio.sleep(0)
        if not self._waiting:
            self._wanted.clear()
