"""Verdicts on their way into the journal, and into the store where that has the episode already."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from agent.episode import EpisodeError
from agent.serve.conversations.conversation import Conversation, before_turn, same_messages
from agent.serve.conversations.delivery import Delivery
from agent.serve.conversations.feedback import Feedback
from agent.serve.conversations.journal import Answered, Journal, Weighed, nobody
from agent.store.database_thread import DatabaseThread
from agent.store.protocol import StoreFault
from agent.wire.errors import ApiError


class Judging:
    """Takes feedback. What an open conversation is told is written to the journal and that is all. One that is closed
    may be on its way to the store, or there: it is held still, the store is asked to change its episode, and the
    journal is written when it has. So a crash in between leaves a verdict unacknowledged, and it is given again.
    """

    def __init__(self, thread: DatabaseThread, journal: Journal, delivery: Delivery, *, ttl_s: float) -> None:
        self._thread, self._journal, self._delivery, self._ttl_s = thread, journal, delivery, ttl_s
        self._running: set[asyncio.Task[list[Answered]]] = set()

    async def give(self, given: Sequence[Feedback], key: str, judge: Callable[[str], str] = nobody) -> list[Answered]:
        """Write all of `given`, or nothing; durable when it returns. Raises `ApiError` 404, 409, 410 or 503.

        `judge` names whose verdicts they are, of the conversation's user (see `Judges`).
        """
        answers = await self._thread.run(lambda: self._at_once(given, key, judge))
        if answers is not None:
            return answers
        # Not given up half way when the caller goes: the store would have a verdict that the journal has not.
        task = asyncio.create_task(self._revise(given, key, judge))
        self._running.add(task)
        task.add_done_callback(self._running.discard)
        return await asyncio.shield(task)

    async def prefer(
        self, pair: tuple[Feedback, Feedback], key: str, judge: Callable[[str], str] = nobody
    ) -> list[Answered]:
        """Write both verdicts of a comparison, or none; raises `ApiError` as `give` does, and 422 where the two are no
        answers to one prompt."""
        await self._thread.run(lambda: self._check_siblings(pair, key))
        return await self.give(pair, key, judge)

    def _check_siblings(self, pair: tuple[Feedback, Feedback], key: str) -> None:
        asked = []
        for feedback in pair:
            weighed = self._journal.weigh(feedback, key, self._ttl_s)
            names = [turn.response_id for turn in weighed.where.turns]
            asked.append((weighed.where, names.index(feedback.response_id)))
        (one, first), (other, second) = asked
        same = one.tools == other.tools and same_messages(before_turn(one, first), before_turn(other, second))
        if not same:
            raise ApiError(
                422,
                "chosen and rejected must answer the same messages: one is the other, sampled again",
                param="rejected",
            )

    def _at_once(self, given: Sequence[Feedback], key: str, judge: Callable[[str], str]) -> list[Answered] | None:
        """Feedback that concerns nobody but the journal; None where some does."""
        weighed = [self._journal.weigh(feedback, key, self._ttl_s) for feedback in given]
        if any(_is_closed(one.conversation) and one.verdict.counts for one in weighed):
            return None
        both = zip(given, weighed, strict=True)
        return [self._journal.give(feedback, key, self._ttl_s, one, judge) for feedback, one in both]

    async def _revise(self, given: Sequence[Feedback], key: str, judge: Callable[[str], str]) -> list[Answered]:
        names = await self._thread.run(lambda: self._journal.owners_of(given, key))
        async with self._delivery.alone(names):
            weighed = await self._thread.run(lambda: [self._journal.weigh(each, key, self._ttl_s) for each in given])
            changed: list[Weighed] = []
            for one in weighed:
                if one.conversation.status == "delivered" and one.verdict.counts:
                    if refusal := await self._replace(one.where):
                        for earlier in changed:  # both or none
                            await self._replace(earlier.conversation)
                        raise ApiError(
                            409,
                            f"response {one.turn.response_id}: the verdict can't be changed any more, {refusal}",
                            code="feedback_claimed",
                        )
                    changed.append(one)
            return await self._thread.run(
                lambda: [self._journal.give(each, key, self._ttl_s, judge=judge) for each in given]
            )

    async def _replace(self, conversation: Conversation) -> str:
        try:
            return await self._delivery.replace(conversation)
        except EpisodeError as error:
            return str(error)
        except StoreFault as error:
            raise ApiError(
                503, f"the episode store has this response and can't be told: {error}", code="store_away", retry_s=1.0
            ) from error


def _is_closed(conversation: Conversation) -> bool:
    return conversation.status in ("answered", "delivered")
