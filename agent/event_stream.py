"""Writing a stream of events to a client that may be slow or gone: the one way in which servers of ours do it."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Iterable
from typing import Any

import msgspec
from aiohttp import web

COMMENT = b": \n\n"
"""A line that clients pass over: it tells everybody on the way that the stream is alive."""


def encoded(data: dict[str, Any], *, event: str = "") -> bytes:
    """One event, of the kind `event` where the wire names them."""
    name = f"event: {event}\n".encode() if event else b""
    return name + b"data: " + msgspec.json.encode(data) + b"\n\n"


class SlowClient(Exception):
    """The client has left a chunk unread for too long."""


class EventWriter:
    """The events of one stream. `send` raises `SlowClient` past `write_s`, ConnectionResetError if gone."""

    def __init__(
        self, request: web.Request, *, write_s: float, buffer_bytes: int, headers: dict[str, str] | None = None
    ) -> None:
        self._request, self._write_s, self._buffer_bytes = request, write_s, buffer_bytes
        self.response = web.StreamResponse(
            headers={
                "Content-Type": "text/event-stream",
                "Cache-Control": "no-cache",
                "X-Accel-Buffering": "no",  # a proxy that collects events would deliver them at the end
                **(headers or {}),
            }
        )
        self.started = False

    async def start(self) -> None:
        """Send the header."""
        await self.response.prepare(self._request)
        self.started = True
        transport = self._request.transport
        if transport is not None:
            # Little waits in here: a client that does not read is noticed before its reply is whole.
            transport.set_write_buffer_limits(high=self._buffer_bytes)
            connection = transport.get_extra_info("socket")
            if connection is not None:
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, self._buffer_bytes)

    async def send(self, data: dict[str, Any], *, event: str = "") -> None:
        """One event, of the kind `event` where the wire names them."""
        await self._write(encoded(data, event=event))

    async def send_encoded(self, events: Iterable[bytes]) -> None:
        """Several at once, each from `encoded`."""
        await self._write(b"".join(events))

    async def comment(self) -> None:
        """Send `COMMENT`."""
        await self._write(COMMENT)

    async def end(self, *, mark: bool = True) -> None:
        """The end of the stream, with OpenAI's last line if `mark`."""
        await self._write(b"data: [DONE]\n\n" if mark else b"", last=True)

    async def _write(self, data: bytes, *, last: bool = False) -> None:
        try:
            async with asyncio.timeout(self._write_s):
                if data:
                    await self.response.write(data)
                await self._request.writer.drain()  # write() alone waits for nobody before 64 KiB
                if last:
                    await self.response.write_eof()
        except TimeoutError as error:
            if self._request.transport is not None:
                self._request.transport.abort()
            raise SlowClient(f"a client left its stream unread for {self._write_s:g} s") from error
