"""Going back: the weights that are served, what the learner has made of them, and the episodes that it learned from.

    asked ──mark──▶ learner ended ──▶ old weights served, pinned ──note──▶ episodes set aside ──▶ done
                                                      └──the store is away: tried again, and no learner starts before──┘

The mark is on the disk first, so that a server that dies in between goes on with it at its next start.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from pathlib import Path

import msgspec

from agent.engines.base import EngineFault
from agent.serve.conversations.journal import Journal
from agent.serve.versions.publishing import Versions
from agent.serve.versions.rollback_note import RollbackNote, write_note
from agent.store.client import StoreClient
from agent.store.database_thread import DatabaseThread
from agent.store.protocol import StoreFault

log = logging.getLogger(__name__)

_MARK = "rollback"
_AGAIN_S = 1.0


class _Mark(msgspec.Struct, frozen=True):
    """A rollback that is not done: to whose weights, and the largest number before it."""

    version: int
    before: int


class Rollbacks:
    """The one way back. `end_learner` ends a learner that runs, at once: what it has in hand is to be set aside."""

    def __init__(
        self,
        thread: DatabaseThread,
        journal: Journal,
        versions: Versions,
        store: StoreClient,
        run_dir: Path,
        *,
        end_learner: Callable[[], Awaitable[None]],
    ) -> None:
        self._thread, self._journal, self._versions, self._store = thread, journal, versions, store
        self._run_dir, self._end_learner = run_dir, end_learner
        self._lock = asyncio.Lock()
        self._wanted = asyncio.Event()
        self._note: RollbackNote | None = None
        self._busy = False

    @property
    def unfinished(self) -> bool:
        """Whether a rollback is under way, or the store has yet to hear of one; no learner may start before it has."""
        return self._busy or self._note is not None

    async def load(self) -> None:
        """Find what an earlier server did not bring to its end."""
        text = await self._thread.run(lambda: self._journal.meta(_MARK, ""))
        if not text:
            return
        mark = msgspec.json.decode(text.encode(), type=_Mark)
        if self._versions.served > mark.before:
            self._note = RollbackNote(mark.version, self._versions.served)
            self._wanted.set()
        else:  # nobody was answered, and nothing has changed
            await self._set_mark(None)

    async def to(self, number: int) -> tuple[int, int | None]:
        """Go back to version `number`: the number under which it is served now, and how many episodes are set aside.

        None for the episodes: the store is away, and is told when it is back. Raises `ApiError` 404 as
        `Versions.rollback` does, and `EngineFault`.
        """
        async with self._lock:
            version = await self._versions.made_by(number)
            await self._set_mark(_Mark(version, self._versions.newest))
            self._busy = True
            try:
                # First, so that nothing of the line that is left is published behind the rollback.
                await self._end_learner()
                served = await self._versions.rollback(number)
                await self._end_learner()  # one that was just being started; from here on none is
                self._note = RollbackNote(version, served)
            except EngineFault:
                await self._set_mark(None)
                raise
            finally:
                self._busy = False
            try:
                return served, await self._finish()
            except StoreFault as error:
                log.warning("the store is told of the rollback later: %s", error)
                self._wanted.set()
                return served, None

    async def run(self) -> None:
        """Finish what the store could not be told; never returns."""
        while True:
            await self._wanted.wait()
            async with self._lock:
                try:
                    await self._finish()
                    self._wanted.clear()
                    continue
                except StoreFault as error:
                    log.info("the store has yet to hear of a rollback: %s", error)
            await asyncio.sleep(_AGAIN_S)

    async def _finish(self) -> int:
        note = self._note
        if note is None:
            return 0
        count = await self._store.set_aside(note.version)
        await self._store.set_version(note.served)
        await asyncio.to_thread(write_note, self._run_dir, note)
        await self._set_mark(None)
        self._note = None
        log.info("went back to version %d as %d; %d episodes are set aside", note.version, note.served, count)
        return count

    async def _set_mark(self, mark: _Mark | None) -> None:
        text = "" if mark is None else msgspec.json.encode(mark).decode()
        await self._thread.run(lambda: self._journal.set_meta(_MARK, text))
