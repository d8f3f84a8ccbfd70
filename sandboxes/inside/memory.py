"""The memory a sandbox may use, held by the kernel: a control group that the caller made, where one may be made.

Where there is none, the supervisor adds up what processes and files hold, and the filter of system calls refuses the
memory that neither would show.
"""

from __future__ import annotations

import contextlib
import os


class MemoryRoom:
    """A control group by its two files: what enters it, and how often the kernel had to kill in it."""

    def __init__(self, members: int = -1, events: int = -1) -> None:
        self._members = members
        self._events = events
        self._kills = 0

    @property
    def limits(self) -> bool:
        """Whether the kernel holds the limit."""
        return self._members >= 0

    def enter(self) -> None:
        """Bring this process, and all it will start, under the limit."""
        if self.limits:
            os.write(self._members, b"0")

    def forget(self) -> None:
        """Count no kill of before: one may have come while the rest of a run that is over was swept."""
        self.was_full()

    def was_full(self) -> bool:
        """Whether the kernel has killed for want of room since this was last asked."""
        with contextlib.suppress(OSError, ValueError, IndexError):
            words = os.pread(self._events, 4096, 0).split() if self._events >= 0 else []
            before, self._kills = self._kills, int(words[words.index(b"oom_kill") + 1])
            return self._kills > before
        return False
