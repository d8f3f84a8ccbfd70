"""Moving answered conversations into the episode store, letting unanswered ones expire, wiping old ones.

At least once to the store, and the episode's id makes the second time harmless: so no accepted feedback is lost and
none is trained twice, wherever either process dies.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from agent.episode import Episode, EpisodeError
from agent.serve.config import ServeConfig
from agent.serve.conversations.conversation import Conversation, episode_of
from agent.serve.conversations.journal import Journal
from agent.serve.conversations.recordings import forget_recordings
from agent.store.client import StoreClient
from agent.store.database_thread import DatabaseThread
from agent.store.protocol import StoreFault

log = logging.getLogger(__name__)

_SWEEP_S = 5.0
_AT_ONCE = 64
_FIRST_WAIT_S, _LONGEST_WAIT_S = 0.2, 10.0


@dataclass
class _Lock:
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    users: int = 0


class Delivery:
    """Owns the way from the journal to the store. `run` works until cancelled; `wake` makes it look at once.

    `recordings`: the folder of batches that the run's learner keeps, if it does.
    """

    def __init__(
        self,
        thread: DatabaseThread,
        journal: Journal,
        store: StoreClient,
        config: ServeConfig,
        *,
        worker: str,
        recordings: Path | None = None,
    ) -> None:
        self._thread, self._journal, self._store, self._config, self._worker = thread, journal, store, config, worker
        self._wanted = asyncio.Event()
        self._recordings = recordings
        # Deliver, judge or forget, not two at once: one that is being deleted must not be offered after that.
        self._locks: dict[str, _Lock] = {}
        self._settled = True
        self.fault = ""
        """Why the store does not take episodes; "" while it does."""

    def wake(self) -> None:
        """There is something new to deliver."""
        self._wanted.set()

    def erase(self) -> None:
        """Words have been deleted from the journal: take them out of all other files at once."""
        self._settled = False
        self.wake()

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
                while await self._erase_some():
                    pass
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
        ttl_s, close_s = self._config.feedback_ttl_s, self._config.feedback.close_s
        await self._thread.run(lambda: self._journal.expire(ttl_s, close_s))
        if await self._thread.run(lambda: self._journal.retire(self._config.retention_s)):
            self._settled = False

    async def _round(self) -> bool:
        """Deliver what is there now; whether there may be more."""
        waiting = await self._thread.run(self._journal.undelivered)
        for conversation_id in waiting:
            await self.deliver(conversation_id)
        return len(waiting) == _AT_ONCE

    async def _erase_some(self) -> bool:
        """Take deleted words out of the journal's log, the store and the learner's recordings; whether there is more.

        The store may be away and the learner may hold an episode in memory: it is repeated then, with the next look.
        """
        if not self._settled:
            self._settled = await self._thread.settle()
        to_wipe = await self._thread.run(self._journal.wiping)
        if not to_wipe:
            return False
        done = await asyncio.gather(*(self._wipe(conversation_id) for conversation_id in to_wipe))
        return len(to_wipe) == _AT_ONCE and all(done)

    async def deliver(self, conversation_id: str) -> str:
        """Offer one conversation's episode; the outcome, or "" where there is nothing to offer (any more).

        Raises `StoreFault` if the store is away or full.
        """
        async with self._alone(conversation_id):
            conversation = await self._thread.run(lambda: self._journal.conversation(conversation_id))
            if conversation is None or conversation.status != "answered":
                return ""
            try:
                episode = self.episode(conversation)
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
                free = await self._store.forget(conversation_id)
            except StoreFault as error:
                log.info("conversation %s is wiped later: %s", conversation_id, error)
                return False
            # After the store: a learner that still has the episode may record it yet, and is looked after again.
            if self._recordings is not None:
                await asyncio.to_thread(forget_recordings, self._recordings, conversation_id)
            if free:
                await self._thread.run(lambda: self._journal.wiped(conversation_id))
            return free

    def episode(self, conversation: Conversation) -> Episode:
        """The episode of a judged conversation; raises `EpisodeError`."""
        return episode_of(conversation, self._worker, self._config.feedback.aggregate)

    async def replace(self, conversation: Conversation) -> str:
        """Give the store the episode with another verdict, while nobody else works on it (`alone`); "", or why it does
        not take it any more. Raises `StoreFault` if it is away or full, and `EpisodeError`."""
        ending = await self._store.replace(self.episode(conversation))
        return ending.reason if ending.outcome == "superseded" else ""

    @contextlib.asynccontextmanager
    async def alone(self, conversations: Sequence[str]) -> AsyncIterator[None]:
        """Nothing is delivered or wiped of these meanwhile."""
        async with contextlib.AsyncExitStack() as stack:
            for conversation_id in sorted(set(conversations)):  # in one order: two callers never wait in a circle
                await stack.enter_async_context(self._alone(conversation_id))
            yield

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
