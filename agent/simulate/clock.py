"""The global policy step of a server, as anyone can see it: from its events."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from typing import Any

import aiohttp

_RECONNECT_S = 1.0
_LONGEST = 1 << 23  # bytes of one event; the first one holds the server's latest history


class Stalled(RuntimeError):
    """The policy does not move any more; the message says for how long and what the server says."""


class PolicyClock:
    """Follows `/v1/events` of a server; `step` counts policy steps since it first looked.

        async with PolicyClock.watching(session, url) as clock:
            await clock.reach(3, patience_s=60)

    A publication is told at once and is a step. A step whose candidate was dropped has no publication; it is told
    by the learner's figures, a second later at most.
    """

    def __init__(self) -> None:
        self.version = 0
        self._first: dict[str, int] = {}
        self._newest: dict[str, int] = {}
        self._moved = asyncio.Condition()
        self._ready = asyncio.Event()

    @classmethod
    @contextlib.asynccontextmanager
    async def watching(
        cls, session: aiohttp.ClientSession, url: str, headers: dict[str, str] | None = None
    ) -> AsyncIterator[PolicyClock]:
        """Watch until the block ends. Raises `aiohttp.ClientError` if the events cannot be had at all."""
        clock = cls()
        task = asyncio.create_task(clock._follow(session, f"{url}/v1/events", headers or {}))
        try:
            waiting = asyncio.create_task(clock._ready.wait())
            async with asyncio.timeout(60):
                await asyncio.wait({task, waiting}, return_when=asyncio.FIRST_COMPLETED)
            waiting.cancel()
            if task.done():
                task.result()
            yield clock
        finally:
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError, aiohttp.ClientError):
                await task

    @property
    def step(self) -> int:
        """Policy steps since the first look."""
        return max((self._newest[name] - self._first[name] for name in self._newest), default=0)

    async def reach(self, step: int, *, patience_s: float) -> None:
        """Wait until the step is at least `step`; `Stalled` if it does not move at all for `patience_s`."""
        async with self._moved:
            while self.step < step:
                before = self.step
                try:
                    async with asyncio.timeout(patience_s):
                        await self._moved.wait_for(lambda seen=before: self.step > seen)  # type: ignore[misc]
                except TimeoutError as error:
                    raise Stalled(f"the policy has stayed at step {before} for {patience_s:g} s") from error

    async def saw(self, kind: str, data: dict[str, Any]) -> None:
        """Take in one event."""
        if kind == "hello":
            told = [event for event in data.get("history", ()) if event.get("kind") == "learner"]
            version, step = data.get("version"), told[-1].get("step", 0) if told else 0
        elif kind == "version" and data.get("source") == "learner":
            version, step = data["version"], None
        elif kind == "learner":
            version, step = None, data.get("step")
        else:
            return
        async with self._moved:
            for name, value in (("version", version), ("step", step)):
                if isinstance(value, int):
                    self._first.setdefault(name, value)
                    self._newest[name] = max(value, self._newest.get(name, value))
            self.version = self._newest.get("version", 0)
            self._ready.set()
            self._moved.notify_all()

    async def _follow(self, session: aiohttp.ClientSession, url: str, headers: dict[str, str]) -> None:
        unlimited = aiohttp.ClientTimeout(total=None, sock_read=60)
        while True:
            try:
                async with session.get(url, headers=headers, timeout=unlimited, read_bufsize=_LONGEST) as answer:
                    answer.raise_for_status()
                    kind = ""
                    async for raw in answer.content:
                        line = raw.decode().rstrip("\n")
                        if line.startswith("event: "):
                            kind = line.removeprefix("event: ")
                        elif line.startswith("data: "):
                            await self.saw(kind, json.loads(line.removeprefix("data: ")))
            except (aiohttp.ClientError, TimeoutError):
                if not self._ready.is_set():
                    raise
            await asyncio.sleep(_RECONNECT_S)
