"""The time limit of a request that hands over what it has when it is told to end, instead of being cut."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from types import TracebackType
from typing import Self


class Overtime:
    """Lets the block run for `limit_s`; then awaits `abort()` beside it, and gives it `grace_s` more to end by itself.

        overtime = Overtime(600.0, abort, 2.0)
        async with overtime:
            completion = await request()
        overtime.reached                       # whether `completion` is what was handed over

    A block that has not ended by then is cancelled, and `TimeoutError` raised; where `abort` fails, at once, and what
    it raised. There is no task but the caller's before the limit is reached: a request costs one timer. `abort` must
    have a time limit of its own.
    """

    def __init__(self, limit_s: float, abort: Callable[[], Awaitable[object]], grace_s: float) -> None:
        self._limit_s, self._abort, self._grace_s = limit_s, abort, grace_s
        self._guard = asyncio.timeout(None)
        self._aborting: asyncio.Task[None] | None = None
        self._fault: Exception | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._ended = False

    @property
    def reached(self) -> bool:
        """Whether the limit was reached."""
        return self._aborting is not None

    async def __aenter__(self) -> Self:
        await self._guard.__aenter__()
        self._timer = asyncio.get_running_loop().call_later(self._limit_s, self._over)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._timer is not None
        self._timer.cancel()
        self._ended = True
        if not self._guard.expired():  # the block has ended by itself: nothing may cancel what follows
            self._guard.reschedule(None)
        try:
            if self._aborting is not None:
                await self._settled(self._aborting)
        finally:
            try:
                await self._guard.__aexit__(kind, error, trace)
            except TimeoutError:
                if self._fault is not None:
                    raise self._fault from None
                raise

    def _over(self) -> None:
        self._aborting = asyncio.get_running_loop().create_task(self._hand_over(), name="abort at the time limit")

    async def _hand_over(self) -> None:
        try:
            await self._abort()
        except Exception as fault:
            self._fault = fault
        if not self._ended:
            grace_s = self._grace_s if self._fault is None else 0.0
            self._guard.reschedule(asyncio.get_running_loop().time() + grace_s)

    async def _settled(self, task: asyncio.Task[None]) -> None:
        """Return when the abort is over; it has a limit of its own."""
        try:
            await asyncio.wait({task})
        finally:
            task.cancel()
