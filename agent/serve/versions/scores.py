"""What people said of each version: how many verdicts its answers have, and their mean."""

from __future__ import annotations

from agent.store.database import Database


def scores(journal: Database, first: int) -> dict[int, tuple[int, float]]:
    """Verdicts and their mean by version, from number `first` on. An answer counts for the version that began it."""
    rows = journal.all(
        "SELECT version, count(*) n, avg(reward) mean FROM responses "
        "WHERE reward IS NOT NULL AND version >= ? GROUP BY version",
        first,
    )
    return {row["version"]: (row["n"], row["mean"]) for row in rows}
