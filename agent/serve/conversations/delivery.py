"""Moving answered conversations into the episode store, letting unanswered ones expire, wiping old ones.

At least once to the store, and the episode's id makes the second time harmless: so no accepted feedback is lost and
none is trained twice, wherever either process dies.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator
from dataclasses import dataclass, field

from agent.episode import EpisodeError
from agent.serve.config import ServeConfig
from agent.serve.conversations.conversation import episode_of
from agent.serve.conversations.journal import Journal
from agent.store.client import StoreClient
from agent.store.database_thread import DatabaseThread
from agent.store.protocol import StoreFault

log = logging.getLogger(__name__)

_SWEEP_S = 5.0
_FIRST_WAIT_S, _LONGEST_WAIT_S = 0.2, 10.0


@dataclass
class _Lock:
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    users: int = 0


class Delivery:
    """Owns the way from the journal to the store. `run` works until cancelled; `wake` makes it look at once."""

    def __init__(
        self, thread: DatabaseThread, journal: Journal, store: StoreClient, config: ServeConfig, *, worker: str
    ) -> None:
        self._thread, self._journal, self._store, self._config, self._worker = thread, journal, store, config, worker
        self._wanted = asyncio.Event()
        # Deliver or forget, not both at once: a conversation that is being deleted must not be offered after that.
        self._locks: dict[str, _Lock] = {}
        self.fault = ""
        """Why the store does not take episodes; "" while it does."""

    def wake(self) -> None:
        """There is something new to deliver or to wipe."""
        self._wanted.set()

    async def run(self) -> None:
        """Deliver, expire, retire and wipe, for ever; faults of the store are waited out."""
        wait_s, swept = _FIRST_WAIT_S, 0.0
        clock = asyncio.get_running_loop().time
        while True:
            self._wanted.clear()
            try:
                if clock() - swept >= min(_SWEEP_S, self._config.feedback_ttl_s / 4) or not swept:
                    swept = clock()
                    await self._sweep()
                while await self._round():
                    pass
                self.fault, wait_s = "", _FIRST_WAIT_S
                pause_s = min(_SWEEP_S, self._config.feedback_ttl_s / 4)
            except (StoreFault, TimeoutError) as error:
                if not self.fault:
                    log.warning("episodes wait in the journal: %s", error)
                self.fault, pause_s, wait_s = str(error), wait_s, min(2 * wait_s, _LONGEST_WAIT_S)
                await asyncio.sleep(pause_s)
                continue
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._wanted.wait(), pause_s)

    async def _sweep(self) -> None:
        await self._thread.run(lambda: self._journal.expire(self._config.feedback_ttl_s))
        await self._thread.run(lambda: self._journal.retire(self._config.retention_s))

    async def _round(self) -> bool:
        """Deliver and wipe what is there now; whether there may be more."""
        waiting = await self._thread.run(self._journal.undelivered)
        to_wipe = await self._thread.run(self._journal.wiping)
        for conversation_id in waiting:
            await self.deliver(conversation_id)
        wiped = 0
        for conversation_id in to_wipe:
            wiped += await self._wipe(conversation_id)
        return len(waiting) == 64 or wiped == 64

    async def deliver(self, conversation_id: str) -> str:
        """Offer one conversation's episode; the outcome, or "" where there is nothing to offer (any more).

        Raises `StoreFault` if the store is away or full.
        """
        async with self._alone(conversation_id):
            conversation = await self._thread.run(lambda: self._journal.conversation(conversation_id))
            if conversation is None or conversation.status != "answered":
                return ""
            try:
                episode = episode_of(conversation, self._worker)
            except EpisodeError as error:
                log.error("conversation %s cannot be learned from: %s", conversation_id, error)
                await self._thread.run(lambda: self._journal.unlearned(conversation_id))
                return ""
            judge = await self._thread.run(lambda: self._journal.judge_of(conversation_id))
            ending = await self._store.offer(episode, judge=judge)
            await self._thread.run(lambda: self._journal.delivered(conversation_id, ending.outcome))
            return ending.outcome

    async def _wipe(self, conversation_id: str) -> bool:
        async with self._alone(conversation_id):
            try:
                await self._store.forget(conversation_id)
            except StoreFault as error:
                log.info("conversation %s is wiped later: %s", conversation_id, error)
                return False
            await self._thread.run(lambda: self._journal.wiped(conversation_id))
            return True

    @contextlib.asynccontextmanager
    async def _alone(self, conversation_id: str) -> AsyncIterator[None]:
        entry = self._locks.setdefault(conversation_id, _Lock())
        entry.users += 1
        try:
            async with entry.lock:
                yield
        finally:
            entry.users -= 1
            if not entry.users:
                self._locks.pop(conversation_id, None)
