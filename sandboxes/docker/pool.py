"""`DockerPool`: containers for many episodes, on one engine or several, some started before they are asked for.

async with DockerPool(hosts=["tcp://10.0.0.7:2375", "tcp://10.0.0.8:2375"], warm=2) as pool:
    sandbox = await pool.sandbox("sao-base:debian")
    result = await sandbox.run(["git", "--version"])
    await sandbox.close()                                # gives its place back
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import deque
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass, field
from typing import Any, Self

from sandboxes.base import SandboxFault
from sandboxes.cancellation import to_the_end
from sandboxes.docker.engine import GET_ENGINE, DockerEngine, EngineGone
from sandboxes.docker.sandbox import DockerSandbox
from sandboxes.docker.settings import DockerSettings

RETRY_S = 15.0


@dataclass(slots=True, eq=False)
class Place:
    """One engine, how many containers it may hold and how many it does; `back_at_s` (monotonic) after a failure."""

    engine: DockerEngine
    slots: int = 0
    used: int = 0
    back_at_s: float = 0.0
    spares: dict[str, deque[DockerSandbox]] = field(default_factory=dict)

    @property
    def free(self) -> float:
        """The free part of its slots."""
        return (self.slots - self.used) / self.slots if self.slots else 0.0


def best(places: Sequence[Place], now_s: float) -> Place | None:
    """Return the place with the largest free part; None if all are full or resting after a failure."""
    open_ = [place for place in places if place.used < place.slots and place.back_at_s <= now_s]
    return max(open_, key=lambda place: place.free, default=None)


class DockerPool:
    """Places episodes on engines by free capacity; keeps `warm` spare containers of each image that was asked for.

    An engine's capacity is `slots`, or as many containers of `settings.memory_bytes` as its memory holds. With all
    slots in use `sandbox()` waits; a spare of another image gives way first. An engine that does not answer is left
    alone for 15 s; if none answers, `sandbox()` raises `EngineGone`.

    A container's life: spare ──sandbox()──▶ in use ──its close()──▶ gone. Nothing is used twice. One pool belongs to
    one event loop; `close()` ends all containers, those in use too.
    """

    def __init__(
        self,
        settings: DockerSettings | None = None,
        *,
        hosts: Sequence[str] = (),
        warm: int = 0,
        slots: int | None = None,
    ) -> None:
        self._settings = settings or DockerSettings()
        self._places = [Place(DockerEngine(host)) for host in hosts or [""]]
        self._warm = warm
        self._slots = slots
        self._changed = asyncio.Condition()
        self._given: set[DockerSandbox] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._closed = False

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def sandbox(self, image: str) -> DockerSandbox:
        """Return a started container of `image`; raises `SandboxFault`. Waits while all engines are full."""
        while True:
            spare = await self._spare(image)
            if spare is not None:
                break
            place = await self._place()
            try:
                spare = await self._start(place, image)
                break
            except EngineGone:
                place.back_at_s = time.monotonic() + RETRY_S
        if self._warm:
            self._task(self._fill(image))
        return spare

    async def _spare(self, image: str) -> DockerSandbox | None:
        for place in sorted(self._places, key=lambda place: -place.free):
            spares = place.spares.get(image, deque())
            while spares:
                spare = spares.popleft()
                self._given.add(spare)
                try:
                    if await spare.alive():
                        return spare
                except SandboxFault:
                    pass  # its engine is away; the others may not be
                except BaseException:
                    self._task(spare.close())
                    raise
                await spare.close()
        return None

    async def _place(self) -> Place:
        """Take a slot; returns whose."""
        async with self._changed:
            while True:
                if self._closed:
                    raise SandboxFault("this pool is closed")
                await self._measure()
                now = time.monotonic()
                place = best(self._places, now)
                if place is not None:
                    place.used += 1
                    return place
                answering = [place for place in self._places if place.back_at_s <= now]
                if not answering:
                    urls = ", ".join(place.engine.url for place in self._places)
                    raise EngineGone(f"no Docker engine answers at {urls}; {GET_ENGINE}")
                if not await self._evict(answering):
                    with contextlib.suppress(TimeoutError):
                        # The limit only brings back engines that were resting. Not `wait_for`: in Python 3.11 it
                        # loses a cancellation that comes together with the notification.
                        async with asyncio.timeout(RETRY_S):
                            await self._changed.wait()

    async def _measure(self) -> None:
        for place in self._places:
            if place.slots == 0 and place.back_at_s <= time.monotonic():
                try:
                    await place.engine.ready(self._settings.project)
                    about = await place.engine.call(lambda engine=place.engine: engine.client.info())
                except EngineGone:
                    place.back_at_s = time.monotonic() + RETRY_S
                else:
                    place.slots = self._slots or max(1, int(about["MemTotal"]) // self._settings.memory_bytes)

    async def _evict(self, places: Sequence[Place]) -> bool:
        for place in places:
            for spares in place.spares.values():
                if spares:
                    self._task(spares.popleft().close())
                    await self._changed.wait()
                    return True
        return False

    async def _start(self, place: Place, image: str) -> DockerSandbox:
        sandbox = DockerSandbox(
            image, settings=self._settings, engine=place.engine, on_closed=lambda: self._give_back(place, sandbox)
        )
        self._given.add(sandbox)
        try:
            await sandbox.start()
        except BaseException:
            await to_the_end(sandbox.close())
            raise
        if self._closed:
            await sandbox.close()
            raise SandboxFault("this pool is closed")
        return sandbox

    def _give_back(self, place: Place, sandbox: DockerSandbox) -> None:
        place.used -= 1
        self._given.discard(sandbox)
        if not self._closed:
            self._task(self._notify())

    async def _notify(self) -> None:
        async with self._changed:
            self._changed.notify_all()

    async def _fill(self, image: str) -> None:
        """Start spares of `image` where there is room beside those in use."""
        with contextlib.suppress(SandboxFault):  # whoever needs one next meets the fault itself
            while not self._closed and sum(len(place.spares.get(image, ())) for place in self._places) < self._warm:
                place = best(self._places, time.monotonic())
                if place is None:
                    return
                place.used += 1
                sandbox = await self._start(place, image)
                self._given.discard(sandbox)
                place.spares.setdefault(image, deque()).append(sandbox)

    def _task(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def close(self) -> None:
        """End all containers, those in use too. May be called any number of times."""
        self._closed = True
        async with self._changed:
            self._changed.notify_all()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        left = [*self._given, *(spare for place in self._places for deck in place.spares.values() for spare in deck)]
        for place in self._places:
            place.spares.clear()
        await asyncio.gather(*(sandbox.close() for sandbox in left))
        for place in self._places:
            await place.engine.close()
