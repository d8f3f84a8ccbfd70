"""Tickets: leave to run one episode each, dealt within the staleness budget, leased to workers, ended by a delivery."""

from __future__ import annotations

import math
import sqlite3
import sys
from collections.abc import Sequence
from typing import Literal

from agent.episode import Episode, StopReason
from agent.store import rules
from agent.store.protocol import Ending, Ticket
from agent.store.tables import Tables

_LEASED = "SELECT * FROM tickets WHERE status = 'leased'"


class Tickets:
    """The tickets of one ledger, and the workers that hold them.

    A ticket's life (a slot of the staleness budget is taken from `deal` on; brackets say what gives it back)::

        deal ─▶ waiting ──lease──▶ leased ──deliver──▶ done ─▶ its episode lives on, see the ledger
                  ▲                  │ │
                  │                  │ └──fail, bad episode, attempts left: attempt + 1──┐
                  │                  └────aborted, worker released or silent─────────────┤
                  └──────────────────────────────────────────────────────────────────────┘
                                     └──fail, no attempt left──▶ lost [slot back; its group is dropped]

    Tickets of evaluations are made by `Evaluations`, leased first, and take no slot.
    """

    def __init__(self, tables: Tables) -> None:
        self._tables, self._config = tables, tables.config
        # A runtime may have outlived the store: its leases stand if it is heard of within the grace.
        grace = tables.elapsed() - self._config.worker_timeout_s + self._config.restart_grace_s
        self._seen = {row["worker"]: grace for row in tables.all(f"{_LEASED} GROUP BY worker")}
        self._void: set[str] = set()
        self._paused = False

    # -- workers

    @property
    def workers(self) -> list[str]:
        """Who has been heard of and not released since, by name."""
        return sorted(self._seen)

    def heard_of(self, worker: str) -> None:
        """A worker has shown that it is alive."""
        self._seen[worker] = self._tables.elapsed()

    def release_worker(self, worker: str) -> int:
        """Return every ticket that `worker` ("*": any worker) holds to the pool, to be dealt first; how many."""
        rows = self._tables.all(_LEASED) if worker == "*" else self._tables.all(f"{_LEASED} AND worker = ?", worker)
        for row in rows:
            self._return(row)
        if worker == "*":
            self._seen.clear()
        else:
            self._seen.pop(worker, None)
        self._tables.count("returned", len(rows))
        return len(rows)

    def reap(self, *, deaf_s: float = 0.0) -> int:
        """Release the workers that were silent for `worker_timeout_s`; how many tickets came back.

        `deaf_s`: for how long of that nobody could be heard, because the store itself stood still.
        """
        for worker in self._seen:
            self._seen[worker] += deaf_s
        limit = self._tables.elapsed() - self._config.worker_timeout_s
        returned = 0
        for worker in [w for w, seen in self._seen.items() if seen < limit]:
            count = self.release_worker(worker)
            if count:
                self._tables.event(
                    self._tables.clock(), "-", "worker silent", f"{worker}: {count} tickets go back to the pool"
                )
            returned += count
        return returned

    def void(self, requests: Sequence[str]) -> None:
        """Return the tickets of lease requests whose answer never reached the caller, now or when they come."""
        self._void.update(requests)
        for request in requests:
            for row in self._tables.all(f"{_LEASED} AND request = ?", request):
                self._return(row)

    # -- dealt and leased

    def lease(
        self, count: int, worker: str, request: str | None = None, kind: Literal["train", "evaluate"] | None = None
    ) -> list[Ticket]:
        """Up to `count` tickets for `worker`: evaluations first, then returned and retried ones, then new ones.

        `kind`: only tickets of that kind; None: of both.
        """
        self.heard_of(worker)
        if request is not None and request in self._void:
            return []
        version, now = self._tables.version, self._tables.clock()
        evaluations = [] if kind == "train" else self._waiting("evaluate", min(count, self._evaluations_left))
        rows, left = evaluations, 0 if kind == "evaluate" else count - len(evaluations)
        if left > 0:
            trained = self._waiting("train", left)
            if len(trained) < left and self._deal(left - len(trained)):
                trained = self._waiting("train", left)
            rows = evaluations + trained
        for row in rows:
            self._tables.sql.execute(
                "UPDATE tickets SET status = 'leased', worker = ?, request = ?, issued_at = ?, issued_version = ? "
                "WHERE number = ?",
                (worker, request, now, version, row["number"]),
            )
        if rows:
            self._tables.count("leased", len(rows))
        return [_ticket(row, self._tables.environment_of(row["id"])) for row in rows]

    @property
    def _evaluations_left(self) -> int:
        """How many evaluation tickets more may be leased now."""
        if self._config.evaluations_at_once is None:
            return sys.maxsize
        leased = self._tables.one("SELECT count(*) FROM tickets WHERE status = 'leased' AND kind = 'evaluate'")
        return max(0, self._config.evaluations_at_once - int(leased))

    def pause(self, paused: bool) -> None:
        """Deal no new training tickets until told otherwise, or until the store is started again."""
        self._paused = paused

    def _waiting(self, kind: str, most: int) -> list[sqlite3.Row]:
        query = "SELECT * FROM tickets WHERE status = 'waiting' AND kind = ? ORDER BY number LIMIT ?"
        return self._tables.all(query, kind, most)

    def _deal(self, wanted: int) -> int:
        """Make the tickets of as many units as `wanted` tickets need and budget and queue allow; how many units."""
        if self._paused:
            return 0
        ready = self._tables.one("SELECT count(*) FROM episode_rows WHERE status = 'ready'")
        allowed = rules.units_to_deal(self._config, outstanding=self._tables.outstanding(), ready=ready)
        units = min(allowed, math.ceil(wanted / self._config.group_size))
        for _ in range(units):
            self._deal_unit()
        return units

    def _deal_unit(self) -> None:
        config = self._config
        environment, tasks = self._draw()
        epoch, position = self._tables.cursor(environment)
        unit = self._tables.next_unit()
        index = rules.epoch_order(config.seed, epoch, tasks)[position]
        name = f"{environment}.e{epoch}-t{index}" if environment else f"e{epoch}-t{index}"
        for member in range(config.group_size):
            self._tables.add_ticket(
                f"{name}-m{member}",
                "train",
                unit,
                index,
                epoch,
                group_id=None if config.group_size == 1 else name,
                environment=environment,
            )
        wrapped = position + 1 == tasks
        self._tables.set_cursor(epoch + wrapped, 0 if wrapped else position + 1, environment)
        self._tables.count("dealt", config.group_size)

    def _draw(self) -> tuple[str, int]:
        """The environment of the next unit, and how many tasks it has; each call is a draw, and draws are counted."""
        shares = self._config.environments
        if not shares:
            return "", self._config.tasks
        draw = int(self._tables.meta("draws", "0"))
        self._tables.set_meta("draws", str(draw + 1))
        share = shares[rules.draw_environment(self._config.seed, draw, [share.weight for share in shares])]
        return share.name, share.tasks

    # -- how a ticket ends

    def deliver(self, ticket_id: str, episode: Episode, data: bytes) -> Ending:
        """End a ticket with a valid episode (`data` is its encoding). Delivering twice is harmless.

        Accepted from any worker that ever held the ticket: the first one counts. Shutdown and infrastructure
        errors follow their own rules (see the class); an evaluation's tokens must all be of its pinned version.
        """
        row = self._row(ticket_id)
        if row["status"] == "done":
            self._tables.count("duplicate")
            return Ending("duplicate")
        if row["status"] == "lost":
            return Ending("superseded", "the ticket had been given up")
        if episode.id != ticket_id:
            return self._failed(row, "rejected", f"the episode's id is {episode.id}", True)
        if not episode.stop_reason.trainable and _of_another(row, episode.worker):
            return Ending("superseded", "another worker holds the ticket by now")
        if episode.stop_reason is StopReason.ABORTED:
            self._tables.count("aborted")
            return self._return(row)
        if episode.stop_reason is StopReason.INFRASTRUCTURE_ERROR:
            return self._failed(row, "infrastructure", str(episode.metrics.get("error", "infrastructure error")), True)
        seen = episode.sampled_by
        if row["pinned_version"] is not None and set(seen) - {row["pinned_version"]}:
            return self._failed(row, "wrong_version", f"pinned to {row['pinned_version']}, sampled by {seen}", True)
        return self._accept(row, episode, data)

    def _accept(self, row: sqlite3.Row, episode: Episode, data: bytes) -> Ending:
        status, reason = "ready", ""
        if row["kind"] == "evaluate":
            status = "evaluation"
        elif row["doomed"]:
            status, reason = "dropped", "another member of its group is lost"
        elif reason := rules.unwanted(self._config, episode.stop_reason):
            status = "dropped"
        now = self._tables.clock()
        self._tables.add_episode(
            episode,
            data,
            kind=row["kind"],
            status=status,
            unit=row["unit"],
            task_index=row["task_index"],
            epoch=row["epoch"],
            attempt=row["attempt"],
            worker=episode.worker or row["worker"] or "",
            issued_at=row["issued_at"] or now,
            issued_version=row["issued_version"] or 0,
            finished_at=now,
            group_id=row["group_id"],
            evaluation=row["evaluation"],
        )
        self._tables.sql.execute("UPDATE tickets SET status = 'done' WHERE number = ?", (row["number"],))
        self._tables.count("evaluated" if status == "evaluation" else "accepted")
        if status != "dropped":
            return Ending("accepted")
        self._tables.count("dropped")
        self._tables.event(now, episode.id, "dropped", reason)
        self._doom(row)
        return Ending("dropped", reason)

    def reject(self, ticket_id: str, reason: str) -> Ending:
        """End a ticket whose delivery is no valid episode: counted, logged, and retried like a failure."""
        row = self._row(ticket_id)
        if row["status"] == "done":
            self._tables.count("duplicate")
            return Ending("duplicate", reason)
        if row["status"] == "lost":
            return Ending("superseded", reason)
        return self._failed(row, "rejected", reason, True)

    def fail(self, ticket_id: str, reason: str, *, retry: bool, worker: str = "") -> Ending:
        """End a ticket without an episode: dealt again if `retry` and attempts are left, else given up.

        Only a leased ticket can fail; one that is waiting again or has ended, or that another than `worker` ("":
        nobody says) holds by now, is left alone ("superseded").
        """
        row = self._row(ticket_id)
        if _of_another(row, worker):
            return Ending("superseded", "another worker holds the ticket by now")
        if row["status"] != "leased":
            return Ending("superseded", f"the ticket is {row['status']}")
        return self._failed(row, "infrastructure", reason, retry)

    def _row(self, ticket_id: str) -> sqlite3.Row:
        rows = self._tables.all("SELECT * FROM tickets WHERE id = ?", ticket_id)
        if not rows:
            raise KeyError(
                f"no ticket {ticket_id} in {self._tables.path}: is the worker connected to another run's store?"
            )
        return rows[0]

    def _return(self, row: sqlite3.Row) -> Ending:
        if row["doomed"]:
            self._tables.sql.execute("UPDATE tickets SET status = 'lost' WHERE number = ?", (row["number"],))
            return Ending("given_up", "another member of its group is lost")
        self._tables.sql.execute(
            "UPDATE tickets SET status = 'waiting', worker = NULL WHERE number = ?", (row["number"],)
        )
        return Ending("returned")

    def _failed(self, row: sqlite3.Row, what: str, reason: str, retry: bool) -> Ending:
        self._tables.count(what)
        self._tables.event(self._tables.clock(), row["id"], what, reason)
        if not row["doomed"] and rules.retries(self._config, row["attempt"], retry):
            attempt = row["attempt"] + 1
            self._tables.sql.execute(
                "UPDATE tickets SET status = 'waiting', worker = NULL, attempt = ?, seed = ? WHERE number = ?",
                (attempt, self._tables.seed_of(row["id"], row["kind"], attempt), row["number"]),
            )
            self._tables.count("retried")
            return Ending("retry", reason)
        self._tables.sql.execute("UPDATE tickets SET status = 'lost' WHERE number = ?", (row["number"],))
        self._tables.count("given_up")
        self._doom(row)
        return Ending("given_up", reason)

    def _doom(self, row: sqlite3.Row) -> None:
        """A member is lost, so its group will never be whole: give back the capacity of the others."""
        if row["group_id"] is None:
            return
        unit = row["unit"]
        self._tables.sql.execute("UPDATE tickets SET doomed = 1 WHERE unit = ? AND kind = 'train'", (unit,))
        self._tables.sql.execute(
            "UPDATE tickets SET status = 'lost' WHERE unit = ? AND kind = 'train' AND status = 'waiting'", (unit,)
        )
        dropped = self._tables.sql.execute(
            "UPDATE episode_rows SET status = 'dropped' WHERE unit = ? AND status = 'ready'", (unit,)
        )
        self._tables.count("dropped", dropped.rowcount)


def _of_another(row: sqlite3.Row, worker: str) -> bool:
    return row["status"] == "leased" and worker not in ("", row["worker"])


def _ticket(row: sqlite3.Row, environment: str) -> Ticket:
    return Ticket(
        id=row["id"],
        kind=row["kind"],
        task_index=row["task_index"],
        epoch=row["epoch"],
        seed=row["seed"],
        attempt=row["attempt"],
        group_id=row["group_id"],
        pinned_version=row["pinned_version"],
        environment=environment,
    )
