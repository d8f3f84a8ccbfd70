r"""`DockerSandbox`: a container to run commands in, of one episode and gone with it.

    async with DockerSandbox("sao-base:debian") as sandbox:
        await sandbox.put("/code/a.py", b"print(1)")
        (await sandbox.run(["python3", "/code/a.py"])).stdout        # "1\n"

Its life:

    new ──start()──▶ running ──run()*, put()*, get()*──▶ running ──close()──▶ closed
                        └──── container or engine gone ────▶ SandboxFault (close() still works)

What ends the container, whatever happens to its caller:

- `close()`, in any state, any number of times; a `start()` that fails or is cancelled removes what it made.
- The caller dies by SIGKILL: Docker knows nothing of that, so the container stays, until the sweeper of the next run
  on this machine (`DockerEngine.ready`, or `python -m sandboxes.sweep`) sees that its owner is gone.
- Nobody comes: its first process ends after the time to live, and the engine removes the container then.

Inside, a command runs as the image's user (root mostly) with all capabilities dropped but CHOWN, DAC_OVERRIDE and
FOWNER: what `tar`, `git` and `pip` need to handle files of other users as root does. SETUID and SETGID are missing on
purpose: no process can become another user, so `kill -9 -1` by that user ends all that a run left, whatever sessions,
double forks and clean environments it hid behind.

The first process is an init: it leaves no zombies, and the kernel lets no process inside kill it, so that a command
cannot end its container. (Docker's own init ends as soon as its only child is killed, and `kill -9 -1` would do that.)
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import posixpath
import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Self

from sandboxes import docker_files
from sandboxes.base import Limits, RunResult, SandboxFault
from sandboxes.docker_engine import (
    LABEL_EXPIRES,
    LABEL_OWNER,
    LABEL_PROJECT,
    PROJECT,
    ContainerGone,
    DiskFull,
    DockerEngine,
    EngineGone,
    owner,
    to_the_end,
)
from sandboxes.docker_exec import CappedText, ExecStream
from sandboxes.docker_scripts import INIT, KILLER, MARK, SHELL, SWEEP, WRAPPER

log = logging.getLogger(__name__)

CAPABILITIES = ("CHOWN", "DAC_OVERRIDE", "FOWNER")
KILL_S = 10.0
DRAIN_S = 5.0
REMOVE_S = 150.0
ENDING_S = 30.0


@dataclass(frozen=True, slots=True)
class DockerSettings:
    """What a container may be and use.

    `limits` are those of a run that names none: `wall_clock_s` and `output_bytes` hold for each run, `cpu_s` for each
    of its processes; memory, processes and CPUs are the container's, below. `user` "" is the image's. `ttl_s` is how
    long the container lives at most. `runtime` "" is the engine's own ("runsc" is gVisor). `disk_bytes` needs an engine
    whose storage has quotas (overlay2 on xfs with pquota).
    """

    memory_bytes: int = 4 * 2**30
    cpus: float = 2.0
    pids: int = 512
    network: str = "none"
    runtime: str = ""
    user: str = ""
    workdir: str = ""
    ttl_s: float = 4 * 3600.0
    environment: dict[str, str] = field(default_factory=dict)
    limits: Limits = field(default_factory=lambda: Limits(wall_clock_s=120.0))
    capabilities: tuple[str, ...] = CAPABILITIES
    disk_bytes: int | None = None
    project: str = PROJECT


@dataclass(slots=True)
class DockerProcess:
    """A command that goes on beside others, a shell say: `stream` holds its input and output, `end()` kills it."""

    stream: ExecStream
    exec_id: str
    mark: str
    user: str


class DockerSandbox:
    """One container; see the module's docstring for its life. `run`s of one sandbox wait for each other.

    `engine` None means the default one, made and closed with the sandbox; share one engine among many sandboxes.
    `on_closed` is called once, when `close` is done.
    """

    def __init__(
        self,
        image: str,
        *,
        settings: DockerSettings | None = None,
        engine: DockerEngine | None = None,
        on_closed: Callable[[], None] | None = None,
    ) -> None:
        self.image = image
        self.settings = settings or DockerSettings()
        self.id = ""
        self._own_engine = engine is None
        self.engine = engine or DockerEngine()
        self._name = f"sao-{secrets.token_hex(8)}"
        self._state = "new"
        self._made = False
        self._user = ""
        self._processes: dict[str, DockerProcess] = {}
        self._lock = asyncio.Lock()
        self._on_closed = on_closed

    @property
    def host(self) -> str:
        """The engine's DOCKER_HOST url; "" is the default engine."""
        return self.engine.host

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    # start and close

    async def start(self) -> None:
        """Make and start the container; raises `SandboxFault` and leaves nothing if that fails or is cancelled."""
        async with self._lock:
            if self._state != "new":
                raise SandboxFault("this sandbox was started before; make a new one")
            self._state = "starting"
            try:
                await self.engine.ready(self.settings.project)
                # To the end: a create that is cancelled half-way would leave a container that nobody knows.
                await to_the_end(self._make())
                self._state = "running"
            except BaseException:
                self._state = "failed"
                await self._remove_or_log()
                raise

    async def _make(self) -> None:
        image = await self.engine.call(lambda: self.engine.client.api.inspect_image(self.image))
        self._user = self.settings.user or (image.get("Config") or {}).get("User") or "0"
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
            name=self._name,
            user=self._user,
            working_dir=settings.workdir or None,
            environment=settings.environment,
            labels={
                LABEL_PROJECT: settings.project,
                LABEL_OWNER: owner(),
                LABEL_EXPIRES: str(int(time.time() + settings.ttl_s)),
            },
            host_config=host_config,
        )
        return str(made["Id"])

    async def _remove(self) -> None:
        with contextlib.suppress(ContainerGone):
            await self.engine.call(docker_files.remove, self.engine, self._name, timeout_s=REMOVE_S)

    async def _remove_or_log(self) -> None:
        if not self._made:
            return
        try:
            await to_the_end(self._remove())
            self._made = False
        except SandboxFault as error:
            log.warning("container %s is left to the sweeper: %s", self._name, error)

    async def close(self) -> None:
        """Remove the container and all in it. Any state, any number of times; an engine that is away is only logged."""
        if self._state == "starting":
            async with self._lock:  # what is being made would outlive its removal
                pass
        self._state = "closed"
        for process in self._processes.values():
            process.stream.close()
        self._processes.clear()
        await self._remove_or_log()
        if self._own_engine:
            await self.engine.close()
        on_closed, self._on_closed = self._on_closed, None
        if on_closed is not None:
            on_closed()

    # commands

    async def run(
        self,
        argv: list[str],
        *,
        stdin: bytes = b"",
        limits: Limits | None = None,
        env: dict[str, str] | None = None,
        cwd: str | None = None,
        user: str | None = None,
        background: bool = False,
    ) -> RunResult:
        """Run one command to its end and return how it ended.

        Nothing that it started is left then, nor when it is killed at `limits.wall_clock_s` (`timed_out`) or this call
        is cancelled. `background=True` keeps, at a normal end, what it left running, until a run without it ends.
        Exit codes are the shell's: 127 not found, 126 not executable or no such `cwd`, 128+n killed by signal n. A kill
        by the memory limit is told in the last line of `stderr`. Memory and processes are limited for the container as
        a whole (`DockerSettings`). Raises `SandboxFault` if container or engine fail, ValueError for an empty command
        or a NUL byte.
        """
        check_command(argv, env)
        chosen = limits or self.settings.limits
        async with self._lock:
            self._require_running()
            begun = time.monotonic()
            mark, user = secrets.token_hex(8), user or self._user
            mode = "none" if background else "mine" if self._processes else "all"
            stdout, stderr = CappedText(chosen.output_bytes), CappedText(chosen.output_bytes)
            cpu = str(math.ceil(chosen.cpu_s)) if chosen.cpu_s else ""
            guard = "" if stdin else "guard"
            exec_id = await self._exec(WRAPPER, [mode, cwd or "", cpu, guard, *argv], mark, user, env, stdin=True)
            stream: ExecStream | None = None
            code: int | None = None
            try:
                stream = await self._attach(exec_id)
                timed_out = not await _pump(stream, stdin, (stdout, stderr), chosen.wall_clock_s)
                if not timed_out:
                    code = await self._exit_code(exec_id, stdout)
                if timed_out and guard:
                    await stream.write(b"end\n")
                    await _pump(stream, b"", (stdout, stderr), DRAIN_S)
                # 137 may be the wrapper itself, killed by the command; then its cleaning has not happened.
                if code is None or code == 137:
                    await to_the_end(self._kill(mark, user, selective=background))
                    await _pump(stream, b"", (stdout, stderr), DRAIN_S)
            except (asyncio.CancelledError, EngineGone):
                if stream is not None:
                    stream.close()  # which wakes the guard
                with contextlib.suppress(SandboxFault):
                    await to_the_end(self._kill(mark, user, selective=background))
                raise
            finally:
                if stream is not None:
                    stream.close()
            return RunResult(
                exit_code=code,
                stdout=stdout.text(),
                stderr=stderr.text(),
                timed_out=timed_out,
                duration_s=time.monotonic() - begun,
                omitted_bytes=stdout.omitted_bytes + stderr.omitted_bytes,
            )

    async def open(
        self, argv: list[str], *, env: dict[str, str] | None = None, cwd: str | None = None, user: str | None = None
    ) -> DockerProcess:
        """Start a command that goes on beside later runs, an interactive shell say; end it with `end` or `close`."""
        check_command(argv, env)
        async with self._lock:
            self._require_running()
            mark, user = secrets.token_hex(8), user or self._user
            exec_id = await self._exec(WRAPPER, ["mine", cwd or "", "", "", *argv], mark, user, env, stdin=True)
            process = DockerProcess(await self._attach(exec_id), exec_id, mark, user)
            self._processes[mark] = process
            return process

    async def end(self, process: DockerProcess) -> None:
        """Kill what `open` started, with all below it."""
        async with self._lock:
            if self._processes.pop(process.mark, None) is not None:
                try:
                    await to_the_end(self._kill(process.mark, process.user, selective=True))
                finally:
                    process.stream.close()

    async def alive(self) -> bool:
        """Whether the container runs; raises `EngineGone` if nobody can say."""
        if self._state != "running":
            return False
        try:
            await self._call(self._assert_running)
        except ContainerGone:
            return False
        return True

    def _require_running(self) -> None:
        if self._state != "running":
            raise SandboxFault(f"this sandbox is not running (it is {self._state}): start it, or make a new one")

    async def _exec(
        self, script: str, arguments: list[str], mark: str, user: str, env: dict[str, str] | None, *, stdin: bool
    ) -> str:
        environment = {**(env or {}), MARK: mark, "SAO_SCRIPT": SWEEP + script}
        made = await self._call(
            lambda: self.engine.client.api.exec_create(
                self.id, SHELL + arguments, stdin=stdin, user=user, environment=environment
            )
        )
        return str(made["Id"])

    async def _call(self, function: Any, timeout_s: float = 60.0) -> Any:
        """`engine.call`, where a container that is gone ends this sandbox and is told with its cause."""
        try:
            return await self.engine.call(function, timeout_s=timeout_s)
        except ContainerGone as error:
            raise self._lost(error) from error

    def _lost(self, error: ContainerGone) -> ContainerGone:
        if self._state == "running":
            self._state = "lost"
        return ContainerGone(
            f"container {self._name} ended while it was needed: killed or removed from outside, its time to live "
            f"({self.settings.ttl_s:g} s) over, or the engine restarted. Make a new sandbox. ({error})"
        )

    async def _attach(self, exec_id: str) -> ExecStream:
        try:
            return await ExecStream.open(self.engine, exec_id)
        except ContainerGone as error:
            raise self._lost(error) from error

    async def _exit_code(self, exec_id: str, said: CappedText) -> int:
        """How the command of an exec ended whose streams have ended."""
        deadline = time.monotonic() + ENDING_S
        while (about := await self._call(lambda: self.engine.client.api.exec_inspect(exec_id)))["Running"]:
            # The streams end a moment before the engine knows the exit code; later, the connection was lost.
            if time.monotonic() > deadline:
                raise EngineGone(f"the connection of a command to the Docker engine at {self.engine.url} was lost")
            await asyncio.sleep(0.05)
        if about["Pid"] == 0:
            if 'exec: "sh"' in said.text():
                return 127  # a command has removed the shell; the image had one, or the container had not started
            await self._call(self._assert_running)
            raise SandboxFault(f"the Docker engine at {self.engine.url} could not start a command: {said.text()}")
        return int(about["ExitCode"])

    async def _kill(self, mark: str, user: str, *, selective: bool) -> None:
        """End what a run left; raises `ContainerGone` if the container has gone. Has its own time limits."""
        what = mark if selective or self._processes else "all"
        for _ in range(3):
            try:
                async with asyncio.timeout(KILL_S):
                    if await self._kill_once(what, user):
                        break
            except TimeoutError:
                continue
        else:
            self._state = "lost"
            await self._remove()
            raise SandboxFault(
                f"the processes of a run in container {self._name} could not be ended, so it was removed"
            )

    async def _kill_once(self, what: str, user: str) -> bool:
        exec_id = await self._exec(KILLER, [what], "killer", user, None, stdin=False)
        stream = await self._attach(exec_id)
        said = CappedText(1024)
        try:
            await stream.frames(lambda _, data: said.feed(data))
        finally:
            stream.close()
        if "ended" in said.text():
            return True
        await self._call(self._assert_running)
        return False

    def _assert_running(self) -> None:
        import docker

        state = self.engine.client.api.inspect_container(self.id)["State"]
        if not state["Running"]:
            raise docker.errors.APIError(f"the container is not running; its state is {state}")

    # files

    async def _ids(self) -> tuple[int, int]:
        """The numeric user and group that files written by `put` belong to."""
        parts = self._user.split(":")
        if parts[0] in ("0", "root") and len(parts) == 1:
            return 0, 0
        if len(parts) == 2 and all(part.isdigit() for part in parts):
            return int(parts[0]), int(parts[1])
        found = await self.run(["sh", "-c", "id -u; id -g"], limits=Limits(wall_clock_s=30), background=True)
        try:
            uid, gid = map(int, found.stdout.split())
        except ValueError as error:
            raise SandboxFault(f"user {self._user!r} is not known in {self.image}: {found.stderr}") from error
        self._user = f"{uid}:{gid}"
        return uid, gid

    async def _on_files(self, function: Any, timeout_s: float) -> Any:
        """`_call`, but a path that is missing because the container is dead is the container's fault."""
        try:
            return await self._call(function, timeout_s)
        except FileNotFoundError:
            await self._call(self._assert_running)
            raise

    def _absolute(self, path: str) -> str:
        if not path or "\0" in path:
            raise ValueError("a path must not be empty nor hold NUL bytes")
        return posixpath.join(self.settings.workdir or "/", path)

    async def put(self, path: str, data: bytes, *, mode: int = 0o644) -> None:
        """Write a file of the sandbox's user, making the folders above it; raises OSError as `open` would.

        Relative paths are relative to `DockerSettings.workdir`, or "/".
        """
        path = self._absolute(path)
        folder, name = posixpath.split(path)
        tar = docker_files.one_file(name, data, mode, await self._ids())
        async with self._lock:
            self._require_running()
            try:
                await self._call(lambda: docker_files.put_file(self.engine.client, self.id, path, tar), timeout_s=300)
                return
            except FileNotFoundError:
                pass
        made = await self.run(["mkdir", "-p", "--", folder], limits=Limits(wall_clock_s=30), background=True)
        if made.exit_code:
            raise OSError(f"no folder {folder} could be made for {path}: {made.stderr.strip()}")
        async with self._lock:
            await self._on_files(lambda: docker_files.put_file(self.engine.client, self.id, path, tar), 300)

    async def get(self, path: str) -> bytes:
        """Read a regular file of at most 256 MiB, through links; raises OSError as `open` would."""
        path = self._absolute(path)
        self._require_running()
        data: bytes = await self._on_files(lambda: docker_files.get_file(self.engine.client, self.id, path), 300)
        return data

    async def assert_disk(self) -> None:
        """Raise `DiskFull` if the engine has no disk left for this container; a quota of its own is its own affair.

        Where a failed command may have met that: a full disk is not the command's doing. `ContainerGone` and
        `EngineGone` come through as well.
        """
        try:
            await self.put(f"/var/tmp/.sao-{secrets.token_hex(8)}", bytes(2**20))
        except (ContainerGone, EngineGone):
            raise
        except DiskFull:
            if self.settings.disk_bytes is None:
                raise
        except (OSError, SandboxFault):
            return  # the place is not what it was, so it says nothing

    async def put_archive(self, folder: str, tar: bytes) -> None:
        """Unpack a tar archive into a folder that exists; owners and modes are the archive's."""
        folder = self._absolute(folder)
        self._require_running()
        await self._on_files(lambda: docker_files.put_archive(self.engine.client, self.id, folder, tar), 600)

    async def get_archive(self, path: str) -> bytes:
        """Return a tar archive of a file or folder; its entries begin with the last part of `path`."""
        path = self._absolute(path)
        self._require_running()
        tar: bytes = await self._on_files(lambda: docker_files.get_archive(self.engine.client, self.id, path), 600)
        return tar


def check_command(argv: list[str], env: dict[str, str] | None) -> None:
    """Raise ValueError for an empty command, or a NUL byte in it or in `env`."""
    if not argv or any("\0" in text for text in [*argv, *(env or {}), *(env or {}).values()]):
        raise ValueError("argv must not be empty, and neither it nor env may hold NUL bytes")


async def _pump(stream: ExecStream, stdin: bytes, texts: tuple[CappedText, CappedText], limit_s: float) -> bool:
    """Write `stdin`, read both streams to their end; False if that took longer than `limit_s`."""

    def take(which: int, data: bytes) -> None:
        texts[1 if which == 2 else 0].feed(data)

    try:
        async with asyncio.timeout(limit_s), asyncio.TaskGroup() as group:
            writing = group.create_task(stream.write(stdin, eof=True)) if stdin else None
            await stream.frames(take)
            if writing is not None:
                writing.cancel()
    except TimeoutError:
        return False
    return True
