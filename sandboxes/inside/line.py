"""The line between supervisor and interpreter: numbered cells one way, verdicts of one size the other.

A socket that keeps messages apart, so there is no length to lie about and nothing to wait for: whatever code writes on
the interpreter's end is a message of its own, and one that is not the verdict on the cell that is running is dropped.
A cell's number is drawn, not counted. Output takes another way, a pipe that is capped while it is read.

    supervisor ──▶ number, length of the source; then the source in pieces
    interpreter ──▶ number, b"+" (it ran) or b"-" (it raised)
"""

from __future__ import annotations

import os
import socket
import struct
from typing import Final

OPENING = struct.Struct("!16sQ")
NUMBER_BYTES = 16
VERDICT_MAX = 4096
"""No more than this is taken of any one message from the interpreter; a verdict has 17 bytes."""
PIECE = 1 << 15
DROPPED_AT_ONCE = 64
"""How many messages are looked at before the clock and the limits have their turn again."""

RAN, RAISED = b"+", b"-"
_read = os.read  # a cell may replace it


class Line:
    """The supervisor's end. `fileno` may be polled; nothing here ever waits."""

    def __init__(self, end: socket.socket) -> None:
        self._socket: Final = end
        end.setblocking(False)
        self._number = b""
        self._before = b""
        self._waiting: list[bytes | memoryview] = []

    def fileno(self) -> int:
        """The descriptor."""
        return self._socket.fileno()

    def close(self) -> None:
        """Hang up."""
        self._socket.close()

    def open_cell(self, source: bytes) -> None:
        """Give out the next number; `send` then says the cell."""
        self._before, self._number = self._number, os.urandom(NUMBER_BYTES)
        view = memoryview(source)
        pieces = [view[start : start + PIECE] for start in range(0, len(view), PIECE)]
        self._waiting = [OPENING.pack(self._number, len(source)), *pieces]
        self._waiting.reverse()

    def send(self) -> bool:
        """Send what goes without waiting; False while there is more to send."""
        while self._waiting:
            try:
                self._socket.send(self._waiting[-1])
            except BlockingIOError:
                return False
            self._waiting.pop()
        return True

    def verdict(self) -> str:
        """What there is to hear: "ok" or "error" on this cell, "forged", or "" for nothing yet.

        "forged": the verdict on the cell before came again, so the first one was not the interpreter's.
        """
        for _ in range(DROPPED_AT_ONCE):
            try:
                message = self._socket.recv(VERDICT_MAX)
            except BlockingIOError:
                return ""
            except OSError:
                return ""
            number, word = message[:NUMBER_BYTES], message[NUMBER_BYTES:]
            if word in (RAN, RAISED):
                if number == self._number:
                    return "ok" if word == RAN else "error"
                if number == self._before:
                    return "forged"
        return ""


def receive_cell(fd: int) -> tuple[bytes, bytes]:
    """On the interpreter's end: wait for a cell; returns (number, source). Raises `OSError` at the end."""
    opening = _read(fd, OPENING.size)
    if len(opening) != OPENING.size:
        raise ConnectionError("the supervisor is gone")
    number, size = OPENING.unpack(opening)
    source = bytearray()
    while len(source) < size:
        piece = _read(fd, PIECE)
        if not piece:
            raise ConnectionError("the supervisor is gone")
        source += piece
    return number, bytes(source)
