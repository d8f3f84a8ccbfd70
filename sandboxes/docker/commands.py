"""`Commands`: the commands of one container, from their `exec` to the death of all they started.

A run is one exec: the command in a wrapper, which at the end kills what is left. Where the wrapper could not (the time
is over, or the command has killed it), a second exec does. `scripts.py` holds what runs inside.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import secrets
import time
from dataclasses import dataclass

from sandboxes.base import Limits, RunResult, SandboxFault
from sandboxes.cancellation import to_the_end
from sandboxes.docker.container import Container
from sandboxes.docker.engine import ContainerGone, EngineGone
from sandboxes.docker.exec_stream import ExecStream
from sandboxes.docker.scripts import KILLER, MARK, SHELL, SWEEP, WRAPPER
from sandboxes.inside.output import CappedOutput

KILL_S = 10.0
DRAIN_S = 5.0
ENDING_S = 30.0


@dataclass(slots=True)
class DockerProcess:
    """A command that goes on beside others, a shell say: `stream` holds its input and output, `end()` kills it."""

    stream: ExecStream
    exec_id: str
    mark: str
    user: str


class Commands:
    """See the module. The container runs; one call at a time, which the caller sees to."""

    def __init__(self, container: Container) -> None:
        self._container = container
        self._processes: dict[str, DockerProcess] = {}

    async def run(
        self,
        argv: list[str],
        *,
        stdin: bytes,
        limits: Limits,
        env: dict[str, str] | None,
        cwd: str | None,
        user: str | None,
        background: bool,
    ) -> RunResult:
        """Run one command to its end; see `DockerSandbox.run`."""
        begun = time.monotonic()
        mark, user = secrets.token_hex(8), user or self._container.user
        mode = "none" if background else "mine" if self._processes else "all"
        stdout, stderr = CappedOutput(limits.output_bytes), CappedOutput(limits.output_bytes)
        cpu = str(math.ceil(limits.cpu_s)) if limits.cpu_s else ""
        guard = "" if stdin else "guard"
        exec_id = await self._exec(WRAPPER, [mode, cwd or "", cpu, guard, *argv], mark, user, env, stdin=True)
        stream: ExecStream | None = None
        code: int | None = None
        try:
            stream = await self._attach(exec_id)
            timed_out = not await _pump(stream, stdin, (stdout, stderr), limits.wall_clock_s)
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
        self, argv: list[str], *, env: dict[str, str] | None, cwd: str | None, user: str | None
    ) -> DockerProcess:
        """Start a command that goes on beside later runs; see `DockerSandbox.open`."""
        mark, user = secrets.token_hex(8), user or self._container.user
        exec_id = await self._exec(WRAPPER, ["mine", cwd or "", "", "", *argv], mark, user, env, stdin=True)
        process = DockerProcess(await self._attach(exec_id), exec_id, mark, user)
        self._processes[mark] = process
        return process

    async def end(self, process: DockerProcess) -> None:
        """Kill what `open` started, with all below it. Any number of times."""
        if self._processes.pop(process.mark, None) is not None:
            try:
                await to_the_end(self._kill(process.mark, process.user, selective=True))
            finally:
                process.stream.close()

    def close(self) -> None:
        """Drop the connections of what `open` started; the container's end is theirs."""
        for process in self._processes.values():
            process.stream.close()
        self._processes.clear()

    async def _exec(
        self, script: str, arguments: list[str], mark: str, user: str, env: dict[str, str] | None, *, stdin: bool
    ) -> str:
        container = self._container
        environment = {**(env or {}), MARK: mark, "SAO_SCRIPT": SWEEP + script}
        made = await container.call(
            lambda: container.engine.client.api.exec_create(
                container.id, SHELL + arguments, stdin=stdin, user=user, environment=environment
            )
        )
        return str(made["Id"])

    async def _attach(self, exec_id: str) -> ExecStream:
        try:
            return await ExecStream.open(self._container.engine, exec_id)
        except ContainerGone as error:
            raise self._container.lost(error) from error

    async def _exit_code(self, exec_id: str, said: CappedOutput) -> int:
        """How the command of an exec ended whose streams have ended."""
        container, deadline = self._container, time.monotonic() + ENDING_S
        url = container.engine.url
        while (about := await container.call(lambda: container.engine.client.api.exec_inspect(exec_id)))["Running"]:
            # The streams end a moment before the engine knows the exit code; later, the connection was lost.
            if time.monotonic() > deadline:
                raise EngineGone(f"the connection of a command to the Docker engine at {url} was lost")
            await asyncio.sleep(0.05)
        if about["Pid"] == 0:
            if 'exec: "sh"' in said.text():
                return 127  # a command has removed the shell; the image had one, or the container had not started
            await container.assert_running()
            raise SandboxFault(f"the Docker engine at {url} could not start a command: {said.text()}")
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
            self._container.state = "lost"
            await self._container.remove()
            raise SandboxFault(
                f"the processes of a run in container {self._container.name} could not be ended, so it was removed"
            )

    async def _kill_once(self, what: str, user: str) -> bool:
        exec_id = await self._exec(KILLER, [what], "killer", user, None, stdin=False)
        stream = await self._attach(exec_id)
        said = CappedOutput(1024)
        try:
            await stream.frames(lambda _, data: said.feed(data))
        finally:
            stream.close()
        if "ended" in said.text():
            return True
        await self._container.assert_running()
        return False


async def _pump(stream: ExecStream, stdin: bytes, outputs: tuple[CappedOutput, CappedOutput], limit_s: float) -> bool:
    """Write `stdin`, read both streams to their end; False if that took longer than `limit_s`."""

    def take(which: int, data: bytes) -> None:
        outputs[1 if which == 2 else 0].feed(data)

    try:
        async with asyncio.timeout(limit_s), asyncio.TaskGroup() as group:
            writing = group.create_task(stream.write(stdin, eof=True)) if stdin else None
            await stream.frames(take)
            if writing is not None:
                writing.cancel()
    except TimeoutError:
        return False
    return True
