"""Evaluations that have begun and are not in the figures yet, as folders of the run: what a next session finds.

runs/<name>/evaluations/step_00010/round.json     what is evaluated, by which evaluations of the store
                                  /weights/       the policy of that step, where engines of their own evaluate
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any


@dataclass
class Round:
    """The evaluation of some sets with the weights of `step`, published as `version`.

    `sets`: by name what was to be evaluated, in plain data. `name`: what its evaluations are told apart by. `ids`: the
    evaluations of the store, by set, as far as they have begun.
    """

    step: int
    version: int
    name: str
    sets: dict[str, Any]
    ids: dict[str, str] = field(default_factory=dict)


class Rounds:
    """The folders of one run; `folder` is its `evaluations/`."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def weights(self, step: int) -> Path:
        """Where the weights of a round lie."""
        return self._path(step) / "weights"

    def read(self) -> list[Round]:
        """The rounds that are open, by step."""
        found = []
        for path in sorted(self._folder.glob("step_*/round.json")):
            with contextlib.suppress(OSError, ValueError, TypeError):
                found.append(Round(**json.loads(path.read_text())))
        return found

    def save(self, opened: Round) -> None:
        """Write it, whole or not at all; after its weights."""
        path = self._path(opened.step)
        path.mkdir(parents=True, exist_ok=True)
        part = path / "round.part"
        part.write_text(json.dumps(asdict(opened)))
        part.replace(path / "round.json")

    def close(self, step: int) -> None:
        """The round is in the figures, or given up. Its weights stay until `sweep`: an engine may start with them."""
        with contextlib.suppress(FileNotFoundError):
            (self._path(step) / "round.json").unlink()

    def sweep(self, keep: int | None = None) -> None:
        """Remove what belongs to no open round, but for the weights of the step `keep`."""
        for path in self._folder.glob("step_*"):
            if not (path / "round.json").exists() and (keep is None or path != self._path(keep)):
                shutil.rmtree(path, ignore_errors=True)

    def _path(self, step: int) -> Path:
        return self._folder / f"step_{step:05d}"


def copy_snapshot(snapshot: Path, target: Path) -> None:
    """A second name for each file of a snapshot, which stays when the snapshot is swept; else a copy of it."""
    shutil.rmtree(target, ignore_errors=True)
    shutil.copytree(snapshot, target, copy_function=_link_or_copy)


def _link_or_copy(source: str, target: str) -> None:
    try:
        os.link(source, target)
    except OSError:
        shutil.copy2(source, target)
