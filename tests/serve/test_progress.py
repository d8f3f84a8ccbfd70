"""What is waited for before the next version: the rule, and which of its lines are logged."""

from __future__ import annotations

from typing import Any

import pytest

from agent.serve.api.progress import Progress, ProgressLog, ProgressWatch
from agent.serve.children.learner import LearnerState
from agent.store.protocol import StoreStatus


def stored(ready: int = 0, *, claimed: int = 0, trained: int = 0, wanted: int = 0) -> StoreStatus:
    return StoreStatus(0, ready, 0, claimed, trained, 0, wanted=wanted)


def running(**more: Any) -> LearnerState:
    return LearnerState("running", **more)


def test_nobody_knows_how_many_verdicts_are_missing() -> None:
    watch = ProgressWatch(32)
    seen = watch.look(stored(12, wanted=32), running(), False)
    assert (seen.verdicts, seen.of, seen.waits_for) == (12, 32, "verdicts")
    assert seen.said == "12 of 32 verdicts to the next version"


def test_a_learner_that_starts_looks_like_one_that_waits_for_verdicts() -> None:
    watch = ProgressWatch(8)
    assert watch.look(stored(3), running(), False).said == "the learner is starting; 3 of 8 verdicts wait for it"
    assert watch.look(stored(3, wanted=8), running(), False).waits_for == "verdicts"
    # It has died and is started again: what it had asked for before says nothing.
    assert watch.look(stored(3), LearnerState("waiting", 0), False).waits_for == "start"
    again = watch.look(stored(3), running(restarts=1), False)
    assert again.said == "the learner is started again; 3 of 8 verdicts wait for it"


def test_the_moment_between_two_questions_looks_like_an_update() -> None:
    watch = ProgressWatch(8)
    watch.look(stored(7, trained=8, wanted=8), running(), False)
    assert watch.look(stored(7, trained=8), running(), False).waits_for == "verdicts"
    update = watch.look(stored(1, claimed=8, trained=8), running(), False)
    assert update.waits_for == "update"
    assert update.said == "learning from 8 verdicts; 1 of 8 verdicts to the version after it"
    # Its batch stays claimed until a checkpoint is written; it asks for the next one meanwhile.
    assert watch.look(stored(2, claimed=8, trained=8, wanted=8), running(), False).waits_for == "verdicts"


@pytest.mark.parametrize(
    ("state", "pinned", "waits_for", "said"),
    [
        ("running", True, "verdicts", "2 of 8 verdicts to the next version, which will be held: versions are pinned"),
        (
            "held",
            True,
            "unpin",
            "versions are pinned, so no learner runs; 2 of 8 verdicts wait until they are unpinned",
        ),
        ("finished", False, "learner", "the learner has done its last step (learner.steps); 2 verdicts are kept"),
        ("failed", False, "learner", "the learner has failed too often"),
        ("off", False, "learner", "no learner: start the server with --learn"),
    ],
    ids=["pinned", "held", "finished", "failed", "off"],
)
def test_a_page_waits_for_a_version_that_will_not_come(state: str, pinned: bool, waits_for: str, said: str) -> None:
    seen = ProgressWatch(8).look(stored(2, wanted=8 if state == "running" else 0), LearnerState(state), pinned)
    assert seen.waits_for == waits_for
    assert seen.said.startswith(said)


def test_a_store_that_is_away_is_reported_as_no_verdicts() -> None:
    seen = ProgressWatch(8).look(None, running(), False)
    assert (seen.verdicts, seen.waits_for) == (None, "store")


def test_the_log_is_silent_or_full_of_every_verdict() -> None:
    log = ProgressLog(every_s=10.0)
    counted = [Progress(n, 8, "verdicts", f"{n} of 8") for n in range(9)]
    assert log.line(counted[1], 100.0) == "1 of 8"
    assert log.line(counted[2], 101.0) == ""
    assert log.line(counted[3], 110.0) == "3 of 8"
    assert log.line(counted[3], 130.0) == "", "nothing new"
    assert log.line(Progress(0, 8, "update", "learning"), 130.5) == "learning", "another reason, at once"
