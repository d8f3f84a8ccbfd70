"""One connection at the door: time limits that aiohttp does not have, around aiohttp's own handler of it."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import cast

from agent.serve.doors.visitors import Visitors

log = logging.getLogger(__name__)

_END = b"\r\n\r\n"


class Connection(asyncio.Protocol):
    """Passes everything on to `inner`, and aborts a client that

    - has not sent its first header whole within `header_s` (later ones: aiohttp's keep-alive time), or
    - has read nothing for `write_s` of what waits for it.
    """

    def __init__(
        self, inner: asyncio.Protocol, visitors: Visitors[Connection], address: str, *, header_s: float, write_s: float
    ) -> None:
        self._inner, self._visitors, self._address = inner, visitors, address
        self._header_s, self._write_s = header_s, write_s
        self._transport: asyncio.Transport | None = None
        self._tail = b""
        self._in_header, self._dropped = True, False
        self._timer: asyncio.TimerHandle | None = None
        self._unread = 0

    def drop(self) -> None:
        """Close at once; what was not sent is lost."""
        self._dropped = True
        if self._transport is not None:
            self._transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """The client is there."""
        self._transport = cast(asyncio.Transport, transport)
        self._wait(self._header_s, self._too_slow)
        self._inner.connection_made(transport)
        if self._dropped:  # before it had begun
            self._transport.abort()

    def data_received(self, data: bytes) -> None:
        """The client has sent something."""
        if self._in_header:
            seen = self._tail + data
            if _END in seen:
                self._in_header, self._tail = False, b""
                self._wait(0, None)
                self._visitors.arrived(self)
            else:
                self._tail = seen[-len(_END) + 1 :]
        self._inner.data_received(data)

    def eof_received(self) -> bool | None:
        """The client sends no more."""
        return self._inner.eof_received()

    def connection_lost(self, exc: Exception | None) -> None:
        """The connection is over."""
        self._wait(0, None)
        self._visitors.left(self)
        self._inner.connection_lost(exc)

    def pause_writing(self) -> None:
        """More waits for the client than should."""
        self._inner.pause_writing()
        self._watch()

    def resume_writing(self) -> None:
        """The client has read it."""
        self._wait(0, None)
        self._inner.resume_writing()

    def _wait(self, seconds: float, then: Callable[[], None] | None) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if then is not None:
            self._timer = asyncio.get_running_loop().call_later(seconds, then)

    def _watch(self) -> None:
        assert self._transport is not None
        self._unread = self._transport.get_write_buffer_size()
        self._wait(self._write_s, self._still_unread)

    def _still_unread(self) -> None:
        assert self._transport is not None
        if self._transport.get_write_buffer_size() < self._unread:  # slow, but it reads
            self._watch()
        else:
            log.info("%s reads nothing: its connection is closed", self._address)
            self.drop()

    def _too_slow(self) -> None:
        log.info("%s has sent no whole header: its connection is closed", self._address)
        self.drop()
