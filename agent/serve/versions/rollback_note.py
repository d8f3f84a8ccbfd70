"""What a server tells the next learner of a rollback: a file in the run's folder, which that one removes."""

from __future__ import annotations

import os
from pathlib import Path

import msgspec

_NAME = "rollback.json"


class RollbackNote(msgspec.Struct, frozen=True):
    """Go back to what made `version`. It is served again as `served`: numbers up to that are of other lines."""

    version: int
    served: int


def write_note(run_dir: Path, note: RollbackNote) -> None:
    """Put `note` into the run's folder; it is there whole or not at all, and on the disk when this returns."""
    scratch = run_dir / f".{_NAME}"
    with scratch.open("wb") as file:
        file.write(msgspec.json.encode(note))
        file.flush()
        os.fsync(file.fileno())
    scratch.replace(run_dir / _NAME)


def read_note(run_dir: Path) -> RollbackNote | None:
    """The note in the run's folder, None where there is none; raises `ValueError` for a file that is none."""
    try:
        data = (run_dir / _NAME).read_bytes()
    except FileNotFoundError:
        return None
    try:
        return msgspec.json.decode(data, type=RollbackNote)
    except msgspec.DecodeError as error:
        raise ValueError(f"{run_dir / _NAME} is no note of a rollback ({error}): remove it") from error


def remove_note(run_dir: Path) -> None:
    """The note has been heeded."""
    (run_dir / _NAME).unlink(missing_ok=True)
