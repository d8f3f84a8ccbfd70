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
import socket
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import psutil

from sandboxes.base import SandboxFault

T = TypeVar("T")

DEFAULT_HOST = "unix:///var/run/docker.sock"
PROJECT = "sao"
LABEL_PROJECT = "sao.project"
LABEL_OWNER = "sao.owner"
LABEL_EXPIRES = "sao.expires"
GET_ENGINE = "run `make sandboxes` (or: sh sandboxes/install_docker.sh), or set DOCKER_HOST to an engine that runs"
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


def machine() -> str:
    """Name this machine, boot and PID namespace: where a process id means something."""
    with contextlib.suppress(OSError), open("/proc/sys/kernel/random/boot_id") as file:
        boot = file.read().strip()[:8]
        return f"{socket.gethostname()}/{boot}/{os.stat('/proc/self/ns/pid').st_ino}"
    return socket.gethostname()


@functools.cache
def _owner_of(pid: int) -> str:
    return f"{machine()}:{pid}:{psutil.Process(pid).create_time():.2f}"


def owner() -> str:
    """Name this process so that no other one, earlier or later, has the same name: machine, pid, start time."""
    return _owner_of(os.getpid())


def owner_is_gone(name: str) -> bool:
    """Whether the process that `owner()` named has ended; False where that cannot be known (another machine)."""
    where, _, rest = name.partition(":")
    pid, _, begun = rest.partition(":")
    if where != machine() or not pid.isdigit():
        return False
    try:
        return abs(psutil.Process(int(pid)).create_time() - float(begun)) > 1.0
    except psutil.NoSuchProcess:
        return True
    except (psutil.AccessDenied, ValueError):
        return False


async def to_the_end(work: Coroutine[Any, Any, T]) -> T:
    """Await `work` to its end even if this task is cancelled meanwhile; the cancellation is raised afterwards.

    For steps that must not stop in the middle. `work` needs a time limit of its own.
    """
    task = asyncio.ensure_future(work)
    cancelled: asyncio.CancelledError | None = None
    while not task.done():
        try:
            await asyncio.shield(task)
        except asyncio.CancelledError as error:
            if task.cancelled():
                raise
            cancelled = error
        except Exception:
            break  # the task's own; raised by result() below
    if cancelled is not None:
        if not task.cancelled():
            task.exception()
        raise cancelled
    return task.result()


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
            from sandboxes.sweep import sweep

            with contextlib.suppress(SandboxFault):  # what cannot be removed now is met by the next sweep
                await sweep(self, project=project)

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
            "not needed, and what dead runs left: python -m sandboxes.sweep"
        )
    if isinstance(error, docker.errors.ImageNotFound) or ("No such image" in text):
        return ImageMissing(
            f"the Docker engine at {url} has no such image: {text}. Pull it (docker pull IMAGE) or build it "
            "(`make sandboxes` builds the demo base image)"
        )
    if says_gone(text) or says_gone(str(error)):
        return ContainerGone(f"the container is gone: {text}")
    return SandboxFault(f"the Docker engine at {url} refused: {text}")
