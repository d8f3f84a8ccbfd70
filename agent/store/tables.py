"""The ledger's tables, and what more than one of its parts reads or writes in them.

An episode is two rows: its figures in `episode_rows`, which change with its life, and its bytes in `episode_data`,
which are written once and never moved. Those of offered episodes, which are people's words, are in `texts` instead
(`agent.store.texts`). Whoever reads both reads the view `episodes`.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

from agent.episode import Episode
from agent.store import migration, rules, texts
from agent.store.config import StoreConfig
from agent.store.database import Database
from agent.store.protocol import StoreFault
from agent.store.retention import FINISHED

SCHEMA_VERSION = 3
SCHEMA = f"""
CREATE TABLE IF NOT EXISTS meta (key TEXT PRIMARY KEY, value TEXT NOT NULL) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS counters (name TEXT PRIMARY KEY, value INTEGER NOT NULL) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS events (
    number INTEGER PRIMARY KEY, at REAL NOT NULL, ticket TEXT NOT NULL, what TEXT NOT NULL, reason TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS tickets (
    number INTEGER PRIMARY KEY AUTOINCREMENT, id TEXT NOT NULL UNIQUE, kind TEXT NOT NULL, unit INTEGER NOT NULL,
    task_index INTEGER NOT NULL, epoch INTEGER NOT NULL, seed INTEGER NOT NULL, attempt INTEGER NOT NULL,
    group_id TEXT, pinned_version INTEGER, evaluation TEXT,
    status TEXT NOT NULL CHECK (status IN ('waiting', 'leased', 'done', 'lost')),
    doomed INTEGER NOT NULL DEFAULT 0, worker TEXT, request TEXT, issued_at REAL, issued_version INTEGER);
CREATE INDEX IF NOT EXISTS tickets_live ON tickets (status, kind, number);
CREATE INDEX IF NOT EXISTS tickets_unit ON tickets (unit);
CREATE INDEX IF NOT EXISTS tickets_evaluation ON tickets (evaluation) WHERE evaluation IS NOT NULL;
CREATE TABLE IF NOT EXISTS episode_rows (
    number INTEGER PRIMARY KEY AUTOINCREMENT, id TEXT NOT NULL UNIQUE, kind TEXT NOT NULL,
    status TEXT NOT NULL CHECK (status IN
        ('ready', 'claimed', 'trained', 'stale', 'dropped', 'set_aside', 'evaluation')),
    unit INTEGER NOT NULL, task_index INTEGER NOT NULL, epoch INTEGER NOT NULL, group_id TEXT, env_id TEXT NOT NULL,
    task_id TEXT NOT NULL, reward REAL NOT NULL, tokens INTEGER NOT NULL, turns INTEGER NOT NULL,
    oldest_version INTEGER NOT NULL, newest_version INTEGER NOT NULL, stop_reason TEXT NOT NULL, worker TEXT NOT NULL,
    attempt INTEGER NOT NULL, issued_at REAL NOT NULL, issued_version INTEGER NOT NULL, finished_at REAL NOT NULL,
    claimed_at REAL, claim TEXT, evaluation TEXT, gone TEXT CHECK (gone IN ('pruned', 'wiped')),
    judge TEXT NOT NULL DEFAULT '');
CREATE INDEX IF NOT EXISTS episodes_live ON episode_rows (status, unit);
CREATE INDEX IF NOT EXISTS episodes_claim ON episode_rows (claim) WHERE claim IS NOT NULL;
CREATE INDEX IF NOT EXISTS episodes_evaluation ON episode_rows (evaluation) WHERE evaluation IS NOT NULL;
CREATE INDEX IF NOT EXISTS episodes_judged ON episode_rows (finished_at, judge) WHERE judge != '';
CREATE INDEX IF NOT EXISTS episodes_finished ON episode_rows (number) WHERE {FINISHED};
CREATE TABLE IF NOT EXISTS episode_data (number INTEGER PRIMARY KEY, data BLOB NOT NULL);
{texts.SCHEMA}
CREATE VIEW IF NOT EXISTS episodes AS SELECT r.*, coalesce(d.data, t.data, x'') AS data FROM episode_rows r
    LEFT JOIN episode_data d ON d.number = r.number LEFT JOIN texts t ON t.number = r.number;
CREATE TABLE IF NOT EXISTS ticket_environments (
    ticket TEXT PRIMARY KEY, environment TEXT NOT NULL) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS claims (
    id TEXT PRIMARY KEY, status TEXT NOT NULL CHECK (status IN ('open', 'committed', 'released')),
    version INTEGER NOT NULL, size INTEGER NOT NULL, held INTEGER NOT NULL DEFAULT 0,
    opened_at REAL NOT NULL, closed_at REAL);
CREATE INDEX IF NOT EXISTS claims_live ON claims (held, status);
CREATE TABLE IF NOT EXISTS claim_members (
    claim TEXT NOT NULL, episode TEXT NOT NULL, PRIMARY KEY (claim, episode)) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS evaluations (
    id TEXT PRIMARY KEY, version INTEGER NOT NULL, requested INTEGER NOT NULL, created_at REAL NOT NULL);
"""


class Tables(Database):
    """Owner of every row of the episode store: the schema, and the run's configuration, which is saved beside them.

    The parts of the ledger are built on this and know nothing of each other: `Tickets`, `Evaluations`, `Claims`,
    `Offers`. Which of them moves a row from which status to which is drawn in `agent.store.ledger.Ledger`.

    Methods run inside `apply`. Opening raises `StoreFault` as `Database` does, and for a configuration that is missing
    or would move the place in the data.
    """

    def __init__(
        self, path: Path | str, config: StoreConfig | None = None, *, clock: Callable[[], float] | None = None
    ) -> None:
        super().__init__(
            path,
            schema=SCHEMA,
            version=SCHEMA_VERSION,
            what="episode store",
            migrate=migration.begin,
        )
        self.clock = clock or time.time
        # Silence is measured on a clock that nobody sets: a wall clock put forward would end every lease.
        self.elapsed = clock or time.monotonic
        try:
            migration.finish(self.sql, self.path)
            self.config = self._settle_config(config)
            if self.config.max_bytes is not None:
                self.limit(self.config.max_bytes)
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
            before = StoreConfig.model_validate_json(saved).what_is_dealt
            for key, value in config.what_is_dealt.items():
                if before[key] != value:
                    raise StoreFault(
                        f"{key}={value}, but the run in {self.path} was begun with {key}={before[key]}: "
                        "its place in the data would be lost; keep the old value or start a new run"
                    )
        for result in self.apply([lambda: self.set_meta("config", config.model_dump_json())]):
            if isinstance(result, Exception):
                raise result
        return config

    @property
    def version(self) -> int:
        """The policy version that the engines serve, as last announced."""
        return int(self.meta("version", "0"))

    def outstanding(self) -> int:
        """Training episodes that occupy the staleness budget."""
        tickets = self.one("SELECT count(*) FROM tickets WHERE status IN ('waiting', 'leased') AND kind = 'train'")
        episodes = self.one("SELECT count(*) FROM episode_rows WHERE status IN ('ready', 'claimed')")
        held = self.one("SELECT coalesce(sum(size), 0) FROM claims WHERE held = 1")
        return int(tickets + episodes + held)

    def environment_of(self, ticket_id: str) -> str:
        """The environment of a ticket by name; "" where there is one only."""
        return str(self.one("SELECT environment FROM ticket_environments WHERE ticket = ?", ticket_id) or "")

    def cursor(self, environment: str = "") -> tuple[int, int]:
        """Epoch, and place in it, of the next training task of an environment ("": of the only one)."""
        of = f":{environment}" if environment else ""
        return int(self.meta(f"epoch{of}", "0")), int(self.meta(f"position{of}", "0"))

    def set_cursor(self, epoch: int, position: int, environment: str = "") -> None:
        """See `cursor`."""
        of = f":{environment}" if environment else ""
        self.set_meta(f"epoch{of}", str(epoch))
        self.set_meta(f"position{of}", str(position))

    def next_unit(self) -> int:
        """The number of the next unit (see `rules`); each call takes one."""
        unit = int(self.meta("units", "0"))
        self.set_meta("units", str(unit + 1))
        return unit

    def add_ticket(
        self,
        ticket_id: str,
        kind: str,
        unit: int,
        task_index: int,
        epoch: int,
        *,
        group_id: str | None = None,
        pinned_version: int | None = None,
        evaluation: str | None = None,
        environment: str = "",
    ) -> None:
        """A new row for a ticket, "waiting" to be leased. `environment`: its name, where there are several."""
        if environment:
            self.sql.execute("INSERT INTO ticket_environments VALUES (?, ?)", (ticket_id, environment))
        self.sql.execute(
            "INSERT INTO tickets (id, kind, unit, task_index, epoch, seed, attempt, group_id, pinned_version, "
            "evaluation, status) VALUES (?, ?, ?, ?, ?, ?, 0, ?, ?, ?, 'waiting')",
            (
                *(ticket_id, kind, unit, task_index, epoch, self.seed_of(ticket_id, kind, 0)),
                *(group_id, pinned_version, evaluation),
            ),
        )

    def seed_of(self, ticket_id: str, kind: str, attempt: int) -> int:
        """The seed of a ticket's attempt number `attempt`, from 0."""
        # An evaluation's seeds leave its version out, so that two versions meet the same conditions.
        name = ticket_id.partition("-")[2] if kind == "evaluate" else ticket_id
        return rules.ticket_seed(self.config.seed, kind, name, attempt)

    def add_episode(
        self,
        episode: Episode,
        data: bytes,
        *,
        kind: str,
        status: str,
        unit: int,
        task_index: int,
        epoch: int,
        attempt: int,
        worker: str,
        issued_at: float,
        issued_version: int,
        finished_at: float,
        group_id: str | None = None,
        evaluation: str | None = None,
        private: bool = False,
        judge: str = "",
    ) -> None:
        """A new row for `episode`, whose encoding is `data`. Times are Unix seconds.

        `private`: people's words. `judge`: whose verdict it is.
        """
        versions = episode.sampled_by
        made = self.sql.execute(
            "INSERT INTO episode_rows (id, kind, status, unit, task_index, epoch, group_id, env_id, task_id, reward, "
            "tokens, turns, oldest_version, newest_version, stop_reason, worker, attempt, issued_at, issued_version, "
            "finished_at, evaluation, judge) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
            (
                *(episode.id, kind, status, unit, task_index, epoch, group_id),
                *(episode.env_id, episode.task_id, episode.reward, episode.action_tokens, len(episode.actions)),
                *(versions[0], versions[-1], episode.stop_reason.value, worker),
                *(attempt, issued_at, issued_version, finished_at, evaluation, judge),
            ),
        )
        if private:
            texts.put(self.sql, data, made.lastrowid)
        else:
            self.sql.execute("INSERT INTO episode_data VALUES (?, ?)", (made.lastrowid, data))
