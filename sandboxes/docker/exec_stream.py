"""The streams of one `exec` in a container, over a connection of its own.

The SDK's exec socket hides bytes that arrive together with the response's header in a buffer, so the upgrade request
is made here: one POST, then frames of (stream, length, bytes) in both directions.
"""

from __future__ import annotations

import asyncio
import json
import ssl
import struct
from collections.abc import Callable
from typing import Any
from urllib.parse import urlsplit

from sandboxes.base import SandboxFault
from sandboxes.docker.engine import GET_ENGINE, ContainerGone, DockerEngine, EngineGone, says_gone
from sandboxes.inside.output import CHUNK

CONNECT_S = 20.0


class ExecStream:
    """The open connection of one exec: frames out, bytes in. Made by `ExecStream.open`, ended by `close()`."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, url: str) -> None:
        self._reader = reader
        self._writer = writer
        self._url = url

    @classmethod
    async def open(cls, engine: DockerEngine, exec_id: str) -> ExecStream:
        """Start the exec `exec_id` and attach to it; raises `EngineGone` or another `SandboxFault`."""
        try:
            async with asyncio.timeout(CONNECT_S):
                reader, writer = await _connect(engine)
                try:
                    body = json.dumps({"Detach": False, "Tty": False}).encode()
                    writer.write(
                        f"POST /v{engine.client.api.api_version}/exec/{exec_id}/start HTTP/1.1\r\nHost: docker\r\n"
                        "Connection: Upgrade\r\nUpgrade: tcp\r\nContent-Type: application/json\r\n"
                        f"Content-Length: {len(body)}\r\n\r\n".encode()
                        + body
                    )
                    await writer.drain()
                    head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
                    status = int(head.split(" ", 2)[1])
                    if status not in (101, 200):
                        text = (await reader.read(4096)).decode("utf-8", "replace")
                        if status in (404, 409) or says_gone(text):
                            raise ContainerGone(f"the container is gone: {text}")
                        raise SandboxFault(f"the Docker engine at {engine.url} did not start the command: {text}")
                except BaseException:
                    writer.close()
                    raise
        except (OSError, asyncio.IncompleteReadError, TimeoutError) as error:
            raise EngineGone(f"no Docker engine answers at {engine.url}: {error!r}; {GET_ENGINE}") from error
        return cls(reader, writer, engine.url)

    async def write(self, data: bytes, *, eof: bool = False) -> None:
        """Send bytes to the command's standard input; `eof` ends it. A command that reads no more is no error."""
        try:
            self._writer.write(data)
            await self._writer.drain()
            if eof and self._writer.can_write_eof():
                self._writer.write_eof()
        except (ConnectionError, RuntimeError):
            pass

    async def frames(self, take: Callable[[int, bytes], None]) -> None:
        """Hand (1 stdout | 2 stderr, bytes) to `take` until the command's streams end.

        Returns at the end of the stream, also when the engine drops the connection: ask the engine how the command
        ended.
        """
        try:
            while True:
                stream, length = struct.unpack(">BxxxL", await self._reader.readexactly(8))
                while length:
                    data = await self._reader.read(min(length, CHUNK))
                    if not data:
                        return
                    length -= len(data)
                    take(stream, data)
        except (asyncio.IncompleteReadError, ConnectionError):
            return

    def close(self) -> None:
        """Drop the connection. That alone does not end the command."""
        self._writer.close()


async def _connect(engine: DockerEngine) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    url = urlsplit(engine.url)
    if url.scheme == "unix":
        return await asyncio.open_unix_connection(url.path, limit=4 * CHUNK)
    if url.scheme not in ("tcp", "http", "https") or url.hostname is None:
        raise SandboxFault(f"{engine.url!r} is no address of a Docker engine: unix:///path or tcp://host:port")
    context: ssl.SSLContext | None = None
    tls = _tls() if url.scheme != "http" else None
    if tls is not None:
        context = ssl.create_default_context(cafile=tls.ca_cert or None)
        if tls.cert:
            context.load_cert_chain(*tls.cert)
    port = url.port or (2376 if context else 2375)
    return await asyncio.open_connection(url.hostname, port, ssl=context, limit=4 * CHUNK)


def _tls() -> Any:
    import docker

    return docker.utils.kwargs_from_env().get("tls") or None
