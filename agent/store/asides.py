"""Episodes that a rollback sets aside: what was learned from since, and what waits. They may be returned."""

from __future__ import annotations

from collections.abc import Sequence

from agent.store.protocol import AsideOf
from agent.store.tables import Tables


class Asides:
    """The episodes of one ledger that are set aside.

    Policy, critic and moments go back to an earlier version, so what has been learned since is in no weights any more.
    It must not come back by itself: something in it is why somebody went back.
    """

    def __init__(self, tables: Tables) -> None:
        self._tables = tables

    def put(self, version: int) -> int:
        """Set aside what was trained into versions after `version`, and what is ready or claimed; how many episodes.

        Open claims are released: a learner that still works on one is refused its commit. Again is harmless: there is
        nothing left then but what has become ready since, so it is for the caller to say this once.
        """
        sql, now = self._tables.sql, self._tables.clock()
        since = "SELECT id FROM claims WHERE status = 'committed' AND version > ?"
        trained = sql.execute(
            f"UPDATE episode_rows SET status = 'set_aside' WHERE status = 'trained' AND claim IN ({since})", (version,)
        )
        waiting = sql.execute(
            "UPDATE episode_rows SET status = 'set_aside' WHERE status IN ('ready', 'claimed') AND kind != 'evaluate'"
        )
        sql.execute("UPDATE claims SET status = 'released', closed_at = ? WHERE status = 'open'", (now,))
        sql.execute("UPDATE claims SET held = 0 WHERE held = 1")
        count = trained.rowcount + waiting.rowcount
        self._tables.count("set_aside", count)
        self._tables.event(now, "", "set_aside", f"a rollback to version {version}: {count} episodes")
        return count

    def give_back(self, without: Sequence[str] = ()) -> int:
        """Make what is set aside ready again, but for the verdicts of the users `without`; how many episodes.

        What is pruned or wiped stays as it is.
        """
        marks = ", ".join("?" * len(without))
        changed = self._tables.sql.execute(
            "UPDATE episode_rows SET status = 'ready', claim = NULL, claimed_at = NULL "
            f"WHERE status = 'set_aside' AND gone IS NULL AND judge NOT IN ({marks})",
            tuple(without),
        )
        self._tables.count("returned_aside", changed.rowcount)
        return changed.rowcount

    def listing(self) -> list[AsideOf]:
        """What is set aside, by judge, the most first."""
        rows = self._tables.all(
            "SELECT judge, count(*) AS episodes, avg(reward) AS reward FROM episode_rows WHERE status = 'set_aside' "
            "GROUP BY judge ORDER BY episodes DESC, judge LIMIT 1000"
        )
        return [AsideOf(row["judge"], row["episodes"], row["reward"]) for row in rows]
