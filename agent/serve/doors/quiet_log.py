"""A log that nobody can fill: the same message is written so often a minute, and what was left out is counted."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

_WINDOW_S = 60.0
_MOST_KINDS = 500
_HEAD = 60


class Throttle(logging.Filter):
    """A handler's filter: at most `per_minute` records of one kind.

        handler.addFilter(throttle := Throttle(30))
        throttle.report()     # now and then: says what was left out since

    Records are of one kind if they come from the same line and their texts, before values are put in, begin alike.
    """

    def __init__(self, per_minute: int, *, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__()
        self._most, self._clock = per_minute, clock
        self._kinds: dict[tuple[str, int, str], list[int]] = {}
        self._until = clock() + _WINDOW_S
        self._lock = threading.Lock()
        self._own = logging.getLogger(__name__)

    def filter(self, record: logging.LogRecord) -> bool:
        """Whether `record` is written."""
        if record.name == self._own.name:
            return True
        self.report()
        kind = (record.pathname, record.lineno, str(record.msg)[:_HEAD])
        with self._lock:
            if kind not in self._kinds and len(self._kinds) >= _MOST_KINDS:
                kind = ("", 0, "messages of many kinds")
            count = self._kinds.setdefault(kind, [0])
            count[0] += 1
            return count[0] <= self._most

    def report(self) -> None:
        """Once a minute is over: say what was left out of it, and begin to count anew."""
        with self._lock:
            if self._clock() < self._until:
                return
            self._until = self._clock() + _WINDOW_S
            full, self._kinds = self._kinds, {}
        for (_, _, text), (count,) in full.items():
            if count > self._most:
                head = text.splitlines()[0] if text else text
                self._own.warning("left out of this log within a minute: %d more of %r", count - self._most, head)
