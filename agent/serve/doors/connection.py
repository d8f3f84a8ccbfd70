"""One connection at the door: time limits that aiohttp does not have, around aiohttp's own handler of it."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import cast

from agent.serve.doors.visitors import Visitors

log = logging.getLogger(__name__)

_END = b"\r\n\r\n"
_LONGEST_HEADER = 1 << 16  # beyond it aiohttp says what is wrong


class Connection(asyncio.Protocol):
    """Passes everything on to what `factory` makes once the first header is there, and aborts a client that

    - has not sent its first header whole within `header_s` (later ones: aiohttp's keep-alive time), or
    - has read nothing for `write_s` of what waits for it.
    """

    def __init__(
        self,
        factory: Callable[[], asyncio.Protocol],
        visitors: Visitors[Connection],
        address: str,
        *,
        header_s: float,
        write_s: float,
    ) -> None:
        self._factory, self._visitors, self._address = factory, visitors, address
        self._inner: asyncio.Protocol | None = None  # what a socket that says nothing is not worth yet
        self._header_s, self._write_s = header_s, write_s
        self._transport: asyncio.Transport | None = None
        self._header = bytearray()
        self._dropped = False
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
        if self._dropped:  # before it had begun
            self._transport.abort()

    def data_received(self, data: bytes) -> None:
        """The client has sent something."""
        if self._inner is None:
            begin = max(0, len(self._header) - len(_END) + 1)
            self._header += data
            if _END not in self._header[begin:] and len(self._header) <= _LONGEST_HEADER:
                return
            self._wait(0, None)
            self._visitors.arrived(self)
            assert self._transport is not None
            data, self._header = bytes(self._header), bytearray()
            self._inner = self._factory()
            self._inner.connection_made(self._transport)
        self._inner.data_received(data)

    def eof_received(self) -> bool | None:
        """The client sends no more."""
        return None if self._inner is None else self._inner.eof_received()

    def connection_lost(self, exc: Exception | None) -> None:
        """The connection is over."""
        self._wait(0, None)
        self._visitors.left(self)
        if self._inner is not None:
            self._inner.connection_lost(exc)

    def pause_writing(self) -> None:
        """More waits for the client than should."""
        if self._inner is not None:
            self._inner.pause_writing()
        self._watch()

    def resume_writing(self) -> None:
        """The client has read it."""
        self._wait(0, None)
        if self._inner is not None:
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
