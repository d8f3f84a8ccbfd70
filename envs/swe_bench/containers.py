"""Where an instance's containers come from: one pool for all episodes on an event loop, counted like its images."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Self

from envs.shared import SharedByLoop
from envs.swe_bench.images import ensure_image, image_name
from envs.swe_bench.instance import Instance
from sandboxes.docker.engine import DockerEngine, ImageMissing
from sandboxes.docker.pool import DockerPool
from sandboxes.docker.sandbox import DockerSandbox
from sandboxes.docker.settings import DockerSettings


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
        self._ready_images: set[str] = set()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def open(self, instance: Instance, image: str = "") -> DockerSandbox:
        """A started container of the instance's image, or of `image`; raises `SandboxFault` and `RowError`."""
        name = image or image_name(instance)
        if not image and name not in self._ready_images:
            for engine in self._engines:
                await ensure_image(instance, engine)
            self._ready_images.add(name)
        try:
            return await self._pool.sandbox(name)
        except ImageMissing:
            self._ready_images.discard(name)
            raise

    async def close(self) -> None:
        """End all containers and connections."""
        try:
            await self._pool.close()
        finally:
            for engine in self._engines:
                await engine.close()


SHARED: SharedByLoop[tuple[str, tuple[str, ...], int | None], Containers] = SharedByLoop(close=Containers.close)


def acquire(settings: DockerSettings, hosts: Sequence[str], slots: int | None) -> Containers:
    """The running loop's containers for these settings, made if they are not there. Pair with one `release`."""
    # By their text: settings hold a mapping, which has no hash.
    key = (repr(settings), tuple(hosts), slots)
    return SHARED.acquire(key, lambda: Containers(settings, hosts=hosts, slots=slots))


async def release(containers: Containers) -> None:
    """Give one use back; the last one closes the pool."""
    await SHARED.release(containers)
