"""Batches that a learner has recorded (`learner.record_batches`), out of which deleted words must go too."""

from __future__ import annotations

import contextlib
import logging
from pathlib import Path

log = logging.getLogger(__name__)


def forget_recordings(folder: Path, episode_id: str) -> list[Path]:
    """Delete every recorded batch that holds the episode; which those were. Such an update can't be replayed any more.

    A batch is not written again without it: an update from other episodes would not be the one that was made.
    """
    gone = []
    # Also what is being written just now, under a name with a dot.
    for path in sorted(folder.glob("*.msgpack")) if folder.is_dir() else ():
        with contextlib.suppress(FileNotFoundError):
            if episode_id.encode() in path.read_bytes():
                path.unlink()
                gone.append(path)
                log.info("%s held a deleted conversation, and is deleted", path)
    return gone
