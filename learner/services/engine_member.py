"""One engine of a fleet: what is known of it, and what follows. It decides, `learner.services.engine_fleet` does."""

from __future__ import annotations

import asyncio
from asyncio.subprocess import Process
from collections import deque
from dataclasses import dataclass, field
from pathlib import Path

from agent.engines.base import EngineRefused
from agent.engines.client import HttpEngine
from learner.services.engine_launchers import Launch

REFUSALS = 3
"""So many refusals of one publication are final. vLLM says 500 to a snapshot that it refuses, as a dying engine may."""

HUNG_S = 120.0
"""An engine that was started here, is alive and does not say how it is for so long is killed, and started again."""

RESTART_WINDOW_S = 3600.0
"""`engine.restarts` counts what happened in this time."""


@dataclass
class Member:
    """Its states are those of `Fleet`'s picture; times are those of `time.monotonic`.

    `process`, `launch` and `log` are None for an engine of somebody else. `served`: the version that it is known to
    serve; None: not known, or away. `trouble`: why it does not, in words; "" where it does.
    """

    name: str
    engine: HttpEngine
    process: Process | None = None
    launch: Launch | None = None
    log: Path | None = None
    served: int | None = None
    starting: bool = False
    refusals: int = 0
    trouble: str = ""
    silent_since: float | None = None
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    restarts: deque[float] = field(default_factory=deque)

    @property
    def port(self) -> int:
        """Where it listens; kept over restarts."""
        return int(self.engine.url.rpartition(":")[2])

    @property
    def has_refused(self) -> bool:
        """Whether it will not take the newest weights, however long one waits."""
        return self.refusals >= REFUSALS

    @property
    def has_ended(self) -> bool:
        """Whether it was started here and is no more."""
        return self.process is not None and self.process.returncode is not None

    def hangs(self, now: float) -> bool:
        """Whether it was started here, lives, and has been silent for too long."""
        lives = self.process is not None and self.process.returncode is None
        return lives and self.silent_since is not None and now - self.silent_since > HUNG_S

    def may_restart(self, now: float, most: int) -> bool:
        """Whether it was started again fewer than `most` times within the window."""
        while self.restarts and now - self.restarts[0] > RESTART_WINDOW_S:
            self.restarts.popleft()
        return len(self.restarts) < most

    def serves(self, version: int) -> None:
        """It is known to serve `version`."""
        self.served, self.trouble, self.refusals = version, "", 0

    def waits(self, trouble: str) -> None:
        """It does not serve the newest version yet."""
        self.served, self.trouble = None, trouble

    def falls_silent(self, trouble: str, now: float) -> None:
        """It does not answer. When it is back it may have been started with anything."""
        self.waits(trouble)
        self.silent_since = now if self.silent_since is None else self.silent_since

    def refuses(self, error: Exception, trouble: str) -> None:
        """It did not take a publication; an `EngineRefused` is final."""
        self.refusals += REFUSALS if isinstance(error, EngineRefused) else 1
        self.waits(trouble)
