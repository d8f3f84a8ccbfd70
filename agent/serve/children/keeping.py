"""A process that has to be there: started again, with longer and longer waits, whenever it ends."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable

from agent.backoff import doubled_s

SETTLED_S = 10.0
"""What lived so long and then died is no failure in a row any more."""


async def _at_once() -> None: ...


async def keep_running(
    run: Callable[[], Awaitable[int]],
    ended: Callable[[int | Exception, int], bool],
    *,
    first_s: float,
    most_s: float,
    settled_s: float = SETTLED_S,
    faults: tuple[type[Exception], ...] = (),
    ready: Callable[[], Awaitable[None]] = _at_once,
) -> None:
    """Await `run` again and again: it starts a process if there is none, and returns its exit code when it has ended.

        ready ──▶ run ──▶ ended ──True──▶ wait ──▶ ready ...
                            └────False──▶ return

    `ended` hears the code, or the one of `faults` that `run` raised, and the count of failures in a row; it says
    whether to go on. The wait is `first_s`, doubled with each failure in a row up to `most_s`. `ready` may hold up the
    start; that time does not count as life.
    """
    failures = 0
    while True:
        await ready()
        began = time.monotonic()
        try:
            how: int | Exception = await run()
        except faults as error:
            how = error
        failures = 1 if time.monotonic() - began > settled_s else failures + 1
        if not ended(how, failures):
            return
        await asyncio.sleep(doubled_s(failures, first_s=first_s, most_s=most_s))
