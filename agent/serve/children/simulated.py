"""Simulated users as a child process, started and ended from the page. They come in by the public door, like anyone."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import sys
from asyncio.subprocess import Process
from collections.abc import Sequence
from pathlib import Path

import msgspec

from agent.child_processes import log_tail, start_child, stop_child

log = logging.getLogger(__name__)

USERS = 2
_STOP_S = 5.0


class SimulatedState(msgspec.Struct, frozen=True):
    """`detail`: why they ended, if it was not at somebody's wish."""

    running: bool = False
    detail: str = ""


class SimulatedUsers:
    """Users of `recipe` at `url`; at most `per_minute` verdicts a minute.

    Life: ──start──▶ running ──stop, or their schedule is over, or the policy has stayed where it is──▶ not running
    """

    def __init__(self, recipe: Path, overrides: Sequence[str], log_file: Path, *, per_minute: float) -> None:
        self._recipe, self._overrides, self._log, self._per_minute = recipe, list(overrides), log_file, per_minute
        self._process: Process | None = None
        self._waiting: asyncio.Task[None] | None = None
        self._changing = asyncio.Lock()
        self.url = ""
        """Where they find the server; set once it listens."""
        self.state = SimulatedState()

    async def start(self, key: str) -> None:
        """Let them in, with the bearer key of whoever has asked for it. Harmless while they are there."""
        async with self._changing:
            if self.state.running:
                return
            pace_s = USERS * 60.0 / self._per_minute
            self._process = await start_child(
                *(sys.executable, "-m", "agent.simulate", self.url, *self._overrides, "--recipe", str(self._recipe)),
                *("--users", str(USERS), "--pace", f"{pace_s:g}", "--out", str(self._log.with_suffix(""))),
                log=self._log,
                env={**os.environ, "SAO_API_KEY": key},
                when_parent_dies=signal.SIGKILL,
            )
            self.state = SimulatedState(running=True)
            log.info("simulated users came in; their log is %s", self._log)
            self._waiting = asyncio.create_task(self._watch(self._process))

    async def stop(self) -> None:
        """Send them away. Harmless if there are none."""
        async with self._changing:
            if self._process is None or self._waiting is None:
                return
            self._waiting.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._waiting
            await asyncio.shield(asyncio.ensure_future(stop_child(self._process, grace_s=_STOP_S)))
            self._process = self._waiting = None
            self.state = SimulatedState()
            log.info("simulated users have gone")

    async def _watch(self, process: Process) -> None:
        code = await process.wait()
        detail = "their schedule is over" if code == 0 else log_tail(self._log, 300).strip()
        self.state = SimulatedState(detail=detail)
        log.info("simulated users ended with code %s", code)
