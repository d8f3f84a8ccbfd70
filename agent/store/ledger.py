"""The ledger of work: which tickets are out, which episodes are ready, what has been trained."""

from __future__ import annotations

import hashlib
import json
import sqlite3
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from agent.episode import Episode, StopReason
from agent.store import rules
from agent.store.claims import Claims
from agent.store.config import FIXED_KEYS, StoreConfig
from agent.store.database import Database
from agent.store.offers import Offers
from agent.store.protocol import Ending, EvaluationStatus, StoreFault, StoreStatus, Ticket

RECENT = 512
"""How many finished episodes the displayed quantiles look back on."""


class Ledger(Database):
    """Tickets, episodes and claims in one SQLite file; synchronous, for one thread.

    A ticket's life (a slot of the staleness budget is taken from `deal` on; brackets say what gives it back)::

        deal ─▶ waiting ──lease──▶ leased ──deliver──▶ done ─▶ its episode lives on, see below
                  ▲                  │ │
                  │                  │ └──fail, bad episode, attempts left: attempt + 1──┐
                  │                  └────aborted, worker released or silent─────────────┤
                  └──────────────────────────────────────────────────────────────────────┘
                                     └──fail, no attempt left──▶ lost [slot back; its group is dropped]

    A training episode's life::

        ready ──claim─────▶ claimed ──commit──▶ trained [slot back, once the version it made is published]
          ▲                    │
          └──release, recover──┘
        ready ──too old at a claim──▶ stale [slot back]
        ready ──a member of its group is lost──▶ dropped [slot back]; a truncated one that is not wanted begins there

    Evaluation tickets are leased first, take no slot, and their episodes (status "evaluation") enter no claim.
    Episodes without a ticket come in by `offers`.

        ledger = Ledger("runs/x/episodes.sqlite", StoreConfig(tasks=100, batch=16))
        [tickets] = ledger.apply([lambda: ledger.lease(16, "runtime-0")])
        [ending] = ledger.apply([lambda: ledger.deliver(tickets[0].id, episode, agent.episode.encode(episode))])
        [claim] = ledger.apply([lambda: ledger.claims.take("c1", 16, version=0)])
        ledger.apply([lambda: ledger.claims.commit("c1", version=1)])

    Methods run inside `apply`, which makes them durable before it returns.
    """

    def __init__(
        self, path: Path | str, config: StoreConfig | None = None, *, clock: Callable[[], float] = time.time
    ) -> None:
        super().__init__(path, max_bytes=None if config is None else config.max_bytes)
        self.clock = clock
        try:
            self.config = self._settle_config(config)
            self.claims = Claims(self, self.config)
            self.offers = Offers(self, self.config)
            # A runtime may have outlived the store: its leases stand if it is heard of within the grace.
            grace = self.clock() - self.config.worker_timeout_s + self.config.restart_grace_s
            self._seen = {row["worker"]: grace for row in self.all(f"{_LEASED} GROUP BY worker")}
            self._void: set[str] = set()
            self._paused = False
        except BaseException:
            self.close()
            raise

    def _settle_config(self, config: StoreConfig | None) -> StoreConfig:
        saved = self.meta("config", "")
        if config is None:
            if not saved:
                raise StoreFault(f"{self.path} is new and no configuration was given: give at least tasks and batch")
            return StoreConfig.model_validate_json(saved)
        if saved:
            before = json.loads(saved)
            for key in FIXED_KEYS:
                if before[key] != getattr(config, key):
                    raise StoreFault(
                        f"{key}={getattr(config, key)}, but the run in {self.path} was begun with {key}={before[key]}: "
                        "its place in the data would be lost; keep the old value or start a new run"
                    )
        for result in self.apply([lambda: self.set_meta("config", config.model_dump_json())]):
            if isinstance(result, Exception):
                raise result
        return config

    # -- versions and workers

    @property
    def version(self) -> int:
        """The policy version that the engines serve, as last announced."""
        return int(self.meta("version", "0"))

    def set_version(self, version: int) -> None:
        """Announce the version that the engines serve from now on (lower after a rollback)."""
        self.set_meta("version", str(version))
        self.claims.published(version)

    def heard_of(self, worker: str) -> None:
        """A worker has shown that it is alive."""
        self._seen[worker] = self.clock()

    def release_worker(self, worker: str) -> int:
        """Return every ticket that `worker` ("*": any worker) holds to the pool, to be dealt first; how many."""
        rows = self.all(_LEASED) if worker == "*" else self.all(f"{_LEASED} AND worker = ?", worker)
        for row in rows:
            self._return(row)
        if worker == "*":
            self._seen.clear()
        else:
            self._seen.pop(worker, None)
        self.count("returned", len(rows))
        return len(rows)

    def reap(self) -> int:
        """Release the workers that were silent for `worker_timeout_s`; how many tickets came back."""
        limit = self.clock() - self.config.worker_timeout_s
        returned = 0
        for worker in [w for w, seen in self._seen.items() if seen < limit]:
            count = self.release_worker(worker)
            if count:
                self.event(self.clock(), "-", "worker silent", f"{worker}: {count} tickets go back to the pool")
            returned += count
        return returned

    def void(self, requests: Sequence[str]) -> None:
        """Return the tickets of lease requests whose answer never reached the caller, now or when they come."""
        self._void.update(requests)
        for request in requests:
            for row in self.all(f"{_LEASED} AND request = ?", request):
                self._return(row)

    # -- tickets

    def outstanding(self) -> int:
        """Training episodes that occupy the staleness budget."""
        tickets = self.one("SELECT count(*) FROM tickets WHERE status IN ('waiting', 'leased') AND kind = 'train'")
        episodes = self.one("SELECT count(*) FROM episodes WHERE status IN ('ready', 'claimed')")
        held = self.one("SELECT coalesce(sum(size), 0) FROM claims WHERE held = 1")
        return int(tickets + episodes + held)

    def lease(self, count: int, worker: str, request: str | None = None) -> list[Ticket]:
        """Up to `count` tickets for `worker`: evaluations first, then returned and retried ones, then new ones."""
        self.heard_of(worker)
        if request is not None and request in self._void:
            return []
        version, now = self.version, self.clock()
        query = "SELECT * FROM tickets WHERE status = 'waiting' AND kind = ? ORDER BY number LIMIT ?"
        rows = self.all(query, "evaluate", count)
        rows += self.all(query, "train", count - len(rows))
        while len(rows) < count and self._deal():
            rows = self.all(query, "evaluate", count)
            rows += self.all(query, "train", count - len(rows))
        for row in rows:
            self.sql.execute(
                "UPDATE tickets SET status = 'leased', worker = ?, request = ?, issued_at = ?, issued_version = ? "
                "WHERE number = ?",
                (worker, request, now, version, row["number"]),
            )
        if rows:
            self.count("leased", len(rows))
        return [_ticket(row) for row in rows]

    def pause(self, paused: bool) -> None:
        """Deal no new training tickets until told otherwise, or until the store is started again."""
        self._paused = paused

    def _deal(self) -> bool:
        """Make the tickets of one more unit, if the budget and the queue allow it."""
        config = self.config
        ready = self.one("SELECT count(*) FROM episodes WHERE status = 'ready'")
        if self._paused or not config.tasks or not rules.may_deal(config, outstanding=self.outstanding(), ready=ready):
            return False
        epoch, position = int(self.meta("epoch", "0")), int(self.meta("position", "0"))
        unit = int(self.meta("units", "0"))
        index = rules.epoch_order(config.seed, epoch, config.tasks)[position]
        group_id = None if config.group_size == 1 else f"e{epoch}-t{index}"
        for member in range(config.group_size):
            self._insert(f"e{epoch}-t{index}-m{member}", "train", unit, index, epoch, group_id=group_id)
        wrapped = position + 1 == config.tasks
        self.set_meta("epoch", str(epoch + wrapped))
        self.set_meta("position", str(0 if wrapped else position + 1))
        self.set_meta("units", str(unit + 1))
        self.count("dealt", config.group_size)
        return True

    def _insert(
        self,
        ticket_id: str,
        kind: str,
        unit: int,
        index: int,
        epoch: int,
        *,
        group_id: str | None = None,
        pinned_version: int | None = None,
        evaluation: str | None = None,
    ) -> None:
        self.sql.execute(
            "INSERT INTO tickets (id, kind, unit, task_index, epoch, seed, attempt, group_id, pinned_version, "
            "evaluation, status) VALUES (?, ?, ?, ?, ?, ?, 0, ?, ?, ?, 'waiting')",
            (
                *(ticket_id, kind, unit, index, epoch, self._seed(ticket_id, kind, 0)),
                *(group_id, pinned_version, evaluation),
            ),
        )

    def _seed(self, ticket_id: str, kind: str, attempt: int) -> int:
        # An evaluation's seeds leave its version out, so that two versions meet the same conditions.
        name = ticket_id.partition("-")[2] if kind == "evaluate" else ticket_id
        return rules.ticket_seed(self.config.seed, kind, name, attempt)

    def deliver(self, ticket_id: str, episode: Episode, data: bytes) -> Ending:
        """End a ticket with a valid episode (`data` is its encoding). Delivering twice is harmless.

        Accepted from any worker that ever held the ticket: the first one counts. Shutdown and infrastructure
        errors follow their own rules (see the class); an evaluation's tokens must all be of its pinned version.
        """
        row = self._row(ticket_id)
        if row["status"] == "done":
            self.count("duplicate")
            return Ending("duplicate")
        if row["status"] == "lost":
            return Ending("superseded", "the ticket had been given up")
        if episode.id != ticket_id:
            return self._failed(row, "rejected", f"the episode's id is {episode.id}", True)
        if not episode.stop_reason.trainable and _of_another(row, episode.worker):
            return Ending("superseded", "another worker holds the ticket by now")
        if episode.stop_reason is StopReason.ABORTED:
            self.count("aborted")
            return self._return(row)
        if episode.stop_reason is StopReason.INFRASTRUCTURE_ERROR:
            return self._failed(row, "infrastructure", str(episode.metrics.get("error", "infrastructure error")), True)
        versions = [v for action in episode.actions for v in action.versions]
        if row["pinned_version"] is not None and any(v != row["pinned_version"] for v in versions):
            seen = sorted(set(versions))
            return self._failed(row, "wrong_version", f"pinned to {row['pinned_version']}, sampled by {seen}", True)
        return self._accept(row, episode, data, versions)

    def _accept(self, row: sqlite3.Row, episode: Episode, data: bytes, versions: list[int]) -> Ending:
        status, reason = "ready", ""
        if row["kind"] == "evaluate":
            status = "evaluation"
        elif row["doomed"]:
            status, reason = "dropped", "another member of its group is lost"
        elif self.config.drop_truncated and episode.stop_reason.truncated:
            status, reason = "dropped", f"{episode.stop_reason.value}, and drop_truncated is set"
        now = self.clock()
        self.sql.execute(
            "INSERT INTO episodes (id, kind, status, unit, task_index, epoch, group_id, env_id, task_id, reward, "
            "tokens, turns, oldest_version, newest_version, stop_reason, worker, attempt, issued_at, issued_version, "
            "finished_at, evaluation, data) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
            (
                *(episode.id, row["kind"], status, row["unit"], row["task_index"], row["epoch"], row["group_id"]),
                *(episode.env_id, episode.task_id, episode.reward, episode.action_tokens, len(episode.actions)),
                *(min(versions), max(versions), episode.stop_reason.value, episode.worker or row["worker"] or ""),
                *(row["attempt"], row["issued_at"] or now, row["issued_version"] or 0, now, row["evaluation"], data),
            ),
        )
        self.sql.execute("UPDATE tickets SET status = 'done' WHERE number = ?", (row["number"],))
        self.count("evaluated" if status == "evaluation" else "accepted")
        if status != "dropped":
            return Ending("accepted")
        self.count("dropped")
        self.event(now, episode.id, "dropped", reason)
        self._doom(row)
        return Ending("dropped", reason)

    def reject(self, ticket_id: str, reason: str) -> Ending:
        """End a ticket whose delivery is no valid episode: counted, logged, and retried like a failure."""
        row = self._row(ticket_id)
        if row["status"] == "done":
            self.count("duplicate")
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
        rows = self.all("SELECT * FROM tickets WHERE id = ?", ticket_id)
        if not rows:
            raise KeyError(f"no ticket {ticket_id} in {self.path}: is the worker connected to another run's store?")
        return rows[0]

    def _return(self, row: sqlite3.Row) -> Ending:
        if row["doomed"]:
            self.sql.execute("UPDATE tickets SET status = 'lost' WHERE number = ?", (row["number"],))
            return Ending("given_up", "another member of its group is lost")
        self.sql.execute("UPDATE tickets SET status = 'waiting', worker = NULL WHERE number = ?", (row["number"],))
        return Ending("returned")

    def _failed(self, row: sqlite3.Row, what: str, reason: str, retry: bool) -> Ending:
        self.count(what)
        self.event(self.clock(), row["id"], what, reason)
        if not row["doomed"] and rules.retries(self.config, row["attempt"], retry):
            attempt = row["attempt"] + 1
            self.sql.execute(
                "UPDATE tickets SET status = 'waiting', worker = NULL, attempt = ?, seed = ? WHERE number = ?",
                (attempt, self._seed(row["id"], row["kind"], attempt), row["number"]),
            )
            self.count("retried")
            return Ending("retry", reason)
        self.sql.execute("UPDATE tickets SET status = 'lost' WHERE number = ?", (row["number"],))
        self.count("given_up")
        self._doom(row)
        return Ending("given_up", reason)

    def _doom(self, row: sqlite3.Row) -> None:
        """A member is lost, so its group will never be whole: give back the capacity of the others."""
        if row["group_id"] is None:
            return
        unit = row["unit"]
        self.sql.execute("UPDATE tickets SET doomed = 1 WHERE unit = ? AND kind = 'train'", (unit,))
        self.sql.execute(
            "UPDATE tickets SET status = 'lost' WHERE unit = ? AND kind = 'train' AND status = 'waiting'", (unit,)
        )
        dropped = self.sql.execute(
            "UPDATE episodes SET status = 'dropped' WHERE unit = ? AND status = 'ready'", (unit,)
        )
        self.count("dropped", dropped.rowcount)

    # -- evaluations

    def start_evaluation(self, version: int, tasks: Sequence[int], samples: int, name: str = "") -> str:
        """Deal `samples` tickets for each held-out task, pinned to `version`; the evaluation's id.

        The same arguments give the same evaluation, so a learner that resumes goes on with the one it had begun.
        """
        if samples < 1 or not tasks:
            raise ValueError(f"an evaluation needs tasks and samples >= 1, got {len(tasks)} tasks, samples={samples}")
        what = hashlib.blake2b(repr((list(tasks), samples, name)).encode(), digest_size=4).hexdigest()
        evaluation = f"v{version}-{what}"
        if self.one("SELECT 1 FROM evaluations WHERE id = ?", evaluation) is None:
            requested = len(tasks) * samples
            self.sql.execute(
                "INSERT INTO evaluations VALUES (?, ?, ?, ?)", (evaluation, version, requested, self.clock())
            )
            for number in range(requested):
                place, sample = divmod(number, samples)
                ticket = f"{evaluation}-p{place}-s{sample}"
                self._insert(ticket, "evaluate", -1, tasks[place], 0, pinned_version=version, evaluation=evaluation)
        return evaluation

    def evaluation(self, evaluation: str) -> EvaluationStatus:
        """Progress, and all episodes (in the order of the tickets) once every ticket has ended."""
        row = self._evaluation_row(evaluation)
        states = dict(
            tuple(r)
            for r in self.all("SELECT status, count(*) FROM tickets WHERE evaluation = ? GROUP BY status", evaluation)
        )
        failed = states.get("lost", 0)
        finished = states.get("done", 0) + failed
        episodes: list[bytes] = []
        if finished == row["requested"]:
            query = (
                "SELECT e.data FROM tickets t JOIN episodes e ON e.id = t.id WHERE t.evaluation = ? ORDER BY t.number"
            )
            episodes = [r["data"] for r in self.all(query, evaluation)]
        return EvaluationStatus(evaluation, row["version"], row["requested"], finished, failed, episodes)

    def cancel_evaluation(self, evaluation: str) -> None:
        """Give up the tickets of an evaluation that nobody leased yet; those in flight end as they will."""
        self._evaluation_row(evaluation)
        self.sql.execute("UPDATE tickets SET doomed = 1 WHERE evaluation = ?", (evaluation,))
        self.sql.execute(
            "UPDATE tickets SET status = 'lost' WHERE evaluation = ? AND status = 'waiting'", (evaluation,)
        )

    def _evaluation_row(self, evaluation: str) -> sqlite3.Row:
        rows = self.all("SELECT * FROM evaluations WHERE id = ?", evaluation)
        if not rows:
            raise KeyError(f"no evaluation {evaluation} in {self.path}: start it first")
        return rows[0]

    # -- displays

    def status(self) -> StoreStatus:
        """Counts, sums since the run began, and quantiles of what was issued against what was consumed (D9)."""
        live = {
            (row["kind"], row["status"]): row["n"]
            for row in self.all(
                "SELECT kind, status, count(*) AS n FROM tickets WHERE status IN ('waiting', 'leased') "
                "GROUP BY kind, status"
            )
        }
        counters = self.counters()
        now = self.clock()
        issued = self.all(
            "SELECT tokens, finished_at - issued_at AS latency FROM episodes WHERE kind != 'evaluate' "
            "ORDER BY number DESC LIMIT ?",
            RECENT,
        )
        consumed = self.all(
            "SELECT tokens, finished_at - issued_at AS latency, claimed_at - finished_at AS wait FROM episodes "
            "WHERE kind != 'evaluate' AND status IN ('claimed', 'trained') ORDER BY number DESC LIMIT ?",
            RECENT,
        )
        running = self.all(f"{_LEASED} AND kind = 'train'")
        return StoreStatus(
            version=self.version,
            ready=self.one("SELECT count(*) FROM episodes WHERE status = 'ready'"),
            leased=live.get(("train", "leased"), 0),
            claimed=self.one("SELECT count(*) FROM episodes WHERE status = 'claimed'"),
            trained=counters.get("trained", 0),
            epoch=int(self.meta("epoch", "0")),
            counters=counters,
            metrics={
                "waiting": live.get(("train", "waiting"), 0),
                "outstanding": self.outstanding(),
                "capacity": self.config.capacity,
                "position": int(self.meta("position", "0")),
                "evaluate_waiting": live.get(("evaluate", "waiting"), 0),
                "evaluate_leased": live.get(("evaluate", "leased"), 0),
                "workers": sorted(self._seen),
                "issued_tokens": rules.quantiles([row["tokens"] for row in issued]),
                "consumed_tokens": rules.quantiles([row["tokens"] for row in consumed]),
                "issued_latency_s": rules.quantiles([row["latency"] for row in issued]),
                "consumed_latency_s": rules.quantiles([row["latency"] for row in consumed]),
                "running_age_s": rules.quantiles([now - row["issued_at"] for row in running]),
                "queue_wait_s": rules.quantiles([row["wait"] for row in consumed]),
            },
        )


_LEASED = "SELECT * FROM tickets WHERE status = 'leased'"


def _of_another(row: sqlite3.Row, worker: str) -> bool:
    return row["status"] == "leased" and worker not in ("", row["worker"])


def _ticket(row: sqlite3.Row) -> Ticket:
    return Ticket(
        id=row["id"],
        kind=row["kind"],
        task_index=row["task_index"],
        epoch=row["epoch"],
        seed=row["seed"],
        attempt=row["attempt"],
        group_id=row["group_id"],
        pinned_version=row["pinned_version"],
    )
