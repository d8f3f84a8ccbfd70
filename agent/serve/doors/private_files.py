"""What the server and its children write is for this user alone: conversations, weights, keys, logs."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable
from pathlib import Path

_UMASK = 0o077
_OURS = ("*.sqlite", "*.sqlite-*", "*.sqlite.lock", "*.log", "*.jsonl", "key")


def keep_private() -> None:
    """From now on this process, and whatever it starts, makes files with mode 0600 and folders with 0700."""
    os.umask(_UMASK)


def tighten(run: Path, own: Path) -> None:
    """Take other users' rights from what an earlier server has left in the folder `run`, and in `own` in it.

    What belongs to another user stays as it is: that user has decided it.
    """
    for path in _found(run, own):
        with contextlib.suppress(OSError):
            mode = path.stat().st_mode & 0o777
            if mode & _UMASK:
                path.chmod(mode & ~_UMASK)


def _found(run: Path, own: Path) -> Iterable[Path]:
    if own.is_dir():
        yield own
    for folder in (run, own):
        for pattern in _OURS:
            yield from folder.glob(pattern)
