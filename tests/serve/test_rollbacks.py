"""A rollback is one thing though it happens in three places: whichever dies in between, it is brought to its end."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any, cast

import pytest
from test_version_changes import folder, versions_of

from agent.engines.base import EngineFault
from agent.serve.conversations.journal import Journal
from agent.serve.versions.publishing import Versions
from agent.serve.versions.rollback import Rollbacks
from agent.serve.versions.rollback_note import RollbackNote, read_note
from agent.store.client import StoreClient
from agent.store.protocol import StoreFault


class Store:
    """What is asked of a store; `away` while it does not answer."""

    def __init__(self) -> None:
        self.away, self.set_aside_at, self.version = False, list[int](), 0

    async def set_aside(self, version: int) -> int:
        if self.away:
            raise StoreFault("nobody is there")
        self.set_aside_at.append(version)
        return 7

    async def set_version(self, version: int) -> None:
        self.version = version


class Place:
    """A run's folder with rollbacks over real versions and a real journal."""

    def __init__(self, tmp_path: Path, versions: Versions, journal: Journal, store: Store) -> None:
        self.versions, self.ended, self.newest_then = versions, 0, list[int]()
        self.rollbacks = Rollbacks(
            versions._thread, journal, versions, cast(StoreClient, store), tmp_path, end_learner=self._end
        )

    async def _end(self) -> None:
        self.ended += 1
        assert self.rollbacks.unfinished, "else the learner would be started again at once"
        self.newest_then.append(self.versions.newest)


async def test_weights_learner_and_episodes_go_back_together(tmp_path: Path) -> None:
    async with versions_of(tmp_path, folder(tmp_path / "sft"), keep=9) as (versions, engine, journal):
        for number in (1, 2, 3):
            await versions.publish(number, folder(tmp_path / f"w{number}"))
        store = Store()
        place = Place(tmp_path, versions, journal, store)
        assert await place.rollbacks.to(1) == (4, 7)
        assert (engine.version, store.version, store.set_aside_at, place.ended) == (4, 4, [1], 2)
        assert read_note(tmp_path) == RollbackNote(1, 4)
        assert (versions.pinned, place.rollbacks.unfinished) == (True, False)
        assert await place.rollbacks.to(4) == (5, 7)
        assert place.newest_then == [3, 4, 4, 5], "before anything is changed, and what starts just then too"
        assert read_note(tmp_path) == RollbackNote(1, 5), "whose weights they were first, for the learner's checkpoints"


async def test_a_store_that_is_away_is_told_when_it_is_back_and_no_learner_starts_before(tmp_path: Path) -> None:
    async with versions_of(tmp_path, folder(tmp_path / "sft"), keep=9) as (versions, _, journal):
        await versions.publish(1, folder(tmp_path / "w1"))
        store = Store()
        store.away = True
        place = Place(tmp_path, versions, journal, store)
        assert await place.rollbacks.to(0) == (2, None)
        assert place.rollbacks.unfinished
        assert read_note(tmp_path) is None
        after = Place(tmp_path, versions, journal, store)  # the server has died and is back
        await after.rollbacks.load()
        assert after.rollbacks.unfinished
        store.away = False
        task = asyncio.create_task(after.rollbacks.run())
        async with asyncio.timeout(60):
            while after.rollbacks.unfinished:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        task.cancel()
        await asyncio.wait((task,))
        assert (store.set_aside_at, store.version, read_note(tmp_path)) == ([0], 2, RollbackNote(0, 2))


async def test_a_rollback_that_changed_nothing_sets_nothing_aside(tmp_path: Path) -> None:
    """The server died after it was asked, or the engine did not take the weights."""
    async with versions_of(tmp_path, folder(tmp_path / "sft"), keep=9) as (versions, engine, journal):
        await versions.publish(1, folder(tmp_path / "w1"))
        store = Store()
        place = Place(tmp_path, versions, journal, store)

        async def refuses(version: int, weights: Path) -> Any:
            raise EngineFault("out of memory")

        engine.publish = refuses  # type: ignore[method-assign]
        with pytest.raises(EngineFault, match="out of memory"):
            await place.rollbacks.to(0)
        assert not place.rollbacks.unfinished
        after = Place(tmp_path, versions, journal, store)
        await after.rollbacks.load()
        assert (after.rollbacks.unfinished, store.set_aside_at, read_note(tmp_path)) == (False, [], None)
