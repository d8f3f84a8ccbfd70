"""What is known of each policy version, and what follows from it: which one to serve, whose weights may go."""

from __future__ import annotations

from pathlib import Path

import msgspec

from agent.serve.conversations.journal import Journal


class Version(msgspec.Struct, frozen=True):
    """One set of weights. `source`: "start", "learner" or "rollback" (then `origin` is the number it goes back to).

    `status`: "publishing" (begun, not known to be done), "served" (was or is), "held" (arrived while pinned), "failed".
    `path` is "" once the weights are gone.
    """

    number: int
    path: str
    source: str
    origin: int | None
    at: float
    status: str
    note: str = ""


class VersionTable:
    """The rows of the journal's table `versions`; methods run inside `apply`."""

    def __init__(self, journal: Journal) -> None:
        self._db = journal

    def rows(self) -> list[Version]:
        """All versions, oldest first."""
        return [Version(*row) for row in self._db.all("SELECT * FROM versions ORDER BY number")]

    def put(self, version: Version) -> None:
        """Insert or replace a version."""
        self._db.sql.execute(
            "INSERT OR REPLACE INTO versions VALUES (?, ?, ?, ?, ?, ?, ?)", msgspec.structs.astuple(version)
        )

    @property
    def pinned(self) -> bool:
        """Whether publications are held."""
        return self._db.meta("pinned", "0") == "1"

    def pin(self, pinned: bool) -> None:
        """Hold publications, or not."""
        self._db.set_meta("pinned", str(int(pinned)))


def to_serve(rows: list[Version]) -> Version | None:
    """What a server that starts should serve: the newest version whose weights are there and were (perhaps) served."""
    usable = [v for v in rows if v.status in ("served", "publishing") and v.path and Path(v.path).is_dir()]
    return usable[-1] if usable else None


def origin_of(rows: list[Version], number: int) -> int:
    """As which version the weights of `number` were made first: rollbacks name the same weights again."""
    by_number = {v.number: v for v in rows}
    while (
        (version := by_number.get(number)) is not None and version.source == "rollback" and version.origin is not None
    ):
        number = version.origin
    return number


def prunable(rows: list[Version], keep: int) -> list[Version]:
    """Versions whose weights may go: all but the newest `keep`, the served one and the one that it goes back to.

    A folder that serving started from is not the server's, whichever rollback goes back to it.
    """
    served = to_serve(rows)
    spared = {v.number for v in [v for v in rows if v.path][-keep:]}
    spared |= {served.number, served.origin or served.number} if served else set()
    starts = {v.path for v in rows if v.source == "start"}
    return [v for v in rows if v.path and v.path not in starts and v.number not in spared]
