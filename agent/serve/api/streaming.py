"""The events of one request's answers, sent as they come: several choices at once, and a sign of life in silence."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Iterator

from agent.event_stream import EventWriter, SlowClient
from agent.wire.answer import Event, Wire


class Stream:
    """One event at a time, whoever sends; the wire's first events come before the first of them."""

    def __init__(self, writer: EventWriter, wire: Wire, alive_every_s: float) -> None:
        self._writer, self._wire, self._every_s = writer, wire, alive_every_s
        self._alone, self._sent = asyncio.Lock(), False

    async def send(self, events: Callable[[], Iterator[Event]]) -> None:
        """Send what `events` makes, once it is its turn. Raises `SlowClient` or ConnectionResetError."""
        async with self._alone:
            await self._open()
            self._sent = True
            for name, data in events():
                await self._writer.send(data, event=name)

    async def _open(self) -> None:
        if not self._writer.started:
            await self._writer.start()
            for name, data in self._wire.opening():
                await self._writer.send(data, event=name)

    @contextlib.asynccontextmanager
    async def alive(self) -> AsyncIterator[None]:
        """While the block runs, every silence is broken after a while; an error of the first moments has a status."""
        task = asyncio.create_task(self._tell())
        try:
            yield
        finally:
            task.cancel()
            await asyncio.wait((task,))

    async def _tell(self) -> None:
        with contextlib.suppress(SlowClient, ConnectionResetError):  # the one that samples meets it too
            while True:
                self._sent = False
                await asyncio.sleep(self._every_s)
                if self._sent:
                    continue
                async with self._alone:
                    await self._open()
                    if (event := self._wire.alive()) is None:
                        await self._writer.comment()
                    else:
                        await self._writer.send(event[1], event=event[0])


def first_fault(fault: BaseException) -> Exception:
    """Of the faults of tasks that ran together the one that ended them."""
    while isinstance(fault, BaseExceptionGroup):
        fault = fault.exceptions[0]
    assert isinstance(fault, Exception)
    return fault
