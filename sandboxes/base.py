"""What a sandbox promises, whatever runs it.

A sandbox is a place where code that nobody has read may run. Its life:

    new ──start()──▶ running ──run()*, put()*, get()*──▶ running ──close()──▶ closed
                        └──── the outside world fails ────▶ SandboxFault (close() still works)

`close()` may be called in any state, any number of times; after it no process, mount or file of the sandbox
is left. The same holds when the process that started the sandbox dies, by SIGKILL too.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol


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


class Sandbox(Protocol):
    """One isolated place to run commands in; see the module's docstring for its life."""

    async def start(self) -> None: ...

    async def run(
        self, argv: list[str], *, stdin: bytes = b"", limits: Limits | None = None, env: dict[str, str] | None = None
    ) -> RunResult: ...

    async def put(self, path: str, data: bytes) -> None: ...

    async def get(self, path: str) -> bytes: ...

    async def close(self) -> None: ...


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


@dataclass(frozen=True, slots=True)
class BackendStatus:
    """What the probe found: whether a backend works here, and if not, what to do about it."""

    name: str
    available: bool
    reason: str = ""
    isolation: tuple[str, ...] = field(default=())
