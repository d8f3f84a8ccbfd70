"""The folder of a run, `runs/<name>/`, the lock that keeps a second learner out of it, and its folders of weights."""

from __future__ import annotations

import contextlib
import fcntl
import json
import math
import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from learner.config import Recipe, save_recipe
from learner.faults import LearnerFault

_KEEP_SNAPSHOTS = 3
_SNAPSHOT = re.compile(r"v\d+")


@contextlib.contextmanager
def claim_run(recipe: Recipe) -> Iterator[Path]:
    """Make the folder, save the resolved recipe in it, hold its lock. Raises `LearnerFault` if another learner does.

    The lock is the kernel's: it goes when the process goes, however it ends.
    """
    folder = recipe.run_dir
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = (folder / ".lock").open("a+")
    except OSError as error:
        raise LearnerFault(f"cannot write to {folder}: {error.strerror}. Set runs_dir to a folder with room") from error
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            lock.seek(0)
            raise LearnerFault(
                f"another learner (process {lock.read().strip() or 'unknown'}) is training {folder}; wait for it, stop "
                "it, or give this run another name with name=..."
            ) from error
        lock.truncate(0)
        lock.write(str(os.getpid()))
        lock.flush()
        save_recipe(recipe, folder / "recipe.yaml")
        yield folder


def append_metrics(folder: Path, step: int, figures: dict[str, Any]) -> None:
    """One line of `metrics.jsonl`; NaN (undefined) and infinities, which JSON does not have, are written as null."""
    clean = {k: (None if isinstance(v, float) and not math.isfinite(v) else v) for k, v in figures.items()}
    with (folder / "metrics.jsonl").open("a", encoding="utf-8") as file:
        file.write(json.dumps({"step": step, **clean}) + "\n")


@contextlib.contextmanager
def written_at_once(folder: Path) -> Iterator[Path]:
    """A folder to write into, which is `folder` after the block; then the oldest snapshots beside it go.

    Where the block fails nothing is left of it, and `folder` is as it was.
    """
    scratch = folder.with_name(f".{folder.name}")
    shutil.rmtree(scratch, ignore_errors=True)
    try:
        yield scratch
    except BaseException:
        shutil.rmtree(scratch, ignore_errors=True)
        raise
    shutil.rmtree(folder, ignore_errors=True)
    scratch.rename(folder)
    snapshots = (p for p in folder.parent.iterdir() if p.is_dir() and _SNAPSHOT.fullmatch(p.name))
    for old in sorted(snapshots, key=lambda p: int(p.name[1:]))[:-_KEEP_SNAPSHOTS]:
        shutil.rmtree(old, ignore_errors=True)
