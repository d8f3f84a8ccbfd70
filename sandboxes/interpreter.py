"""The caller's side of the persistent Python interpreter (the inside is `sandboxes/inside/interpreter.py`)."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable

from sandboxes.base import Limits, PythonResult, SandboxFault
from sandboxes.zygote import Channel

GRACE_S = 3.0
LOST = "The interpreter was restarted: all state (variables, imports, files) is lost."


class ZygotePython:
    """A `PythonSession` in a sandbox of its own; when that is lost, `replace` gives the next one.

    A cancelled call ends the sandbox, and the next call's output says so. Calls queue; they do not overlap.
    """

    def __init__(self, channel: Channel, replace: Callable[[], Awaitable[Channel]], limits: Limits) -> None:
        self._channel: Channel | None = channel
        self._replace = replace
        self._limits = limits
        self._lock = asyncio.Lock()
        self._notice = ""
        self._closed = False

    async def run(self, code: str, *, timeout_s: float | None = None) -> PythonResult:
        """Run one cell; see `PythonResult`. Raises `SandboxFault` if no interpreter can be had."""
        async with self._lock:
            if self._closed:
                raise SandboxFault("this Python session is closed")
            return await self._run(code, self._limits.wall_clock_s if timeout_s is None else timeout_s)

    async def _run(self, code: str, timeout_s: float) -> PythonResult:
        if self._channel is None:
            self._channel = await self._replace()
        channel, self._channel = self._channel, None  # put back only if the interpreter lives on
        notice, self._notice = self._notice, f"[An earlier call was cancelled. {LOST}]\n"
        started = time.monotonic()
        head = {"op": "python", "limits": {"wall_clock_s": timeout_s}}
        try:
            answer, body = await channel.request(head, code.encode("utf-8", "surrogatepass"), timeout_s + GRACE_S)
        except TimeoutError:
            await channel.kill()
            answer, body = {"status": "timeout", "lost": True}, b""
        except ConnectionError:
            answer, body = {"status": "exit", "lost": True}, b""
        except BaseException:
            channel.abandon()
            raise
        self._notice = ""
        duration = time.monotonic() - started
        text = notice + body.decode("utf-8", "replace")
        if not answer["lost"]:
            self._channel = channel
            return PythonResult(text, answer["status"], bool(notice), duration)
        await channel.close()
        return PythonResult(
            _with_line(text, f"[{self._reason(answer, timeout_s)} {LOST}]"),
            "timeout" if answer["status"] == "timeout" else "died",
            True,
            duration,
        )

    def _reason(self, answer: dict[str, object], timeout_s: float) -> str:
        status, code = answer["status"], answer.get("exit_code")
        if status == "timeout":
            return f"Stopped: the time limit of {timeout_s:g} s was reached."
        if status == "memory":
            return f"Stopped: the memory limit of {self._limits.memory_bytes // 2**20} MiB was reached."
        if status == "cpu":
            return f"Stopped: the CPU limit of {self._limits.cpu_s:g} s was reached."
        if status == "processes":
            return "Stopped: too many processes."
        if isinstance(code, int) and code < 0:
            return f"The interpreter was killed by signal {-code}."
        if isinstance(code, int):
            return f"The interpreter left with exit code {code}."
        return "The interpreter died."

    async def close(self) -> None:
        """End the interpreter and all it started. May be called any number of times."""
        self._closed = True
        channel, self._channel = self._channel, None
        if channel is not None:
            await channel.close()


def _with_line(text: str, line: str) -> str:
    return f"{text}{'' if not text or text.endswith(chr(10)) else chr(10)}{line}\n"
