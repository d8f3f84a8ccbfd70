"""`DockerEngine`: one Docker engine behind the `docker` SDK, called from asyncio.

    engine = DockerEngine()                       # DOCKER_HOST, else the default socket
    info = await engine.call(engine.client.info)  # any SDK call, in a thread, with a time limit
    await engine.close()

SDK calls block, so they run on threads of the engine's own: a call that hangs takes one of those, never one of the
event loop's. Errors of the SDK come out as `SandboxFault` whose text says what to do.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from sandboxes.base import SandboxFault
from sandboxes.docker import leftovers

T = TypeVar("T")

DEFAULT_HOST = "unix:///var/run/docker.sock"
GET_ENGINE = "run `make sandboxes` (or: sh sandboxes/docker/install.sh), or set DOCKER_HOST to an engine that runs"
CALL_S = 60.0
WORKERS = 32


class ContainerGone(SandboxFault):
    """The container ended while it was needed: killed from outside, time to live over, engine restart."""


class EngineGone(SandboxFault):
    """No Docker engine answers."""


class ImageMissing(SandboxFault):
    """The engine has no such image."""


class DiskFull(SandboxFault):
    """The engine's disk is full."""


class DockerEngine:
    """One engine. `host` is a DOCKER_HOST url (unix://, tcp://); "" is $DOCKER_HOST, else the default socket.

    Life: new ──first call──▶ connected ──close()──▶ closed. An engine that goes away and comes back is met again by the
    next call. TLS is taken from DOCKER_TLS_VERIFY and DOCKER_CERT_PATH, as the docker command does.
    """

    def __init__(self, host: str = "", *, workers: int = WORKERS) -> None:
        self.host = host
        self.url = host or os.environ.get("DOCKER_HOST") or DEFAULT_HOST
        self._workers = workers
        self._threads = ThreadPoolExecutor(workers, thread_name_prefix="docker")
        self._client: Any = None
        self._swept: set[str] = set()  # projects
        self._closed = False
        self._lock = asyncio.Lock()

    @property
    def client(self) -> Any:
        """The SDK's `docker.DockerClient`, connected at first use. It blocks: use it in functions given to `call`."""
        if self._client is None:
            try:
                import docker
            except ImportError as error:
                raise SandboxFault("containers need the docker package: pip install 'sao-agents[docker]'") from error
            if self.url.startswith("ssh://"):
                raise SandboxFault(
                    f"{self.url}: exec streams need a socket. Forward it and use that: "
                    "ssh -nNT -L /tmp/engine.sock:/var/run/docker.sock HOST, then unix:///tmp/engine.sock"
                )
            try:
                tls = docker.utils.kwargs_from_env().get("tls") if self.url.startswith("tcp://") else None
                self._client = docker.DockerClient(
                    base_url=self.url, timeout=CALL_S, tls=tls or False, max_pool_size=self._workers
                )
            except docker.errors.DockerException as error:
                raise EngineGone(f"no Docker engine can be reached at {self.url}: {error}; {GET_ENGINE}") from error
        return self._client

    async def call(self, function: Callable[..., T], *args: Any, timeout_s: float = CALL_S, **kwargs: Any) -> T:
        """Run one blocking SDK call on a thread and return its value.

        Raises a `SandboxFault` for what the SDK raises, and when `timeout_s` is over; the thread is given back when
        the SDK's own time limit ends the call. Other errors of `function` (OSError, ValueError) come through.
        """
        if self._closed:
            raise SandboxFault("this engine was closed")
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(timeout_s):
                return await loop.run_in_executor(
                    self._threads, functools.partial(_guarded, self, function, args, kwargs)
                )
        except TimeoutError as error:
            raise EngineGone(
                f"the Docker engine at {self.url} did not answer {getattr(function, '__name__', 'a call')} within "
                f"{timeout_s:g} s: look at its log; {GET_ENGINE}"
            ) from error

    async def ready(self, project: str) -> None:
        """Raise `SandboxFault` unless the engine answers; at the first call also sweep what dead owners left there.

        Only things of `project` are swept (`DockerSettings.project`): others are somebody else's to look at.
        """
        async with self._lock:
            if project in self._swept:
                return
            await self.call(lambda: self.client.ping(), timeout_s=20)
            self._swept.add(project)
            with contextlib.suppress(SandboxFault):  # what cannot be removed now is met by the next sweep
                await self.sweep(project)

    async def sweep(self, project: str | None = None, *, dry_run: bool = False) -> list[leftovers.Leftover]:
        """Remove what dead owners left; returns what was (with `dry_run`: would be) removed.

        Only things that carry our labels are looked at; with `project`, only those of that project.
        Raises `SandboxFault` if the engine does not answer.
        """
        return await self.call(lambda: leftovers.sweep(self.client, project, dry_run), timeout_s=300)

    async def close(self) -> None:
        """Give back threads and connections. Containers are their sandboxes' business."""
        self._closed = True
        client, self._client = self._client, None
        if client is not None:
            client.close()
        self._threads.shutdown(wait=False, cancel_futures=True)


def _guarded(engine: DockerEngine, function: Callable[..., T], args: tuple[Any, ...], kwargs: dict[str, Any]) -> T:
    _ = engine.client  # a missing SDK is a SandboxFault here, before its errors are named below
    import docker
    import requests

    try:
        return function(*args, **kwargs)
    except (docker.errors.DockerException, requests.RequestException) as error:
        raise fault(engine.url, error) from error


def says_gone(text: str) -> bool:
    """Whether an answer of the engine means that the container has ended."""
    return any(sign in text for sign in ("No such container", "No such exec", "is not running", "is dead", "is paused"))


def fault(url: str, error: Exception) -> SandboxFault:
    """Translate an error of the SDK to a `SandboxFault` that says what to do."""
    import docker

    text = str(getattr(error, "explanation", None) or error)
    # An APIError, which the engine itself has answered, is a RequestException too.
    if not isinstance(error, docker.errors.APIError):
        return EngineGone(f"no Docker engine answers at {url}: {text}; {GET_ENGINE}")
    if "no space left on device" in text.lower():
        return DiskFull(
            f"the disk of the Docker engine at {url} is full: {text}. See `docker system df`; remove images that are "
            "not needed, and what dead runs left: python -m sandboxes.docker.sweep"
        )
    if isinstance(error, docker.errors.ImageNotFound) or ("No such image" in text):
        return ImageMissing(
            f"the Docker engine at {url} has no such image: {text}. Pull it (docker pull IMAGE) or build it "
            "(`make sandboxes` builds the demo base image)"
        )
    if says_gone(text) or says_gone(str(error)):
        return ContainerGone(f"the container is gone: {text}")
    return SandboxFault(f"the Docker engine at {url} refused: {text}")
