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
  on this machine (`DockerEngine.ready`, or `python -m sandboxes.docker.sweep`) sees that its owner is gone.
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
import posixpath
import secrets
import shutil
from collections.abc import Callable
from typing import Self, TypeVar

from sandboxes.base import ContainerSandbox, Limits, Promises, RunResult, SandboxFault, check_command
from sandboxes.cancellation import to_the_end
from sandboxes.docker import files as docker_files
from sandboxes.docker.commands import Commands, DockerProcess
from sandboxes.docker.container import Container
from sandboxes.docker.engine import ContainerGone, DiskFull, DockerEngine, EngineGone
from sandboxes.docker.scripts import MARK
from sandboxes.docker.settings import DockerSettings

T = TypeVar("T")

# The default, ctrl-p ctrl-q, are keys that somebody at a terminal may send.
DETACH_KEYS = "ctrl-^,ctrl-],ctrl-^,ctrl-]"


class DockerSandbox(ContainerSandbox):
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
        self.settings = settings or DockerSettings()
        self._own_engine = engine is None
        self.engine = engine or DockerEngine()
        self._container = Container(self.engine, image, self.settings)
        self._commands = Commands(self._container)
        self._lock = asyncio.Lock()
        self._on_closed = on_closed

    @property
    def image(self) -> str:
        """The name of the container's image."""
        return self._container.image

    @property
    def id(self) -> str:
        """The container's id at its engine; "" before `start`."""
        return self._container.id

    @property
    def host(self) -> str:
        """The engine's DOCKER_HOST url; "" is the default engine."""
        return self.engine.host

    @property
    def promises(self) -> Promises:
        """What is isolated and limited here; a container with a network of its own choice does not isolate that."""
        network = ("network",) if self.settings.network == "none" else ()
        limits = ("wall_clock_s", "cpu_s", "memory_bytes", "processes", "output_bytes")
        return Promises(isolates=(*network, "files", "processes", "ipc", "user"), limits=limits)

    @property
    def run_variable(self) -> str:
        """The variable that marks a run's processes."""
        return MARK

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    # start and close

    async def start(self) -> None:
        """Make and start the container; raises `SandboxFault` and leaves nothing if that fails or is cancelled."""
        async with self._lock:
            if self._container.state != "new":
                raise SandboxFault("this sandbox was started before; make a new one")
            self._container.state = "starting"
            try:
                await self.engine.ready(self.settings.project)
                # To the end: a create that is cancelled half-way would leave a container that nobody knows.
                await to_the_end(self._container.make())
                self._container.state = "running"
            except BaseException:
                self._container.state = "failed"
                await self._container.remove_or_log()
                raise

    async def close(self) -> None:
        """Remove the container and all in it. Any state, any number of times; an engine that is away is only logged."""
        if self._container.state == "starting":
            async with self._lock:  # what is being made would outlive its removal
                pass
        self._container.state = "closed"
        self._commands.close()
        await self._container.remove_or_log()
        if self._own_engine:
            await self.engine.close()
        on_closed, self._on_closed = self._on_closed, None
        if on_closed is not None:
            on_closed()

    async def alive(self) -> bool:
        """Whether the container runs; raises `EngineGone` if nobody can say."""
        if self._container.state != "running":
            return False
        try:
            await self._container.assert_running()
        except ContainerGone:
            return False
        return True

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
        async with self._lock:
            self._container.require_running()
            return await self._commands.run(
                argv,
                stdin=stdin,
                limits=limits or self.settings.limits,
                env=env,
                cwd=cwd,
                user=user,
                background=background,
            )

    async def open(
        self, argv: list[str], *, env: dict[str, str] | None = None, cwd: str | None = None, user: str | None = None
    ) -> DockerProcess:
        """Start a command that goes on beside later runs, an interactive shell say; end it with `end` or `close`."""
        check_command(argv, env)
        async with self._lock:
            self._container.require_running()
            return await self._commands.open(argv, env=env, cwd=cwd, user=user)

    async def end(self, process: DockerProcess) -> None:
        """Kill what `open` started, with all below it."""
        async with self._lock:
            await self._commands.end(process)

    def terminal_command(
        self,
        argv: list[str],
        *,
        env: dict[str, str | None] | None = None,
        cwd: str | None = None,
        user: str | None = None,
    ) -> list[str]:
        """See `ContainerSandbox.terminal_command`: a docker client, so `SandboxFault` where that is not installed."""
        self._container.require_running()
        docker = shutil.which("docker")
        if docker is None:
            raise SandboxFault("a terminal in a container needs the docker command: run `make sandboxes`")
        command = ["env", "DOCKER_CLI_HINTS=false", docker, "--host", self.engine.url, "exec", "--interactive", "--tty"]
        command += ["--detach-keys", DETACH_KEYS, "--user", user or self._container.user]
        command += ["--workdir", cwd] if cwd else []
        for name, value in (env or {}).items():
            command += ["--env", name if value is None else f"{name}={value}"]
        return [*command, self.id, *argv]

    # files

    async def _ids(self) -> tuple[int, int]:
        """The numeric user and group that files written by `put` belong to."""
        user = self._container.user
        parts = user.split(":")
        if parts[0] in ("0", "root") and len(parts) == 1:
            return 0, 0
        if len(parts) == 2 and all(part.isdigit() for part in parts):
            return int(parts[0]), int(parts[1])
        answer = await self.run(["sh", "-c", "id -u; id -g"], limits=Limits(wall_clock_s=30), background=True)
        try:
            uid, gid = map(int, answer.stdout.split())
        except ValueError as error:
            raise SandboxFault(f"user {user!r} is not known in {self.image}: {answer.stderr}") from error
        self._container.user = f"{uid}:{gid}"
        return uid, gid

    async def _on_files(self, function: Callable[[], T], timeout_s: float) -> T:
        """`Container.call`, but a path that is missing because the container is dead is the container's fault."""
        try:
            return await self._container.call(function, timeout_s)
        except FileNotFoundError:
            await self._container.assert_running()
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
            self._container.require_running()
            try:
                await self._container.call(
                    lambda: docker_files.put_file(self.engine.client, self.id, path, tar), timeout_s=300
                )
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
        self._container.require_running()
        return await self._on_files(lambda: docker_files.get_file(self.engine.client, self.id, path), 300)

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
        self._container.require_running()
        await self._on_files(lambda: docker_files.put_archive(self.engine.client, self.id, folder, tar), 600)

    async def get_archive(self, path: str) -> bytes:
        """Return a tar archive of a file or folder; its entries begin with the last part of `path`."""
        path = self._absolute(path)
        self._container.require_running()
        return await self._on_files(lambda: docker_files.get_archive(self.engine.client, self.id, path), 600)
