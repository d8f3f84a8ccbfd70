"""`PythonPool`: Python interpreters for many episodes, ready before they are asked for.

async with PythonPool() as pool:
    python = await pool.session()
    result = await python.run("x = 2**10\nx + 1")     # result.output == "1025\n"
    await python.close()
"""

from __future__ import annotations

import asyncio
import contextlib
import weakref
from collections import deque
from collections.abc import Sequence
from types import TracebackType
from typing import Self

from sandboxes.backends import choose_backend, launcher_of
from sandboxes.base import Limits, PythonSession, SandboxFault
from sandboxes.interpreter import ZygotePython
from sandboxes.zygote import Channel, Zygote


class PythonPool:
    """A parent process (zygote) that forks interpreters, and `spares` of them kept waiting.

    A session's life: spare ──session()──▶ in use ──close()──▶ gone. Nothing is ever used twice: a session is its own
    fork with its own processes, /tmp and /dev/shm, and what one episode leaves no other sees. Everything ends with
    `close()`, and with the death of this process, by SIGKILL too.

    Code inside imports the standard library, `sandboxes.packages.MATHEMATICS`, and the caller's packages named in
    `packages`; nothing else that is installed, for answers may lie in it.

    One pool belongs to one event loop: make a second pool for a second loop. The zygote is started by
    the first `session()` or by `async with`.
    """

    def __init__(
        self, backend: str = "auto", limits: Limits | None = None, spares: int = 4, packages: Sequence[str] = ()
    ) -> None:
        self._backend = backend
        self._limits = limits or Limits()
        self._spares = spares
        self._packages = tuple(packages)
        self._zygote: Zygote | None = None
        self._ready: deque[Channel] = deque()
        self._given: weakref.WeakSet[Channel] = weakref.WeakSet()
        self._refill: asyncio.Task[None] | None = None
        self._lock = asyncio.Lock()
        self._closed = False

    @property
    def backend(self) -> str:
        """The backend's name; "auto" until the zygote has been started."""
        return self._backend

    async def __aenter__(self) -> Self:
        await self._alive()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def _alive(self) -> Zygote:
        """Return a zygote that can fork, a new one if the last has died."""
        async with self._lock:
            if self._closed:
                raise SandboxFault("this pool is closed")
            if self._zygote is None or not self._zygote.alive:
                await self._drop()
                self._backend = await asyncio.to_thread(choose_backend, self._backend)
                zygote = Zygote(launcher_of(self._backend), preload=True, packages=self._packages)
                await zygote.start()
                self._zygote = zygote
                self._top_up()
            return self._zygote

    async def _drop(self) -> None:
        zygote, self._zygote = self._zygote, None
        spares, self._ready = self._ready, deque()
        if zygote is not None:
            await zygote.close()
        for channel in self._given:
            channel.abandon()
        for spare in spares:
            await spare.close()

    def _top_up(self) -> None:
        if (self._refill is None or self._refill.done()) and len(self._ready) < self._spares:
            self._refill = asyncio.create_task(self._fill())

    async def _fill(self) -> None:
        with contextlib.suppress(SandboxFault):  # whoever needs one next meets the fault itself
            while len(self._ready) < self._spares and self._zygote is not None:
                self._ready.append(await self._zygote.fork(self._limits, python=True))

    async def _take(self) -> Channel:
        while True:
            zygote = await self._alive()
            try:
                channel = self._ready.popleft() if self._ready else await zygote.fork(self._limits, python=True)
                self._given.add(channel)
                return channel
            except SandboxFault:
                if zygote.alive:
                    raise  # else it died, perhaps long ago: start another
            finally:
                self._top_up()

    async def session(self) -> PythonSession:
        """Return a fresh interpreter; raises `SandboxFault` if none can be had here."""
        return ZygotePython(await self._take(), self._take, self._limits)

    async def close(self) -> None:
        """End all interpreters, those in use too, and the zygote. May be called any number of times."""
        async with self._lock:
            self._closed = True
            if self._refill is not None:
                self._refill.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await self._refill
            await self._drop()
