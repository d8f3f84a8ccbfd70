"""The folder of finished episodes that the store has not taken yet."""

from __future__ import annotations

import logging
from pathlib import Path
from urllib.parse import quote

from agent.episode import Episode, EpisodeError, decode, encode

log = logging.getLogger(__name__)


class Spool:
    """A folder for finished episodes that the store could not take before the runtime had to leave.

    `path=None` keeps nothing. A file is named after its episode's id, so keeping one twice is harmless.
    """

    def __init__(self, path: Path | None) -> None:
        self._path = path

    def keep(self, episode: Episode) -> bool:
        """Put `episode` on disk; False (and a line in the log) if that is not possible either."""
        if self._path is None:
            log.error("episode %s is lost: the store is away and no `spool` is configured", episode.id)
            return False
        try:
            self._path.mkdir(parents=True, exist_ok=True)
            target = self._file(episode.id)
            part = target.with_suffix(".part")
            part.write_bytes(encode(episode))
            part.replace(target)
        except OSError as error:
            log.error("episode %s is lost: cannot write to %s: %s", episode.id, self._path, error)
            return False
        log.warning("episode %s is kept in %s", episode.id, target)
        return True

    def kept(self) -> list[Episode]:
        """The episodes that are kept; a file that holds none is left where it is and logged."""
        episodes = []
        for file in sorted(self._path.glob("*.episode")) if self._path is not None else []:
            try:
                episodes.append(decode(file.read_bytes()))
            except (OSError, EpisodeError) as error:
                log.error("%s: %s", file, error)
        return episodes

    def forget(self, episode_id: str) -> None:
        """The store has it now."""
        if self._path is not None:
            self._file(episode_id).unlink(missing_ok=True)

    def _file(self, episode_id: str) -> Path:
        assert self._path is not None
        return self._path / f"{quote(episode_id, safe='')}.episode"
