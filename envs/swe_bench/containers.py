"""Where an instance's containers come from: one pool for all episodes on an event loop, counted like its images."""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import Sequence
from dataclasses import replace
from typing import Self

from envs.swe_bench.images import ensure_image, image_name
from envs.swe_bench.instance import Instance
from sandboxes.docker import DockerSandbox, DockerSettings
from sandboxes.docker_engine import DockerEngine, ImageMissing
from sandboxes.docker_pool import DockerPool


class Containers:
    """A pool of containers on `hosts` (DOCKER_HOST urls; none is the default engine), which sees to images first.

    Belongs to one event loop; `close()` ends all containers, those in use too.
    """

    def __init__(
        self, settings: DockerSettings | None = None, *, hosts: Sequence[str] = (), slots: int | None = None
    ) -> None:
        self._hosts = tuple(hosts) or ("",)
        # Not the image's own folder: where that is the repository, an agent that removes it would stop every command.
        settings = settings or DockerSettings()
        settings = replace(settings, workdir=settings.workdir or "/")
        self._pool = DockerPool(settings, hosts=self._hosts, slots=slots)
        self._engines = [DockerEngine(host) for host in self._hosts]
        self._there: set[str] = set()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def open(self, instance: Instance, image: str = "") -> DockerSandbox:
        """A started container of the instance's image, or of `image`; raises `SandboxFault` and `RowError`."""
        name = image or image_name(instance)
        if not image and name not in self._there:
            for engine in self._engines:
                await ensure_image(instance, engine)
            self._there.add(name)
        try:
            return await self._pool.sandbox(name)
        except ImageMissing:
            self._there.discard(name)
            raise

    async def close(self) -> None:
        """End all containers and connections."""
        try:
            await self._pool.close()
        finally:
            for engine in self._engines:
                await engine.close()


_Key = tuple[str, tuple[str, ...], int | None]
_by_loop: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, dict[_Key, tuple[Containers, list[int]]]] = (
    weakref.WeakKeyDictionary()
)


def acquire(settings: DockerSettings, hosts: Sequence[str], slots: int | None) -> Containers:
    """The running loop's containers for these settings, made if they are not there. Pair with one `release`."""
    shared = _by_loop.setdefault(asyncio.get_running_loop(), {})
    key = (repr(settings), tuple(hosts), slots)
    if key not in shared:
        shared[key] = (Containers(settings, hosts=hosts, slots=slots), [0])
    containers, users = shared[key]
    users[0] += 1
    return containers


async def release(containers: Containers) -> None:
    """Give one use back; the last one closes the pool."""
    shared = _by_loop.get(asyncio.get_running_loop(), {})
    for key, (known, users) in list(shared.items()):
        if known is containers:
            users[0] -= 1
            if users[0]:
                return
            # Out of the table before the first await, so that nobody is handed a pool that is closing.
            del shared[key]
            break
    await containers.close()
