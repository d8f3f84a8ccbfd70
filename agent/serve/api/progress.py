"""How far it is to the next version, and what is waited for: the one line under the figures and in the log.

Rules only: the figures come from the store and from the learner's supervisor.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import msgspec

from agent.serve.children.learner import LearnerState
from agent.store.protocol import StoreStatus


class Progress(msgspec.Struct, frozen=True):
    """`verdicts` of the `of` that make a batch are in the store (`verdicts` may be more: they come faster than they are
    learned from). `said` is the same for people.

    `waits_for`: "verdicts", "update" (the learner is at work), "start" (it is starting, or started again), "unpin",
    "learner" (there is none, and none will come), "store" (it does not answer: nobody knows the figure).
    """

    verdicts: int | None
    of: int
    waits_for: str
    said: str


@dataclass
class ProgressWatch:
    """Turns looks at the store into `Progress`; `batch` is the learner's.

    Remembers what one look cannot tell: whether this learner has asked for a batch yet, and how much had been taken
    when it last asked, so that the moment between two questions is not mistaken for an update.
    """

    batch: int
    _life: tuple[str, int] | None = None
    _taken: int | None = None

    def look(self, store: StoreStatus | None, learner: LearnerState, pinned: bool) -> Progress:
        """What is so now. `store` None: it does not answer."""
        life = (learner.state, learner.restarts)
        if life != self._life:
            self._life, self._taken = life, None
        if store is None:
            return self._progress(None, "store", "the store does not answer: verdicts wait in the journal")
        taken = store.claimed + store.trained
        if store.wanted:
            self._taken = taken
        waits_for = _waits_for(learner.state, asked=self._taken is not None, took=taken > (self._taken or 0))
        return self._progress(store.ready, waits_for, _said(waits_for, store.ready, self.batch, learner, pinned))

    def _progress(self, verdicts: int | None, waits_for: str, said: str) -> Progress:
        return Progress(verdicts, self.batch, waits_for, said)


def _waits_for(state: str, *, asked: bool, took: bool) -> str:
    if state == "running":
        return "start" if not asked else "update" if took else "verdicts"
    return {"waiting": "start", "held": "unpin"}.get(state, "learner")


def _said(waits_for: str, ready: int, batch: int, learner: LearnerState, pinned: bool) -> str:
    count = f"{ready} of {batch} verdicts"
    match waits_for:
        case "verdicts":
            held = ", which will be held: versions are pinned" if pinned else ""
            return f"{count} to the next version{held}"
        case "update":
            return f"learning from {batch} verdicts; {count} to the version after it"
        case "start":
            again = "is started again" if learner.restarts or learner.state == "waiting" else "is starting"
            return f"the learner {again}; {count} wait for it"
        case "unpin":
            return f"versions are pinned, so no learner runs; {count} wait until they are unpinned"
    if learner.state == "finished":
        return f"the learner has done its last step (learner.steps); {ready} verdicts are kept, none is learned from"
    if learner.state == "failed":
        return f"the learner has failed too often, its log says why; {ready} verdicts are kept for it"
    return f"no learner: start the server with --learn; {ready} verdicts are kept for it"


class ProgressLog:
    """Which of the lines go to the log: one that waits for something else at once, another count every `every_s`."""

    def __init__(self, every_s: float = 10.0) -> None:
        self._every_s, self._at = every_s, 0.0
        self._last: Progress | None = None

    def line(self, progress: Progress, now: float) -> str:
        """What to log now, "" for nothing. `now`: seconds of a monotonic clock."""
        last = self._last
        if last is not None:
            turned = progress.waits_for != last.waits_for
            if progress.said == last.said or not (turned or now - self._at >= self._every_s):
                return ""
        self._last, self._at = progress, now
        return progress.said


def as_json(progress: Progress | None) -> dict[str, Any] | None:
    """For the events."""
    return None if progress is None else msgspec.to_builtins(progress)
