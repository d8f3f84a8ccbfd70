"""Verdicts on what the store has already: written when it has taken them, both of a pair or none."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from test_journal import Bench

from agent.episode import Episode
from agent.serve.config import ServeConfig
from agent.serve.conversations.delivery import Delivery
from agent.serve.conversations.feedback import Feedback
from agent.serve.conversations.judging import Judging
from agent.store.database_thread import DatabaseThread
from agent.store.protocol import Ending, StoreFault
from agent.wire.errors import ApiError

TTL = 60.0


@dataclass
class Store:
    """Holds rewards by episode; `claimed` ones can't change, and it may be `away`."""

    held: dict[str, float] = field(default_factory=dict)
    claimed: set[str] = field(default_factory=set)
    away: bool = False

    async def replace(self, episode: Episode) -> Ending:
        if self.away:
            raise StoreFault("no episode store there")
        if episode.id in self.claimed:
            return Ending("superseded", "its episode is claimed")
        self.held[episode.id] = episode.reward
        return Ending("accepted")

    async def offer(self, episode: Episode, *, judge: str = "") -> Ending:
        return await self.replace(episode)


@dataclass
class Case:
    bench: Bench
    store: Store
    judging: Judging
    delivery: Delivery

    async def delivered(self, reward: float = 1.0) -> tuple[str, str]:
        """A response whose episode the store has, and its conversation."""
        name, conversation = self.bench.reply()
        await self.judging.give([Feedback(name, reward, None, {})], "k")
        assert await self.delivery.deliver(conversation) == "accepted"
        return name, conversation

    def rewards(self, *conversations: str) -> list[Any]:
        kept = [self.bench.journal.conversation(name) for name in conversations]
        return [one.turns[0].reward for one in kept if one is not None]


@pytest.fixture
async def case(tmp_path: Path) -> AsyncIterator[Case]:
    bench, store = Bench(tmp_path), Store()
    thread = DatabaseThread(bench.journal)
    delivery = Delivery(thread, bench.journal, store, ServeConfig(), worker="w")  # type: ignore[arg-type]
    yield Case(bench, store, Judging(thread, bench.journal, delivery, ttl_s=TTL), delivery)
    thread.close()


async def test_a_verdict_that_the_store_cannot_be_told_is_not_acknowledged(case: Case) -> None:
    """It would be in the journal, and the learner would be given the old one."""
    name, conversation = await case.delivered()
    case.store.away = True
    with pytest.raises(ApiError) as away:
        await case.judging.give([Feedback(name, 0.0, None, {})], "k")
    assert (away.value.status, away.value.code) == (503, "store_away")
    assert case.rewards(conversation) == [1.0]
    [words] = await case.judging.give([Feedback(name, None, None, {}, comment="anyway")], "k")
    assert not words.duplicate, "words concern no store"
    case.store.away = False
    [answered] = await case.judging.give([Feedback(name, 0.0, None, {})], "k")
    assert (answered.counted, case.store.held, case.rewards(conversation)) == (True, {conversation: 0.0}, [0.0])


async def test_of_a_pair_both_verdicts_are_taken_or_none(case: Case) -> None:
    (chosen, one), (rejected, other) = await case.delivered(0.5), await case.delivered(0.5)
    pair = (Feedback(chosen, 1.0, None, {}, other=rejected), Feedback(rejected, 0.0, True, {}, other=chosen))
    case.store.claimed.add(other)
    with pytest.raises(ApiError) as refused:
        await case.judging.prefer(pair, "k")
    assert refused.value.code == "feedback_claimed"
    assert (case.store.held, case.rewards(one, other)) == ({one: 0.5, other: 0.5}, [0.5, 0.5])
    case.store.claimed.clear()
    assert [answered.reward for answered in await case.judging.prefer(pair, "k")] == [1.0, 0.0]
    assert (case.store.held, case.rewards(one, other)) == ({one: 1.0, other: 0.0}, [1.0, 0.0])
