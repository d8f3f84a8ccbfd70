"""Containers of Harbor tasks: images that are there or built here, and a pool for each kind of limits."""

from __future__ import annotations

import asyncio
import hashlib
import io
import tarfile
from collections.abc import Sequence
from pathlib import Path

from envs.adapters.harbor.task import HarborTask
from envs.shared import SharedByLoop
from sandboxes.base import SandboxFault
from sandboxes.docker.engine import DockerEngine, ImageMissing
from sandboxes.docker.pool import DockerPool
from sandboxes.docker.sandbox import DockerSandbox
from sandboxes.docker.settings import DockerSettings

REPOSITORY = "sao-harbor"
LABEL = "sao.harbor"
_GRACE_S = 30.0


class TaskContainers:
    """Containers with the same limits, on `hosts` (DOCKER_HOST urls; none is the default engine).

    Belongs to one event loop; `close()` ends all containers, those in use too.
    """

    def __init__(self, settings: DockerSettings, hosts: Sequence[str], slots: int | None, network: str) -> None:
        self._pool = DockerPool(settings, hosts=hosts, slots=slots)
        self._engines = [DockerEngine(host) for host in hosts or ("",)]
        self._network = network
        self._images: dict[Path, tuple[str, str]] = {}
        self._building = asyncio.Lock()  # one at a time: episodes of a task start together

    async def open(self, task: HarborTask) -> tuple[DockerSandbox, str]:
        """A started container of the task's image, and the folder to work in. Raises `SandboxFault`."""
        async with self._building:
            if task.folder not in self._images:
                self._images[task.folder] = await self._image(task)
        image, workdir = self._images[task.folder]
        try:
            return await self._pool.sandbox(image), task.workdir or workdir or "/"
        except ImageMissing:
            self._images.pop(task.folder, None)
            raise

    async def close(self) -> None:
        """End all containers and connections."""
        try:
            await self._pool.close()
        finally:
            for engine in self._engines:
                await engine.close()

    async def _image(self, task: HarborTask) -> tuple[str, str]:
        """The image's name, which every engine has then, and its own working folder."""
        context = b"" if task.image else await asyncio.to_thread(archive, task.context, "")
        name = task.image or f"{REPOSITORY}:{hashlib.sha256(context).hexdigest()[:16]}"
        workdir = ""
        for engine in self._engines:
            try:
                about = await engine.call(lambda engine=engine: engine.client.api.inspect_image(name))
            except ImageMissing as error:
                if task.image:
                    raise ImageMissing(
                        f"{task.name}: there is no image {name} at {engine.url}: docker pull {name}"
                    ) from error
                await engine.call(
                    _build, engine, context, name, task.name, self._network, timeout_s=task.build_s + _GRACE_S
                )
                about = await engine.call(lambda engine=engine: engine.client.api.inspect_image(name))
            workdir = str(about["Config"].get("WorkingDir") or "")
        return name, workdir


def _build(engine: DockerEngine, context: bytes, name: str, task: str, network: str) -> None:
    """Blocking. Nothing is pulled: what the Dockerfile begins with is there, or the build fails and says so."""
    import docker

    try:
        engine.client.images.build(
            fileobj=io.BytesIO(context),
            custom_context=True,
            tag=name,
            labels={LABEL: task},
            rm=True,
            forcerm=True,
            pull=False,
            network_mode=network,
        )
    except (docker.errors.BuildError, docker.errors.APIError) as error:
        raise SandboxFault(f"{task}: its environment/Dockerfile could not be built: {error}") from error


def archive(folder: Path, below: str) -> bytes:
    """`folder` as a tar archive whose names begin with `below`; all of root's, and the same for the same files.

    Raises OSError.
    """

    def plain(entry: tarfile.TarInfo) -> tarfile.TarInfo:
        entry.uid = entry.gid = 0
        entry.uname = entry.gname = "root"
        entry.mtime = 0
        entry.mode = 0o755 if entry.isdir() or entry.mode & 0o100 or entry.name.endswith(".sh") else 0o644
        return entry

    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.PAX_FORMAT) as tar:
        if below:
            tar.add(folder, below, recursive=False, filter=plain)
        for path in sorted(folder.rglob("*")):
            tar.add(path, str(Path(below, path.relative_to(folder))), recursive=False, filter=plain)
    return buffer.getvalue()


_SHARED: SharedByLoop[tuple[str, tuple[str, ...], int | None, str], TaskContainers] = SharedByLoop(
    close=TaskContainers.close
)


def acquire(settings: DockerSettings, hosts: tuple[str, ...], slots: int | None, network: str) -> TaskContainers:
    """The running loop's containers for these settings. Pair with one `release`."""
    key = (repr(settings), hosts, slots, network)
    return _SHARED.acquire(key, lambda: TaskContainers(settings, hosts, slots, network))


async def release(containers: TaskContainers) -> None:
    """Give one use back; the last one ends them."""
    await _SHARED.release(containers)
