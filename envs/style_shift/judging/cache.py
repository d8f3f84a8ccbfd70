"""Verdicts on disk: one SQLite file, which several processes may share. Losing it costs money, never correctness."""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
import sqlite3
import threading
from pathlib import Path

from envs.style_shift.judging.judge import Verdict

log = logging.getLogger(__name__)

_BUSY_S = 10.0


def cache_key(*, model: str, rubric_version: str, style: str, prompt: str, text: str) -> str:
    """A hash over everything that a verdict depends on; no two different questions share one."""
    # JSON, not a join: ("a", "bc") and ("ab", "c") must differ.
    parts = json.dumps([model, rubric_version, style, prompt, text])
    return hashlib.sha256(parts.encode()).hexdigest()


class VerdictCache:
    """`get` and `put` by key. A file that cannot be used is logged once a fault and counts as empty (`faults`)."""

    def __init__(self, path: Path | str) -> None:
        self.path = Path(path)
        self.faults = 0
        self._lock = threading.Lock()  # one connection, used from the threads that `to_thread` picks
        self._connection: sqlite3.Connection | None = None

    async def get(self, key: str) -> Verdict | None:
        """The verdict kept under `key`, or None."""
        return await asyncio.to_thread(self._get, key)

    async def put(self, key: str, verdict: Verdict) -> None:
        """Keep `verdict`; the first one under a key stays."""
        await asyncio.to_thread(self._put, key, verdict)

    async def aclose(self) -> None:
        """Close the file; it is opened again by the next use."""
        await asyncio.to_thread(self._close)

    def _open(self) -> sqlite3.Connection:
        if self._connection is None:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            connection = sqlite3.connect(self.path, timeout=_BUSY_S, check_same_thread=False, isolation_level=None)
            try:
                connection.execute("PRAGMA journal_mode=WAL")
                connection.execute("PRAGMA synchronous=NORMAL")
                connection.execute(
                    "CREATE TABLE IF NOT EXISTS verdicts "
                    "(key TEXT PRIMARY KEY, quality INTEGER NOT NULL, style TEXT NOT NULL, reasoning TEXT NOT NULL)"
                )
            except BaseException:
                connection.close()
                raise
            self._connection = connection
        return self._connection

    def _get(self, key: str) -> Verdict | None:
        with self._lock:
            try:
                cursor = self._open().execute("SELECT quality, style, reasoning FROM verdicts WHERE key = ?", (key,))
                row = cursor.fetchone()
                return None if row is None else Verdict(*row)
            except (sqlite3.Error, OSError, ValueError) as error:
                self._fault(error)
                return None

    def _put(self, key: str, verdict: Verdict) -> None:
        # A judge may quote half a surrogate pair; SQLite takes only what UTF-8 can write.
        reasoning = verdict.reasoning.encode("utf-8", "replace").decode()
        with self._lock:
            try:
                self._open().execute(
                    "INSERT OR IGNORE INTO verdicts VALUES (?, ?, ?, ?)",
                    (key, verdict.quality, verdict.style, reasoning),
                )
            except (sqlite3.Error, OSError) as error:
                self._fault(error)

    def _fault(self, error: Exception) -> None:
        self.faults += 1
        log.warning("the verdict cache %s could not be used: %s", self.path, error)

    def _close(self) -> None:
        with self._lock:
            connection, self._connection = self._connection, None
            if connection is not None:
                connection.close()
