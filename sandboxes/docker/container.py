"""`Container`: one container on an engine, made, asked after and removed. Commands and files are others' business.

    new ──make()──▶ running ──it ends while it is needed──▶ lost
                       └──────── remove() in any state ───▶ gone, with its volumes

`state` is one word: "new", "starting", "running", "failed" (it did not start), "lost" or "closed". `DockerSandbox` sets
all of them but "lost", which is set here and by `Commands` where they find that the container has gone.
"""

from __future__ import annotations

import contextlib
import logging
import math
import secrets
import time
from collections.abc import Callable
from typing import TypeVar

from sandboxes.base import SandboxFault
from sandboxes.cancellation import to_the_end
from sandboxes.docker.engine import ContainerGone, DockerEngine
from sandboxes.docker.labels import labels
from sandboxes.docker.scripts import INIT
from sandboxes.docker.settings import DockerSettings

log = logging.getLogger(__name__)

T = TypeVar("T")

REMOVE_S = 150.0
GONE_S = 120.0


class Container:
    """See the module. `id` is "" until it is made; `user` is what its commands run as, "" until then."""

    def __init__(self, engine: DockerEngine, image: str, settings: DockerSettings) -> None:
        self.engine = engine
        self.image = image
        self.settings = settings
        self.name = f"sao-{secrets.token_hex(8)}"
        self.id = ""
        self.user = ""
        self.state = "new"
        self._made = False

    async def make(self) -> None:
        """Create and start it. To be awaited to its end: a create that is cancelled half-way leaves a container that
        nobody knows."""
        image = await self.engine.call(lambda: self.engine.client.api.inspect_image(self.image))
        self.user = self.settings.user or (image.get("Config") or {}).get("User") or "0"
        self._made = True
        self.id = await self.engine.call(self._create)
        await self.engine.call(lambda: self.engine.client.api.start(self.id))

    def _create(self) -> str:
        import docker

        api, settings = self.engine.client.api, self.settings
        host_config = api.create_host_config(
            network_mode=settings.network,
            mem_limit=settings.memory_bytes,
            memswap_limit=settings.memory_bytes,
            pids_limit=settings.pids,
            nano_cpus=int(settings.cpus * 1e9),
            cap_drop=["ALL"],
            cap_add=list(settings.capabilities),
            security_opt=["no-new-privileges"],
            auto_remove=True,
            runtime=settings.runtime or None,
            ulimits=[docker.types.Ulimit(name="core", soft=0, hard=0)],
            log_config=docker.types.LogConfig(type="none"),
            storage_opt={"size": str(settings.disk_bytes)} if settings.disk_bytes else None,
        )
        made = api.create_container(
            self.image,
            entrypoint=["sh", "-c", INIT, "sh"],
            command=[str(math.ceil(settings.ttl_s))],
            stop_signal="SIGKILL",
            name=self.name,
            user=self.user,
            working_dir=settings.workdir or None,
            environment=settings.environment,
            labels=labels(settings.project, settings.ttl_s),
            host_config=host_config,
        )
        return str(made["Id"])

    def require_running(self) -> None:
        """Raise `SandboxFault` unless it runs as far as is known here."""
        if self.state != "running":
            raise SandboxFault(f"this sandbox is not running (it is {self.state}): start it, or make a new one")

    async def call(self, function: Callable[[], T], timeout_s: float = 60.0) -> T:
        """`DockerEngine.call`, where a container that has gone is "lost" from now on and told with its cause."""
        try:
            return await self.engine.call(function, timeout_s=timeout_s)
        except ContainerGone as error:
            raise self.lost(error) from error

    def lost(self, error: ContainerGone) -> ContainerGone:
        """Note that it has ended while it was needed; returns `error` with the cause."""
        if self.state == "running":
            self.state = "lost"
        return ContainerGone(
            f"container {self.name} ended while it was needed: killed or removed from outside, its time to live "
            f"({self.settings.ttl_s:g} s) over, or the engine restarted. Make a new sandbox. ({error})"
        )

    async def assert_running(self) -> None:
        """Raise `ContainerGone` unless the engine says that it runs, `EngineGone` if nobody can say."""
        await self.call(self._assert_running)

    def _assert_running(self) -> None:
        import docker

        state = self.engine.client.api.inspect_container(self.id)["State"]
        if not state["Running"]:
            raise docker.errors.APIError(f"the container is not running; its state is {state}")

    async def remove(self) -> None:
        """Remove it with its volumes; returns when it is gone. One that has gone already is no error."""
        with contextlib.suppress(ContainerGone):
            await self.engine.call(self._remove, timeout_s=REMOVE_S)

    def _remove(self) -> None:
        import docker

        deadline = time.monotonic() + GONE_S
        while time.monotonic() < deadline:
            try:
                self.engine.client.api.remove_container(self.name, force=True, v=True)
            except docker.errors.NotFound:
                return
            except docker.errors.APIError as error:
                if error.status_code != 409:  # 409: the engine is removing it already
                    raise
            time.sleep(0.05)
        raise docker.errors.APIError(f"container {self.name} was not gone {GONE_S:g} s after its removal had begun")

    async def remove_or_log(self) -> None:
        """`remove` to its end if there is anything to remove; an engine that is away is only logged."""
        if not self._made:
            return
        try:
            await to_the_end(self.remove())
            self._made = False
        except SandboxFault as error:
            log.warning("container %s is left to the sweeper: %s", self.name, error)
