"""What a sandbox promises, whatever runs it.

A sandbox is a place where code that nobody has read may run. Its life:

    new ──start()──▶ running ──run()*, put()*, get()*──▶ running ──close()──▶ closed
                        └──── the outside world fails ────▶ SandboxFault (close() still works)

`close()` may be called in any state, any number of times; after it no process, mount or file of the sandbox
is left. The same holds when the process that started the sandbox dies, by SIGKILL too.

Three contracts: `Sandbox` runs commands, `ContainerSandbox` is a whole system for one episode, `PythonSession` is an
interpreter. `python -m sandboxes.conformance` holds backends of the first two to every sentence of theirs.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

FILE_MAX_BYTES = 256 * 2**20
"""The largest file that `Sandbox.get` returns."""


class SandboxFault(RuntimeError):
    """The sandbox itself failed: an infrastructure fault, never the fault of the code that ran inside."""


@dataclass(frozen=True, slots=True)
class Limits:
    """What one run may use. Units are in the names; `None` means that the backend's own ceiling holds."""

    wall_clock_s: float = 10.0
    cpu_s: float | None = None
    memory_bytes: int = 512 * 2**20
    processes: int = 32
    file_bytes: int = 64 * 2**20
    output_bytes: int = 64 * 2**10


@dataclass(frozen=True, slots=True)
class RunResult:
    """How one command ended.

    `exit_code` is None when the run was killed at its wall clock (`timed_out`). Output is UTF-8 decoded with
    replacement, capped *while it is read* to `Limits.output_bytes` per stream (head and tail kept, the cut
    announced in the text); `omitted_bytes` says how much was cut.
    """

    exit_code: int | None
    stdout: str
    stderr: str
    timed_out: bool
    duration_s: float
    omitted_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Promises:
    """What a backend takes upon itself beyond the contract's text: data, so that nothing is left out in silence.

    `isolates`: kinds of things of the machine, and of other sandboxes, that code inside cannot reach, of "network",
    "files", "processes", "ipc" and "user" (another user's rights). `limits`: the fields of `Limits` that hold, for each
    run or for the sandbox as a whole; `wall_clock_s` and `output_bytes` always do, for each run. `refuses`: what code
    inside asks for in vain, of "keyrings", "kernel_interfaces" and "uncounted_memory" (where the machine can refuse
    them; `sandboxes.zygote.missing_walls` says where not), and "packages" (those of the caller that are not shown).
    """

    isolates: tuple[str, ...]
    limits: tuple[str, ...]
    refuses: tuple[str, ...] = ()


class Sandbox(Protocol):
    """One isolated place to run commands in; see the module's docstring for its life.

    Calls of one sandbox wait for each other. A call before `start`, after `close`, or after a fault raises
    `SandboxFault`, and so does whatever fails on our side. What the code inside does to itself never does: a command
    that is missing, crashes, fills its memory or never ends is a `RunResult`. A backend that tells these two apart
    wrongly turns broken machines into wrong answers, or wrong answers into endless retries.

    Paths are the sandbox's; relative ones are relative to the folder in which commands start.
    """

    @property
    def promises(self) -> Promises:
        """What is isolated and limited here."""
        ...

    async def start(self) -> None:
        """Make the sandbox. Once; raises `SandboxFault`, and a start that fails or is cancelled leaves nothing."""
        ...

    async def run(
        self, argv: list[str], *, stdin: bytes = b"", limits: Limits | None = None, env: dict[str, str] | None = None
    ) -> RunResult:
        """Run one command to its end and return how it ended.

        No shell: `argv` arrives as it is. `stdin` is all there is to read, `env` is added to the sandbox's own
        variables, `limits` replace those of the sandbox. Limits: past `wall_clock_s` seconds the run is killed, which
        is a result (`timed_out`, with the output until then). When a run ends, in whatever way, the processes it
        started have ended too, whatever sessions and parents they have; files stay for the next run.

        Encoding and truncation are `RunResult`'s. Exit codes: 127 for a command that is not there; -n or 128+n for one
        that signal n killed, as the backend's own docstring says.

        A run that is cancelled ends with all it started; whether the sandbox lives on is the backend's to say.

        Raises `SandboxFault`, and `ValueError` for an empty command or a NUL byte in it or in `env`.
        """
        ...

    async def put(self, path: str, data: bytes) -> None:
        """Write a file, making the folders above it; raises `OSError` as `open` would (a folder is in its place)."""
        ...

    async def get(self, path: str) -> bytes:
        """Read a regular file of at most `FILE_MAX_BYTES`, through links; raises `OSError` as `open` would.

        `FileNotFoundError` where nothing is; another `OSError` for a folder, a loop of links, a pipe or a device, at
        once: a caller is never made to wait for what nobody writes.
        """
        ...

    async def close(self) -> None:
        """End the sandbox and everything in it, files too. Any state, any number of times; raises nothing."""
        ...


@runtime_checkable
class ContainerSandbox(Sandbox, Protocol):
    """A sandbox that is a whole system of its own, made from an image: what work on a repository needs.

    Beyond `Sandbox`: files anywhere in it and whole archives of them, commands in any folder and as root, commands
    that outlive their run, and a terminal. Those who work in it (tools, graders) know this contract and no backend.

    Limits of memory and processes are the system's as a whole; `Limits` of one run bind its wall clock and its output.
    """

    @property
    def image(self) -> str:
        """The name of what it is made from: for messages to people."""
        ...

    @property
    def run_variable(self) -> str:
        """Name of an environment variable that holds another value in each run, by which the backend knows the run's
        processes; "" if there is none.

        A shell that takes up an earlier run's variables must leave this one out: processes under another run's mark
        would be taken for that run's, and outlive their own.
        """
        ...

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
        """`Sandbox.run`, in the folder `cwd` and as `user` ("0" is root, None the system's own user).

        Exit code 126 if the command cannot be executed or `cwd` is no folder. `background=True` keeps what the command
        left running when it ended by itself, until a run without it ends; a time-out still kills what is the run's.
        """
        ...

    async def put(self, path: str, data: bytes, *, mode: int = 0o644) -> None:
        """`Sandbox.put`; the file gets `mode` and belongs to the system's own user."""
        ...

    async def put_archive(self, folder: str, tar: bytes) -> None:
        """Unpack a tar archive into a folder that exists; owners and modes are the archive's. Raises `OSError`."""
        ...

    async def get_archive(self, path: str) -> bytes:
        """Return a tar archive of a file or folder; its entries begin with the last part of `path`. Raises `OSError`.

        Its names and links are whatever the code inside made them: never unpack it on this machine.
        """
        ...

    async def assert_disk(self) -> None:
        """Raise `SandboxFault` if the disk below this sandbox is full, or the sandbox is gone.

        To be asked where a command has failed that should not: a full disk is not the command's doing. Space that the
        sandbox has for itself alone, and has used up, is its own affair and raises nothing.
        """
        ...

    def terminal_command(
        self,
        argv: list[str],
        *,
        env: dict[str, str | None] | None = None,
        cwd: str | None = None,
        user: str | None = None,
    ) -> list[str]:
        """Return the command that, started on a pseudo-terminal of this machine, runs `argv` on a terminal inside.

        More words may be appended to it: they become `argv`'s. A variable of `env` that is None has, inside, the value
        that it has in the environment of the returned command. What runs inside is no run's: only a run without
        `background` and the sandbox's end are sure to end it, the end of the command here is not. Raises `SandboxFault`
        where there is no such command.
        """
        ...


def check_command(argv: list[str], env: dict[str, str] | None) -> None:
    """Raise ValueError for an empty command, or a NUL byte in it or in `env`: what `Sandbox.run` promises."""
    if not argv or any("\0" in text for text in [*argv, *(env or {}), *(env or {}).values()]):
        raise ValueError("argv must not be empty, and neither it nor env may hold NUL bytes")


@dataclass(frozen=True, slots=True)
class PythonResult:
    """What one call of the persistent interpreter gave back.

    `output` is the text for the model. `status`: "ok", "error" (the code raised), "timeout" or "died" (the
    interpreter left by os._exit, a signal, the memory limit). `state_lost` is true when a fresh interpreter
    stands behind the next call; `output` then says so.
    """

    output: str
    status: str
    state_lost: bool
    duration_s: float


class PythonSession(Protocol):
    """A Python interpreter whose state lives from call to call, until `close()`."""

    async def run(self, code: str, *, timeout_s: float | None = None) -> PythonResult: ...

    async def close(self) -> None: ...
