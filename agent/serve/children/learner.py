"""The learner as a child process, started again with back-off when it dies. It is spoken to over HTTP only."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import sys
from asyncio.subprocess import Process
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

from agent.child_processes import log_tail, start_child, stop_child
from agent.doors.door import KEY_VARIABLE
from agent.serve.children.keeping import keep_running

log = logging.getLogger(__name__)

_STOP_S = 30.0
_LONGEST_BACKOFF_S = 60.0
_PINNED_POLL_S = 0.5
# A server that is killed must not leave a learner that publishes to nobody and holds the run's lock. Asked to stop,
# one that waits for the engine to come back would go on waiting, and keep the next server's learner out.
_WHEN_SERVER_DIES = signal.SIGKILL


class LearnerState(msgspec.Struct):
    """What /healthz says of the learner.

    `state`: "off", "running", "waiting" (before a restart), "finished" (its last step is done), "failed" (died too
    often in a row), "held" (not started while versions are pinned: it starts after `unpin`).
    """

    state: str = "off"
    restarts: int = 0
    last_exit: int | None = None
    detail: str = ""


class LearnerChild:
    """Runs `command` until `stop`; the server does not depend on it.

    Life: off ──run──▶ running ──exit 0──▶ finished
                        │ ▲ └──any other exit──▶ waiting ──▶ running ... after `restarts` deaths in a row: failed
    """

    def __init__(
        self,
        command: Sequence[str],
        output: Path,
        *,
        restarts: int,
        first_backoff_s: float,
        settled_s: float,
        pinned: Callable[[], bool],
        key: str = "",
    ) -> None:
        self._key = key
        self.state = LearnerState()
        self._command, self._output = list(command), output
        self._restarts, self._first_s, self._settled_s, self._pinned = restarts, first_backoff_s, settled_s, pinned
        self._process: Process | None = None

    async def run(self) -> None:
        """Keep the learner alive; returns when it is finished or has failed for good. Cancelling stops it."""
        try:
            await keep_running(
                self._once,
                self._ended,
                first_s=self._first_s,
                most_s=_LONGEST_BACKOFF_S,
                settled_s=self._settled_s,
                ready=self._unpinned,
            )
        finally:
            await self.stop()

    async def _unpinned(self) -> None:
        """Wait while versions are pinned: one that starts compares the weights that are served with its own."""
        self.state.restarts += self.state.state == "waiting"
        while self._pinned():
            self.state.state = "held"
            await asyncio.sleep(_PINNED_POLL_S)

    async def _once(self) -> int:
        self._process = await start_child(
            *self._command,
            log=self._output,
            env={**os.environ, "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"), KEY_VARIABLE: self._key},
            when_parent_dies=_WHEN_SERVER_DIES,
        )
        self.state.state = "running"
        return await self._process.wait()

    def _ended(self, code: int | Exception, failures: int) -> bool:
        assert isinstance(code, int)
        self.state.last_exit = code
        if code == 0:
            self.state.state, self.state.detail = "finished", ""
            return False
        self.state.detail = log_tail(self._output, 500)
        log.warning("the learner ended with code %d, %d in a row; see %s", code, failures, self._output)
        self.state.state = "waiting" if failures <= self._restarts else "failed"
        return failures <= self._restarts

    async def stop(self) -> None:
        """SIGTERM (it finishes its step), after a while SIGKILL."""
        if self._process is not None and self._process.returncode is None:
            await asyncio.shield(stop_child(self._process, grace_s=_STOP_S))


def learner_command(recipe: Path, overrides: Sequence[str], *, store: str, engine: str) -> list[str]:
    """The command line of the learner of `recipe`, working with this server's store and its engine proxy."""
    return [
        *(sys.executable, "-m", "learner.train", str(recipe), *overrides),
        *(f"store.url={store}", f"engine.urls=[{engine}]", "runtime.launch=false", "learner.online=true"),
    ]
