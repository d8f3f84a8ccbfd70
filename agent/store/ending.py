"""The end of a process that is asked to end, whatever hangs in it."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
from types import FrameType

LIMIT_S = 25.0
"""Requests get 10 s to come to their end, the database some more to close."""


class Ending:
    """Asks for an end by setting `asked`, and ends the process itself `limit_s` later if it is still there by then.

        ending = Ending.of_signals()     # in the main thread, with the event loop running
        await ending.asked.wait()
        ...                              # everything in order

    A loop that stands still (its log is a pipe that nobody reads, its disk does not answer) hears of no signal, and a
    thread that hangs keeps the interpreter from ending. What was acknowledged is on the disk, so nothing is lost.
    """

    def __init__(self, limit_s: float | None = None) -> None:
        self.asked = asyncio.Event()
        self._loop, self._limit_s = asyncio.get_running_loop(), LIMIT_S if limit_s is None else limit_s
        self._begun = False

    @classmethod
    def of_signals(cls, limit_s: float | None = None) -> Ending:
        """One that SIGTERM and SIGINT ask for; they work in a loop that stands still, too."""
        ending = cls(limit_s)

        def heard(number: int, frame: FrameType | None) -> None:
            ending.begin()

        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, heard)
        return ending

    def begin(self) -> None:
        """Ask for the end. Harmless when repeated; from any thread, or from a signal handler."""
        if self._begun:
            return
        self._begun = True
        last = threading.Timer(self._limit_s, os._exit, (1,))
        last.daemon = True
        last.start()
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self.asked.set)
