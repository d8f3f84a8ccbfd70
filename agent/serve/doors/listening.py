"""Listening: sockets are accepted here and not by asyncio, so that they are counted before anything is spent on them.

asyncio's own server takes every connection there is. When the process has no descriptor left it logs a traceback for
each attempt, a thousand of them at a time.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import socket
import struct
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass

from aiohttp import web

from agent.descriptors import RESERVE, TooFewDescriptors, raise_limit
from agent.serve.doors.connection import Connection
from agent.serve.doors.rules import counted_as, is_within, networks
from agent.serve.doors.settings import DoorsConfig
from agent.serve.doors.visitors import Visitors

log = logging.getLogger(__name__)

_BACKLOG = 1024
_AT_ONCE = 16  # accepted before the loop does something else
_PAUSE_S = 0.2
_MOST = 4096
_LINGERING_S = 5.0
_SHUTDOWN_S = 5.0
_EXHAUSTED = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)
_EVERYWHERE = ("", "0.0.0.0", "::")
_RESET = struct.pack("ii", 1, 0)


@dataclass(frozen=True)
class Bounds:
    """Of one listening port. `connections` at once in all, `each` from one address unless it lies in `exempt`.

    Times are seconds: for the first header, between two requests, and for a client that reads nothing.
    """

    connections: int
    each: int
    header_s: float
    keep_alive_s: float
    write_s: float
    exempt: tuple[str, ...] = ()


def bounds_of(config: DoorsConfig, *, generations: int, write_s: float) -> Bounds:
    """The bounds that `config` asks for; the process's limit of open files is raised as far as the system lets it.

    `generations`: how many connections to the engine there may be besides. Raises `TooFewDescriptors`.
    """
    room = raise_limit(0, "the server") - RESERVE
    room = max(room // 2, room - generations)  # a client that is answered holds one for the engine, too
    if config.connections is not None and config.connections > room:
        raise TooFewDescriptors(
            f"serve.doors.connections is {config.connections}, and the system's limit of open files leaves {room}: "
            "raise it (`ulimit -Hn` as root, or LimitNOFILE= of the service), or lower the key"
        )
    return Bounds(
        connections=config.connections or min(room, _MOST),
        each=config.connections_per_address,
        header_s=config.header_s,
        keep_alive_s=config.keep_alive_s,
        write_s=write_s,
        exempt=config.trusted_proxies,
    )


class Listener:
    """Accepts the connections of `sockets` for `server`, within `bounds`; `visitors` has the counts."""

    def __init__(self, server: web.Server, sockets: Sequence[socket.socket], bounds: Bounds) -> None:
        exempt = networks(bounds.exempt)
        self.visitors: Visitors[Connection] = Visitors(
            bounds.connections, bounds.each, lambda address: is_within(address, exempt)
        )
        self._server, self._sockets, self._bounds = server, sockets, bounds
        self._loop = asyncio.get_running_loop()
        self._accepting: set[asyncio.Task[None]] = set()
        self._resuming: set[asyncio.TimerHandle] = set()

    def start(self) -> None:
        """Begin to accept."""
        for listening in self._sockets:
            listening.setblocking(False)
            listening.listen(_BACKLOG)
            self._loop.add_reader(listening, self._ready, listening)

    async def close(self) -> None:
        """Accept no more, and drop who has not said anything; the other connections stay."""
        for handle in self._resuming:
            handle.cancel()
        for listening in self._sockets:
            self._loop.remove_reader(listening)
            listening.close()
        await asyncio.gather(*self._accepting, return_exceptions=True)
        while self.visitors.drop_oldest():  # of those aiohttp knows nothing yet
            pass

    def _ready(self, listening: socket.socket) -> None:
        for _ in range(_AT_ONCE):
            try:
                client, peer = listening.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError as error:
                if error.errno not in _EXHAUSTED:
                    raise
                self._exhausted(listening, error)
                return
            address = counted_as(str(peer[0]))
            if self.visitors.admit(address):
                self._take(client, address)
            else:
                _refuse(client)
                log.warning("too many connections, of all or of %s: one more is refused", address)

    def _exhausted(self, listening: socket.socket, error: OSError) -> None:
        log.error("a connection cannot be accepted: %s", error.strerror)
        self.visitors.drop_oldest()
        self._loop.remove_reader(listening)

        def resume() -> None:
            self._resuming.discard(handle)
            self._loop.add_reader(listening, self._ready, listening)

        handle = self._loop.call_later(_PAUSE_S, resume)
        self._resuming.add(handle)

    def _take(self, client: socket.socket, address: str) -> None:
        client.setblocking(False)
        with contextlib.suppress(OSError):
            client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        bounds = self._bounds
        connection = Connection(self._server, self.visitors, address, header_s=bounds.header_s, write_s=bounds.write_s)
        self.visitors.came(connection, address)
        task = self._loop.create_task(self._connect(client, connection))
        self._accepting.add(task)
        task.add_done_callback(self._accepting.discard)

    async def _connect(self, client: socket.socket, connection: Connection) -> None:
        try:
            await self._loop.connect_accepted_socket(lambda: connection, client)
        except OSError as error:
            self.visitors.left(connection)
            client.close()
            log.info("a connection broke before it began: %s", error)


@contextlib.asynccontextmanager
async def listening(app: web.Application, host: str, port: int, bounds: Bounds) -> AsyncIterator[tuple[str, Listener]]:
    """Serve `app` on `host`:`port` (0: a free one) until the block ends; its URL on this machine, and who is there.

    Raises OSError where it cannot listen there.
    """
    # A client that goes away cancels its handler, which ends its generation.
    runner = web.AppRunner(
        app,
        handler_cancellation=True,
        access_log=None,
        shutdown_timeout=_SHUTDOWN_S,
        keepalive_timeout=bounds.keep_alive_s,
        lingering_time=_LINGERING_S,
    )
    await runner.setup()
    try:
        sockets = await _bound(host, port)
        assert runner.server is not None
        listener = Listener(runner.server, sockets, bounds)
        listener.start()
        try:
            shown = "127.0.0.1" if host in _EVERYWHERE else f"[{host}]" if ":" in host else host
            yield f"http://{shown}:{sockets[0].getsockname()[1]}", listener
        finally:
            await listener.close()
    finally:
        await runner.cleanup()


async def _bound(host: str, port: int) -> list[socket.socket]:
    """A socket for each address of `host`, all with one port."""
    loop = asyncio.get_running_loop()
    found = await loop.getaddrinfo(host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    sockets: list[socket.socket] = []
    try:
        for family, kind, protocol, _, address in dict.fromkeys(found):
            try:
                opened = socket.socket(family, kind, protocol)
            except OSError:  # a family that this kernel does not have
                continue
            sockets.append(opened)
            opened.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if family == socket.AF_INET6:
                opened.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            if len(sockets) > 1:  # a free port was chosen for the first
                address = (address[0], sockets[0].getsockname()[1], *address[2:])
            opened.bind(address)
        if not sockets:
            raise OSError(errno.EADDRNOTAVAIL, f"no address for {host}")
    except BaseException:
        for opened in sockets:
            opened.close()
        raise
    return sockets


def _refuse(client: socket.socket) -> None:
    with contextlib.suppress(OSError):  # at once, with nothing left of it in the kernel
        client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
    client.close()
