"""Changes of versions whose caller goes, whose engine dies or whose disk is full; and what must never be removed."""

from __future__ import annotations

import asyncio
import contextlib
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, cast

import pytest

from agent.engines.base import Engine, EngineFault, EngineHealth
from agent.engines.client import HttpEngine
from agent.serve.children.engine import EngineChild
from agent.serve.config import ServeRecipe
from agent.serve.conversations.journal import Journal
from agent.serve.versions.publishing import Versions
from agent.store.database_thread import DatabaseThread


class Weights:
    """An engine as far as versions see it: it has weights, and a publication takes until `go` is set."""

    def __init__(self) -> None:
        self.version = 0
        self.began, self.go, self.answers = asyncio.Event(), asyncio.Event(), asyncio.Event()
        self.go.set()
        self.answers.set()

    async def publish(self, version: int, weights: Path) -> None:
        assert weights.is_dir()  # noqa: ASYNC240
        self.began.set()
        await self.go.wait()
        self.version = version

    async def health(self) -> EngineHealth:
        await self.answers.wait()
        return EngineHealth(self.version, 0, 0, 1, 0)


@pytest.fixture
def start(tmp_path: Path) -> Path:
    return folder(tmp_path / "sft")


@pytest.fixture
def snapshot(tmp_path: Path) -> Path:
    return folder(tmp_path / "snapshot")


def folder(path: Path) -> Path:
    path.mkdir()
    (path / "weights").write_text(path.name)
    return path


@contextlib.asynccontextmanager
async def versions_of(tmp_path: Path, start: Path, keep: int = 2) -> AsyncIterator[tuple[Versions, Weights, Journal]]:
    journal = Journal(tmp_path / "journal.sqlite")
    thread = DatabaseThread(journal)
    try:
        versions, engine = Versions(thread, journal, tmp_path / "versions", keep=keep, publish_s=60), Weights()
        await versions.load(start, 0)
        await versions.align(cast(Engine, engine))
        yield versions, engine, journal
        await versions.settle()
    finally:
        await asyncio.to_thread(thread.close)


async def statuses(versions: Versions) -> list[str]:
    return [row["status"] for row in (await versions.listing())["versions"]]


async def test_a_rollback_to_the_start_does_not_make_its_folder_the_servers_to_remove(
    tmp_path: Path, start: Path, snapshot: Path
) -> None:
    """Case G7: it is the user's model, and was removed with the rollback's number once that was old."""
    async with versions_of(tmp_path, start) as (versions, _, _):
        await versions.publish(1, snapshot)
        newest = await versions.rollback(0)
        await versions.unpin()
        for number in range(newest + 1, newest + 6):
            await versions.publish(number, snapshot)
    assert (start / "weights").read_text() == "sft"
    assert len(list((tmp_path / "versions").iterdir())) == 2


async def test_held_weights_do_not_fill_the_disk(tmp_path: Path, start: Path, snapshot: Path) -> None:
    async with versions_of(tmp_path, start) as (versions, engine, _):
        await versions.pin()
        for number in range(1, 12):
            assert await versions.publish(number, snapshot) == "held"
        assert {path.name for path in (tmp_path / "versions").iterdir()} == {"v10", "v11"}
        await versions.unpin()
        assert (versions.served, engine.version) == (11, 11)


async def test_a_change_whose_caller_goes_is_made_to_its_end(tmp_path: Path, start: Path, snapshot: Path) -> None:
    """Case G7: a learner that is killed, and an operator who rolls back in the middle of its publication and leaves."""
    async with versions_of(tmp_path, start) as (versions, engine, _):
        engine.go.clear()
        learner = asyncio.create_task(versions.publish(1, snapshot))
        await engine.began.wait()
        operator = asyncio.create_task(versions.rollback(0))
        await asyncio.sleep(0)
        for caller in (learner, operator):
            caller.cancel()
        await asyncio.wait((learner, operator))
        engine.go.set()
        await versions.settle()
        assert (versions.served, engine.version, versions.pinned) == (2, 2, True)
        assert await statuses(versions) == ["served", "served", "serving"]


async def test_what_the_table_could_not_be_told_is_served_by_the_next_try(
    tmp_path: Path, start: Path, snapshot: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A disk that fills between the engine's answer and ours: the same again is no success without a publication."""
    async with versions_of(tmp_path, start) as (versions, engine, _):
        put = versions._table.put

        def full(version: Any) -> None:
            if version.status == "served":
                raise OSError("no space left on device")
            put(version)

        monkeypatch.setattr(versions._table, "put", full)
        with pytest.raises(OSError, match="no space"):
            await versions.publish(1, snapshot)
        monkeypatch.setattr(versions._table, "put", put)
        assert await statuses(versions) == ["serving", "publishing"]
        engine.version = 0
        assert await versions.publish(1, snapshot) == "served"
        assert (versions.served, engine.version) == (1, 1)


async def test_an_engine_that_comes_back_does_not_take_back_a_publication(
    tmp_path: Path, start: Path, snapshot: Path
) -> None:
    async with versions_of(tmp_path, start) as (versions, engine, _):
        engine.go.clear()
        engine.answers.clear()
        publishing = asyncio.create_task(versions.publish(1, snapshot))
        await engine.began.wait()
        aligning = asyncio.create_task(versions.align(cast(Engine, engine)))
        await asyncio.sleep(0)
        engine.go.set()
        await publishing
        engine.answers.set()
        await aligning
        assert (versions.served, engine.version) == (1, 1)


class Sleeper(EngineChild):
    """Starts processes that do nothing, as an engine that does not take weights."""

    def __init__(self) -> None:
        super().__init__(ServeRecipe(name="x"), lambda: (Path(), 0), "")
        self.started: list[asyncio.subprocess.Process] = []

    async def start(self) -> str:
        command = [sys.executable, "-c", "import time; time.sleep(600)"]
        self._process = await asyncio.create_subprocess_exec(*command, start_new_session=True)
        self.started.append(self._process)
        return "http://127.0.0.1:9"


class Aligns:
    """Versions whose first engine refuses the weights."""

    def __init__(self) -> None:
        self.served, self.asked, self.well = 0, 0, asyncio.Event()

    async def align(self, engine: HttpEngine) -> None:
        self.asked += 1
        if self.asked == 1:
            raise EngineFault("out of memory")
        self.well.set()


async def test_an_engine_that_does_not_take_the_weights_is_not_left_beside_the_next_one() -> None:
    child, versions = Sleeper(), Aligns()
    await child.start()
    keeping = asyncio.create_task(child.keep(HttpEngine("http://127.0.0.1:9"), cast(Versions, versions)))
    try:
        child.started[0].kill()
        async with asyncio.timeout(60):
            await versions.well.wait()
        assert [process.returncode is None for process in child.started] == [False, False, True]
    finally:
        keeping.cancel()
        await asyncio.wait((keeping,))
        await child.close()
