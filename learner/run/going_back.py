"""Going back to the checkpoint of an earlier version, when a server has gone back to its weights.

Policy, critic, moments, schedules and baselines are one state, and go back together. Newer checkpoints are moved out of
the way, into one folder beside, so that going forward again finds them.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable
from pathlib import Path

from agent.serve.versions.rollback_note import RollbackNote, read_note, remove_note
from learner.faults import LearnerFault
from learner.run.checkpoint import checkpoints, load_progress

_ASIDE = re.compile(r"before_rollback_(\d+)$")


def heed_rollback(run_dir: Path, say: Callable[[str], None]) -> None:
    """Do what the note in `run_dir` says, if there is one, and remove it; then the newest checkpoint is the right one.

    To be called by the main process, before a checkpoint is chosen. A crash in between is mended by the next call.
    Raises `LearnerFault` for a note that cannot be read.
    """
    try:
        note = read_note(run_dir)
    except ValueError as error:
        raise LearnerFault(str(error)) from error
    if note is None:
        return
    say(_go_back(run_dir / "checkpoints", note))
    remove_note(run_dir)


def _go_back(folder: Path, note: RollbackNote) -> str:
    """Arrange `folder` so that its newest checkpoint is the last one of `note.version` or before; what that is."""
    aside = folder / f"before_rollback_{note.served:05d}"
    newer = [path for path in checkpoints(folder) if load_progress(path).version > note.version]
    if newer:
        aside.mkdir(exist_ok=True)
    for path in newer:
        path.replace(aside / path.name)
    for old in _asides(folder):
        if old == aside:
            continue
        # Those are of another line, and of it only what is not newer than the version wanted.
        for path in checkpoints(old) if note.version < int(old.name.rpartition("_")[2]) else []:
            if load_progress(path).version <= note.version:
                shutil.rmtree(folder / path.name, ignore_errors=True)
                path.replace(folder / path.name)
        shutil.rmtree(old)
    found = checkpoints(folder)
    if not found:
        return f"rollback to version {note.version}: there is no checkpoint of it or before, the learner begins anew"
    version = load_progress(found[-1]).version
    exactly = "" if version == note.version else f", version {version}, the nearest before it that has one"
    return f"rollback to version {note.version}: going on from {found[-1].name}{exactly}"


def _asides(folder: Path) -> list[Path]:
    return [path for path in folder.iterdir() if _ASIDE.match(path.name)] if folder.exists() else []


def kept_checkpoints(keep: int | None, keep_versions: int | None, every: int) -> int:
    """How many checkpoints a run keeps: `keep` if the recipe says so, else two; with a server's `keep_versions` as many
    as let every one of these versions be gone back to, with one before the oldest."""
    if keep is not None:
        return keep
    return 2 if keep_versions is None else max(2, -(-keep_versions // every) + 1)
