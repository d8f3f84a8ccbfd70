"""`Pace`: when the next request may go, by the limits of a minute and by what the endpoint asks for."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

WINDOW_S = 60.0
_MARGIN_S = 0.01  # a request that goes at the very end of its minute may be counted to it by the other clock


@dataclass(slots=True)
class Admission:
    """One request that went: when, and how many tokens it is taken for."""

    at: float
    tokens: int


class Pace:
    """Lets requests go one after the other, never more than `rpm` requests or `tpm` tokens in any minute.

        pace = Pace(rpm=60, tpm=100_000)
        admission = await pace.admit(estimate)      # waits for its turn: first come, first served
        ...
        pace.settle(admission, tokens)              # what it has really cost
        pace.hold(retry_after_s)                    # the endpoint asks all to wait

    Limits are of a sliding minute. A request that is larger than `tpm` goes alone. None is no limit.
    """

    def __init__(
        self,
        rpm: int | None = None,
        tpm: int | None = None,
        *,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self._rpm, self._tpm, self._clock, self._sleep = rpm, tpm, clock, sleep
        self._sent: deque[Admission] = deque()
        self._queue = asyncio.Lock()
        self._held_until = 0.0

    @property
    def held_s(self) -> float:
        """How much longer everybody waits because the endpoint asked for it; 0 where it did not."""
        return max(0.0, self._held_until - self._clock())

    def hold(self, seconds: float) -> None:
        """Let nothing go for `seconds`."""
        self._held_until = max(self._held_until, self._clock() + seconds)

    async def admit(self, tokens: int) -> Admission:
        """Return once a request of about `tokens` may go."""
        if self._tpm is not None:
            tokens = min(tokens, self._tpm)
        async with self._queue:
            while (wait := self._wait_s(tokens)) > 0:
                await self._sleep(wait)
            admission = Admission(self._clock(), tokens)
            if self._rpm is not None or self._tpm is not None:
                self._sent.append(admission)
            return admission

    def settle(self, admission: Admission, tokens: int) -> None:
        """What a request that is over has cost."""
        admission.tokens = tokens

    def _wait_s(self, tokens: int) -> float:
        now = self._clock()
        while self._sent and self._sent[0].at + WINDOW_S <= now:
            self._sent.popleft()
        waits = [self._held_until - now]
        if self._rpm is not None and len(self._sent) >= self._rpm:
            waits.append(self._until(len(self._sent) - self._rpm, now))
        if self._tpm is not None:
            excess, leaving = sum(one.tokens for one in self._sent) + tokens - self._tpm, -1
            while excess > 0 and leaving + 1 < len(self._sent):
                leaving += 1
                excess -= self._sent[leaving].tokens
            if leaving >= 0:
                waits.append(self._until(leaving, now))
        return max(waits)

    def _until(self, index: int, now: float) -> float:
        """Seconds until the request at `index` is more than a minute old."""
        return max(_MARGIN_S, self._sent[index].at + WINDOW_S - now + _MARGIN_S)
