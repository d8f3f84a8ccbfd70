"""`ZygoteSandbox`: the `Sandbox` contract over one supervisor. The two backends differ in how that one is started."""

from __future__ import annotations

import asyncio
import dataclasses
import sys
from collections.abc import Sequence
from typing import Any, Self

from sandboxes.base import FILE_MAX_BYTES, Limits, Promises, RunResult, Sandbox, SandboxFault, check_command
from sandboxes.inside import wire
from sandboxes.zygote import Channel, Launcher, Zygote

GRACE_S = 5.0
FILE_S = 30.0
LIMITED = ("wall_clock_s", "cpu_s", "memory_bytes", "processes", "file_bytes", "output_bytes")
"""Every field of `Limits`: the supervisor sees to all of them, whatever it runs in."""
REFUSED = ("keyrings", "kernel_interfaces", "uncounted_memory")
"""What the filter of system calls refuses in both backends."""


class ZygoteSandbox(Sandbox):
    """See `sandboxes.base.Sandbox`; `promises` and `launcher` are the backend's.

    `limits` are those of every run unless it has its own; `packages` names packages of the caller's to show inside,
    beside `sandboxes.packages.MATHEMATICS`. Memory and file size of one run may be lowered below the
    sandbox's limits, not raised above. Exit codes below 0 are signals, 127 is a command that could not be started. A
    run that is cancelled ends the sandbox.
    """

    promises: Promises
    launcher: Launcher

    @staticmethod
    def interpreter() -> str:
        """Return the path, inside, of the Python that this process runs on."""
        return sys.executable

    def __init__(self, limits: Limits | None = None, packages: Sequence[str] = ()) -> None:
        self._limits = limits or Limits()
        self._packages = packages
        self._zygote: Zygote | None = None
        self._channel: Channel | None = None
        self._lock = asyncio.Lock()

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def start(self) -> None:
        """Make the sandbox; raises `SandboxFault` if this machine cannot."""
        async with self._lock:
            if self._zygote is not None:
                raise SandboxFault("this sandbox was started before; make a new one")
            self._zygote = Zygote(type(self).launcher, preload=False, packages=self._packages)
            try:
                await self._zygote.start()
                self._channel = await self._zygote.fork(self._limits, python=False)
            except BaseException:
                await self._zygote.close()
                raise

    async def _request(self, head: dict[str, Any], body: bytes, timeout_s: float) -> wire.Frame:
        async with self._lock:
            channel, self._channel = self._channel, None
            if channel is None:
                raise SandboxFault("this sandbox is not running: it was not started, was closed, or had failed")
            try:
                answer = await channel.request(head, body, timeout_s)
            except (TimeoutError, ConnectionError) as error:
                channel.abandon()
                raise SandboxFault(f"the sandbox does not answer any more: {error!r}; make a new one") from error
            except BaseException:
                channel.abandon()
                raise
            self._channel = channel
            return answer

    async def run(
        self, argv: list[str], *, stdin: bytes = b"", limits: Limits | None = None, env: dict[str, str] | None = None
    ) -> RunResult:
        """Run one command to its end; what it has started is killed then. See `RunResult`.

        Raises `SandboxFault` if the sandbox fails and `ValueError` for an empty command or a NUL byte in one.
        """
        check_command(argv, env)
        chosen = limits or self._limits
        head = {"op": "run", "argv": argv, "env": env or {}, "limits": dataclasses.asdict(chosen)}
        answer, body = await self._request(head, stdin, chosen.wall_clock_s + GRACE_S)
        if "error" in answer:
            raise SandboxFault(f"the command could not be run: {answer['error']}")
        cut = answer["stdout_bytes"]
        stderr = body[cut:].decode("utf-8", "replace")
        if answer["outcome"] in ("memory", "cpu", "processes"):
            stderr += f"\n[killed: over the {answer['outcome']} limit]\n"
        return RunResult(
            exit_code=None if answer["outcome"] == "timeout" else answer["exit_code"],
            stdout=body[:cut].decode("utf-8", "replace"),
            stderr=stderr,
            timed_out=answer["outcome"] == "timeout",
            duration_s=answer["duration_s"],
            omitted_bytes=answer["omitted"],
        )

    async def put(self, path: str, data: bytes) -> None:
        """Write a file, making the folders above it; raises OSError as `open` would."""
        await self._file({"op": "put", "path": path}, data)

    async def get(self, path: str) -> bytes:
        """Read a regular file of at most 256 MiB; raises OSError as `open` would."""
        return await self._file({"op": "get", "path": path, "max_bytes": FILE_MAX_BYTES}, b"")

    async def _file(self, head: dict[str, Any], data: bytes) -> bytes:
        answer, body = await self._request(head, data, FILE_S)
        if "error" in answer:
            raise OSError(answer["errno"], answer["error"], head["path"])
        return body

    async def close(self) -> None:
        """End the sandbox and everything in it, files too. Any state, any number of times."""
        channel, self._channel = self._channel, None
        if channel is not None:
            channel.abandon()
        if self._zygote is not None:
            await self._zygote.close()
