"""Wrong keys, counted by address: who tries many is answered 429 for a while."""

from __future__ import annotations

import hashlib
import logging
import time
from collections.abc import Callable

from agent.wire.errors import ApiError

log = logging.getLogger(__name__)

_WINDOW_S = 60.0
_MOST = 10_000


class WrongKeys:
    """At most `per_minute` wrong keys from one address; then every key that has not been right from there is refused.

    A key that was right from an address goes on being let in from it: somebody else behind the same address, who tries
    keys, does not lock its owner out.
    """

    def __init__(self, per_minute: int, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._most, self._clock = per_minute, clock
        self._wrong: dict[str, tuple[int, float]] = {}
        self._right: dict[bytes, None] = {}

    def check(self, address: str, shown: str) -> None:
        """Before the key is looked at: raises `ApiError` 429 for an address that has shown too many wrong ones."""
        count, since = self._wrong.get(address, (0, 0.0))
        left_s = since + _WINDOW_S - self._clock()
        if count >= self._most and left_s > 0 and _digest(address, shown) not in self._right:
            raise ApiError(
                429,
                f"{count} wrong keys have come from your address: wait {left_s:.0f} s",
                code="too_many_wrong_keys",
                retry_s=left_s,
            )

    def was_right(self, address: str, shown: str) -> None:
        """The key `shown` opens the door."""
        digest = _digest(address, shown)
        self._right.pop(digest, None)
        self._right[digest] = None
        if len(self._right) > _MOST:
            del self._right[next(iter(self._right))]

    def was_wrong(self, address: str) -> None:
        """A key that does not."""
        now = self._clock()
        count, since = self._wrong.pop(address, (0, now))
        count, since = (1, now) if now - since >= _WINDOW_S else (count + 1, since)
        if len(self._wrong) >= _MOST:
            del self._wrong[next(iter(self._wrong))]
        self._wrong[address] = (count, since)
        if count == self._most:
            log.warning(
                "%d wrong keys within a minute from %s: no other key is tried from there for now", count, address
            )


def _digest(address: str, shown: str) -> bytes:
    return hashlib.sha256(f"{address}\n{shown}".encode("utf-8", "surrogateescape")).digest()
