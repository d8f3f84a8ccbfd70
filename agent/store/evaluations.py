"""Evaluations: held-out tasks sampled by one pinned version, beside the training tickets and outside their budget."""

from __future__ import annotations

import hashlib
import sqlite3
from collections.abc import Sequence

from agent.store.protocol import EvaluationStatus
from agent.store.tables import Tables


class Evaluations:
    """The evaluations of one ledger. Their tickets are leased and delivered like others (see `Tickets`); their episodes
    enter no claim."""

    def __init__(self, tables: Tables) -> None:
        self._tables = tables

    def start(
        self,
        version: int,
        tasks: Sequence[int],
        samples: int,
        name: str = "",
        *,
        environment: str = "",
        pinned: bool = True,
    ) -> str:
        """Deal `samples` tickets for each held-out task of `environment`, `pinned` to `version`; the evaluation's id.

        The same arguments give the same evaluation, so a learner that resumes goes on with the one it had begun.
        """
        if samples < 1 or not tasks:
            raise ValueError(f"an evaluation needs tasks and samples >= 1, got {len(tasks)} tasks, samples={samples}")
        said = f"{environment}: {name}" if environment else name
        what = hashlib.blake2b(repr((list(tasks), samples, said)).encode(), digest_size=4).hexdigest()
        evaluation = f"v{version}-{what}"
        if self._tables.one("SELECT 1 FROM evaluations WHERE id = ?", evaluation) is None:
            requested = len(tasks) * samples
            self._tables.sql.execute(
                "INSERT INTO evaluations VALUES (?, ?, ?, ?)", (evaluation, version, requested, self._tables.clock())
            )
            for number in range(requested):
                place, sample = divmod(number, samples)
                ticket = f"{evaluation}-p{place}-s{sample}"
                self._tables.add_ticket(
                    ticket,
                    "evaluate",
                    -1,
                    tasks[place],
                    0,
                    pinned_version=version if pinned else None,
                    evaluation=evaluation,
                    environment=environment,
                )
        return evaluation

    def read(self, evaluation: str) -> EvaluationStatus:
        """Progress, and all episodes (in the order of the tickets) once every ticket has ended."""
        row = self._row(evaluation)
        states = dict(
            tuple(r)
            for r in self._tables.all(
                "SELECT status, count(*) FROM tickets WHERE evaluation = ? GROUP BY status", evaluation
            )
        )
        failed = states.get("lost", 0)
        finished = states.get("done", 0) + failed
        episodes: list[bytes] = []
        if finished == row["requested"]:
            query = (
                "SELECT e.data FROM tickets t JOIN episodes e ON e.id = t.id WHERE t.evaluation = ? ORDER BY t.number"
            )
            episodes = [r["data"] for r in self._tables.all(query, evaluation)]
        return EvaluationStatus(evaluation, row["version"], row["requested"], finished, failed, episodes)

    def cancel(self, evaluation: str) -> None:
        """Give up the tickets of an evaluation that nobody leased yet; those in flight end as they will."""
        self._row(evaluation)
        self._tables.sql.execute("UPDATE tickets SET doomed = 1 WHERE evaluation = ?", (evaluation,))
        self._tables.sql.execute(
            "UPDATE tickets SET status = 'lost' WHERE evaluation = ? AND status = 'waiting'", (evaluation,)
        )

    def _row(self, evaluation: str) -> sqlite3.Row:
        rows = self._tables.all("SELECT * FROM evaluations WHERE id = ?", evaluation)
        if not rows:
            raise KeyError(f"no evaluation {evaluation} in {self._tables.path}: start it first")
        return rows[0]
