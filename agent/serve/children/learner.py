"""The learner as a child process, started again with back-off when it dies. It is spoken to over HTTP only."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import sys
from asyncio.subprocess import Process
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

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

    @property
    def learning(self) -> str:
        """In a word whether feedback is learned from: "on", "off", "paused" (it will be again), "ended"."""
        if self.state in ("finished", "failed"):
            return "ended"
        return {"off": "off", "running": "on"}.get(self.state, "paused")


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
        why_ended: Callable[[], str] = lambda: "",
    ) -> None:
        self._key, self._why_ended = key, why_ended
        self.state = LearnerState()
        self._command, self._output = list(command), output
        self._restarts, self._first_s, self._settled_s, self._pinned = restarts, first_backoff_s, settled_s, pinned
        self._process: Process | None = None
        self._interrupted = False

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
        """Run it, and again after each interruption, until it ends by itself."""
        code = await self._started()
        while self._interrupted:
            self._interrupted = False
            await self._unpinned()
            code = await self._started()
        if code == 0:
            self.state.detail = await asyncio.to_thread(self._why_ended)
        return code

    async def _started(self) -> int:
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
            self.state.state = "finished"
            log.warning("the learner has ended: %s; feedback is recorded and not learned from", self.state.detail)
            return False
        self.state.detail = log_tail(self._output, 500)
        log.warning("the learner ended with code %d, %d in a row; see %s", code, failures, self._output)
        self.state.state = "waiting" if failures <= self._restarts else "failed"
        return failures <= self._restarts

    async def interrupt(self) -> None:
        """End it at once, if it runs; the next one starts as soon as versions are not pinned. That is no failure.

        What it has in hand is lost, and what it has saved is whole, as after any kill.
        """
        if self._process is not None and self._process.returncode is None:
            self._interrupted = True
            await asyncio.shield(stop_child(self._process, grace_s=0))

    async def stop(self) -> None:
        """SIGTERM (it finishes its step), after a while SIGKILL."""
        if self._process is not None and self._process.returncode is None:
            await asyncio.shield(stop_child(self._process, grace_s=_STOP_S))


def why_ended(run_dir: Path, steps: int | None) -> str:
    """Why a learner that was done was done. `steps`: `learner.steps` of the recipe, None where it has no end."""
    last = -1
    with contextlib.suppress(OSError, ValueError, TypeError):
        lines = log_tail(run_dir / "metrics.jsonl", 1 << 16).splitlines()
        last = int(msgspec.json.decode(lines[-1], type=dict[str, Any])["step"]) if lines else -1
    if steps is not None and last >= steps:
        return f"learner.steps={steps} is reached; raise it, or leave it out for no end, and start again"
    return f"it was asked to end, or met its target; see {run_dir / 'learner.log'}"


def learner_command(recipe: Path, overrides: Sequence[str], *, store: str, engine: str) -> list[str]:
    """The command line of the learner of `recipe`, working with this server's store and its engine proxy."""
    return [
        *(sys.executable, "-m", "learner.train", str(recipe), *overrides),
        *(f"store.url={store}", f"engine.urls=[{engine}]", "runtime.launch=false", "learner.online=true"),
    ]
