"""What the kernel's count of kills says about a run, and about the one after it."""

from __future__ import annotations

import os
from pathlib import Path

from sandboxes.inside.memory import MemoryRoom


def test_a_kill_of_the_run_before_is_not_taken_for_one_of_this_run(tmp_path: Path) -> None:
    """The second kill of a run that was over with its first one ended the next run, which held nothing."""
    events = tmp_path / "memory.events"
    events.write_text("low 0\noom_kill 0\n")
    room = MemoryRoom(events=os.open(events, os.O_RDONLY))
    assert not room.was_full()
    events.write_text("low 0\noom_kill 1\n")
    assert room.was_full()
    events.write_text("low 0\noom_kill 2\n")  # while the rest of that run is swept
    room.forget()
    assert not room.was_full()
    events.write_text("low 0\noom_kill 3\n")
    assert room.was_full()
