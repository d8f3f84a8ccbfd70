"""An SQLite file with one owner: grouped commits, small persistent values. Whose tables are in it is not known here."""

from __future__ import annotations

import fcntl
import logging
import os
import sqlite3
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

from agent.store.protocol import StoreFault, StoreFull, StoreInUse

log = logging.getLogger(__name__)
T = TypeVar("T")
_READERS_MS = 200


class Database:
    """An SQLite file (WAL, synchronous=FULL) with one owner: a second one is refused by a lock file beside it.

    Deleted rows are overwritten with zeros. What people said, and may want to be gone, belongs into
    `agent.store.texts`; after it is deleted `settle` takes it out of the log too.

    Not thread-safe: use it from one thread. Every change happens inside `apply`. `schema` (SQL, run at every opening)
    must make the tables `meta`, `counters` and `events` where their methods are used; a file of an older `version` of
    it is given to `migrate`, one of a newer version is refused; `what` names the file's owner in messages. Raises
    `StoreFault`.
    """

    def __init__(
        self,
        path: Path | str,
        *,
        schema: str,
        version: int,
        what: str,
        max_bytes: int | None = None,
        migrate: Callable[[sqlite3.Connection, int], None] | None = None,
    ) -> None:
        self.path = Path(path)
        self._what = what
        self._making_room = False
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._lock = self._take_lock()
        try:
            # isolation_level None: transactions are opened and closed by `apply` alone.
            self.sql = sqlite3.connect(self.path, isolation_level=None, check_same_thread=False)
            self.sql.row_factory = sqlite3.Row
            self.sql.execute("PRAGMA page_size=4096")  # counts for new files alone, as the next one does
            self.sql.execute("PRAGMA auto_vacuum=INCREMENTAL")  # before all else
            self.sql.execute("PRAGMA journal_mode=WAL")
            self.sql.execute("PRAGMA synchronous=FULL")
            self.sql.execute("PRAGMA secure_delete=ON")  # not left to how SQLite was built; see `settle`
            if max_bytes is not None:
                self.limit(max_bytes)
            written = self._written(version)
            if written > version or (written < version and migrate is None):
                raise StoreFault(
                    f"{self.path} was written with schema {written}, this program reads {version}: "
                    "open it with the version of the program that wrote it, or start a new run"
                )
            if written < version and migrate is not None:
                migrate(self.sql, written)
            self.sql.executescript(schema)
            self.settle()  # what was deleted before a crash
            self.apply([lambda: self.set_meta("schema", str(version))])
        except sqlite3.DatabaseError as error:
            self.close()
            raise StoreFault(
                f"cannot open {self.path}: {error}; is it an {what}, and is there room on the disk?"
            ) from error
        except BaseException:
            self.close()
            raise

    def limit(self, max_bytes: int) -> None:
        """Let the file grow to `max_bytes` and no further."""
        page = int(self.one("PRAGMA page_size"))
        self.sql.execute(f"PRAGMA max_page_count={max(1, max_bytes // page)}")

    def _written(self, version: int) -> int:
        """The schema of the file; `version` for a new one."""
        known = self.one("SELECT 1 FROM sqlite_master WHERE name = 'meta'")
        return int(self.meta("schema", str(version))) if known else version

    def _take_lock(self) -> int:
        name = self.path.with_name(self.path.name + ".lock")
        descriptor = os.open(name, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            owner = os.pread(descriptor, 64, 0).decode(errors="replace").strip()
            os.close(descriptor)
            raise StoreInUse(
                f"another {self._what} (process {owner or 'unknown'}) is using {self.path}: "
                "use that one, stop it first, or choose another run name"
            ) from error
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, f"{os.getpid()}\n".encode(), 0)
        return descriptor

    def close(self) -> None:
        """Close the file and give up the lock. May be called any number of times."""
        if hasattr(self, "sql"):
            self.sql.close()
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1

    def apply(self, operations: Sequence[Callable[[], T]]) -> list[T | Exception]:
        """Run `operations` in one transaction and commit it: when this returns, all of them are on the disk.

        Each has its own savepoint: one that raises is undone alone, and its exception stands in its place in the
        answer. An operation may run twice (see below), so it must touch nothing but the database. If the commit
        itself fails, all of them are undone and every answer is the failure.
        """
        try:
            return self._apply_together(operations)
        except sqlite3.Error as error:
            self._rollback()
            if len(operations) == 1:
                typed = self._typed(error)
                return self.apply(operations) if isinstance(typed, StoreFull) and self._makes_room() else [typed]
            # A full disk undoes the whole transaction. Alone, the small ones among them may still fit.
            return [answer for operation in operations for answer in self.apply([operation])]

    def _apply_together(self, operations: Sequence[Callable[[], T]]) -> list[T | Exception]:
        answers: list[T | Exception] = []
        self.sql.execute("BEGIN IMMEDIATE")
        for operation in operations:
            self.sql.execute("SAVEPOINT operation")
            try:
                answers.append(operation())
            except sqlite3.Error:
                raise
            except Exception as error:  # handed to the caller of this operation, whatever it is
                self.sql.execute("ROLLBACK TO operation")
                answers.append(error)
            self.sql.execute("RELEASE operation")
        self.sql.execute("COMMIT")
        return answers

    def settle(self) -> bool:
        """Empty the write-ahead log into the file, so that what was deleted is in neither any more; outside of `apply`.

        False where somebody reads an older state of the file just now: repeat the call.
        """
        usual = self.one("PRAGMA busy_timeout")
        self.sql.execute(f"PRAGMA busy_timeout={_READERS_MS}")  # whoever waits for this thread does not wait for them
        try:
            busy, _, _ = self.sql.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()
        finally:
            self.sql.execute(f"PRAGMA busy_timeout={usual}")
        return not busy

    def _makes_room(self) -> bool:
        if self._making_room:
            return False
        self._making_room = True
        try:
            return self.make_room()
        finally:
            self._making_room = False

    def make_room(self) -> bool:
        """Free some of the file for an operation that found it full, which is then repeated; whether there was any."""
        return False

    def _rollback(self) -> None:
        if self.sql.in_transaction:
            self.sql.execute("ROLLBACK")

    def _typed(self, error: sqlite3.Error) -> Exception:
        code = getattr(error, "sqlite_errorcode", None)
        if code == sqlite3.SQLITE_FULL or (code is not None and code & 0xFF == sqlite3.SQLITE_IOERR):
            log.error("cannot write %s: %s", self.path, error)
            return StoreFull(
                f"cannot write {self.path}: {error}. Nothing acknowledged is lost; make room (or raise max_bytes) "
                "and repeat the call"
            )
        return error

    def one(self, query: str, *values: Any) -> Any:
        """The first column of the first row, or None."""
        row = self.sql.execute(query, values).fetchone()
        return None if row is None else row[0]

    def all(self, query: str, *values: Any) -> list[sqlite3.Row]:
        """Every row."""
        return self.sql.execute(query, values).fetchall()

    def meta(self, key: str, default: str) -> str:
        """A persistent value."""
        value = self.one("SELECT value FROM meta WHERE key = ?", key)
        return default if value is None else str(value)

    def set_meta(self, key: str, value: str) -> None:
        """Set a persistent value."""
        self.sql.execute(
            "INSERT INTO meta VALUES (?, ?) ON CONFLICT DO UPDATE SET value = excluded.value", (key, value)
        )

    def count(self, name: str, amount: int = 1) -> None:
        """Add to a persistent counter."""
        self.sql.execute(
            "INSERT INTO counters VALUES (?, ?) ON CONFLICT DO UPDATE SET value = value + excluded.value",
            (name, amount),
        )

    def counters(self) -> dict[str, int]:
        """All persistent counters."""
        return {row["name"]: row["value"] for row in self.all("SELECT name, value FROM counters")}

    def event(self, at: float, ticket: str, what: str, reason: str) -> None:
        """Log and keep why a ticket did not simply end with an episode."""
        log.warning("ticket %s: %s: %s", ticket, what, reason)
        self.sql.execute(
            "INSERT INTO events (at, ticket, what, reason) VALUES (?, ?, ?, ?)", (at, ticket, what, reason)
        )
