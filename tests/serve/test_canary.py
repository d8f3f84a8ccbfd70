"""A new version that is clearly worse goes back by itself, and one that is not is served to all."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
from serve_tools import Client, client, serving, write_recipe
from test_version_changes import Weights, folder

from agent.engines.client import HttpEngine
from agent.serve.config import CanaryConfig
from agent.serve.conversations.journal import Journal
from agent.serve.versions.canary import Canary, Verdict, decide
from agent.serve.versions.publishing import Versions
from agent.store.database_thread import DatabaseThread

CONFIG = CanaryConfig(min_verdicts=40, tolerance=0.05, period_s=0.02, share=0.5, longest_s=60)


def verdicts(good: int, bad: int, judges: int = 20) -> list[Verdict]:
    rewards = [1.0] * good + [0.0] * bad
    return [Verdict(reward, f"u{i % judges}") for i, reward in enumerate(rewards)]


@pytest.mark.parametrize(
    ("old", "new", "say"),
    [
        (verdicts(30, 10), verdicts(30, 9), "wait"),  # one short
        (verdicts(30, 10), verdicts(30, 10), "promote"),
        (verdicts(30, 10), verdicts(27, 13), "promote"),  # what chance explains
        (verdicts(30, 10), verdicts(10, 30), "return"),
        (verdicts(40, 0), verdicts(39, 1), "promote"),
        (verdicts(10, 30), verdicts(40, 0), "promote"),
        (verdicts(30, 10, judges=1), verdicts(10, 30, judges=1), "return"),  # a server with one user
    ],
    ids=["wait", "equal", "chance", "worse", "one", "better", "alone"],
)
def test_only_what_is_clearly_worse_is_returned(old: list[Verdict], new: list[Verdict], say: str) -> None:
    assert decide(old, new, CONFIG, over=False).say == say


def test_one_who_judges_all_day_does_not_decide_for_the_others() -> None:
    old, new = verdicts(40, 0), verdicts(40, 0) + [Verdict(0.0, "poisoner")] * 400
    assert decide(old, new, CONFIG, over=False).say == "promote"


def test_a_trial_that_nobody_judges_ends() -> None:
    assert decide([], [], CONFIG, over=False).say == "wait"
    assert decide([], [], CONFIG, over=True).say == "promote"
    assert decide(verdicts(10, 0), verdicts(0, 10), CONFIG, over=True).say == "return"


class Trial:
    """Versions with a canary, users who judge each version as `rewards` says, and what was on the engine."""

    def __init__(self, versions: Versions, canary: Canary, said: list[dict[str, Any]]) -> None:
        self.versions, self.canary, self.said = versions, canary, said
        self.rewards: dict[int, float] = {}
        self.seen: set[int] = set()

    async def until(self, holds: Callable[[], bool]) -> None:
        async with asyncio.timeout(60):
            count = 0
            while not holds():
                await asyncio.sleep(0.001)
                number = self.versions.on_engine
                self.seen.add(number)
                if number in self.rewards:
                    count += 1
                    self.canary.judged([number], self.rewards[number], f"u{count % 20}")

    async def status(self, number: int) -> str:
        return next(v["status"] for v in (await self.versions.listing())["versions"] if v["version"] == number)


@contextlib.asynccontextmanager
async def trying(tmp_path: Path, config: CanaryConfig = CONFIG) -> AsyncIterator[Trial]:
    journal = Journal(tmp_path / "journal.sqlite")
    thread, said = DatabaseThread(journal), list[dict[str, Any]]()
    versions = Versions(thread, journal, tmp_path / "versions", keep=2, publish_s=60, tried_first=True)
    await versions.load(folder(tmp_path / "start"), 0)
    await versions.align(Weights())  # type: ignore[arg-type]
    canary = Canary(versions, config, on_change=said.append)
    task = asyncio.create_task(canary.run())
    try:
        yield Trial(versions, canary, said)
    finally:
        task.cancel()
        await asyncio.wait((task,))
        await versions.settle()
        await asyncio.to_thread(thread.close)


async def test_a_worse_version_is_never_served_to_all_and_says_why(tmp_path: Path) -> None:
    async with trying(tmp_path) as trial:
        trial.rewards = {0: 1.0, 1: 0.0}
        assert await trial.versions.publish(1, folder(tmp_path / "worse")) == "held"
        await trial.until(lambda: trial.said[-1:] != [] and trial.said[-1]["state"] == "returned")
        assert (trial.versions.served, trial.versions.on_engine, trial.seen) == (0, 0, {0, 1})
        assert await trial.status(1) == "returned"
        assert "reward 0.000 against 1.000" in (await trial.versions.listing())["canary"]["reason"]
        assert trial.versions.waiting is None
        trial.rewards[2] = 1.0
        await trial.versions.publish(2, folder(tmp_path / "better"))
        await trial.until(lambda: trial.versions.served == 2)


async def test_a_version_that_is_as_good_is_promoted_and_the_newest_is_next(tmp_path: Path) -> None:
    async with trying(tmp_path) as trial:
        await trial.versions.publish(1, folder(tmp_path / "a"))
        await trial.until(lambda: trial.versions.on_engine == 1)
        assert await trial.status(1) == "canary"
        for number in (2, 3, 4):  # a learner is faster than people; the one on trial keeps its weights
            assert await trial.versions.publish(number, folder(tmp_path / f"b{number}")) == "held"
        trial.rewards = dict.fromkeys(range(5), 1.0)
        await trial.until(lambda: trial.versions.served == 4)
        tried = [said["version"] for said in trial.said if said["state"] == "promoted"]
        assert tried in ([1], [1, 4])


async def test_an_operator_ends_a_trial(tmp_path: Path) -> None:
    async with trying(tmp_path) as trial:
        await trial.versions.publish(1, folder(tmp_path / "a"))
        await trial.until(lambda: trial.versions.on_engine == 1)
        assert await trial.versions.rollback(0) == 2
        await trial.until(lambda: trial.said[-1]["state"] == "stopped")
        assert (trial.versions.served, trial.versions.on_engine) == (2, 2)


async def test_a_reply_that_both_versions_wrote_counts_for_neither(tmp_path: Path) -> None:
    async with trying(tmp_path, CONFIG.model_copy(update={"min_verdicts": 2})) as trial:
        await trial.versions.publish(1, folder(tmp_path / "a"))
        await trial.until(lambda: trial.versions.on_engine == 1)
        for _ in range(100):
            trial.canary.judged([0, 1], 0.0, "u")
        trial.rewards = {0: 1.0, 1: 1.0}
        await trial.until(lambda: trial.versions.served == 1)


@pytest.mark.timeout(300)
@pytest.mark.xdist_group("serve-versions")
async def test_a_server_tries_a_publication_on_some_answers_and_takes_it_back(
    models: tuple[Path, Path], tmp_path: Path
) -> None:
    """Over HTTP: each reply says which version wrote it, the verdicts are compared, the states are there to see."""
    canary = {"share": 0.5, "min_verdicts": 10, "period_s": 0.5}
    with serving(write_recipe(tmp_path, models[0], canary=canary)) as server:
        learner = HttpEngine(server.engine, timeout_s=60, key=server.key)
        async with client(server.url) as api, contextlib.aclosing(_Closing(learner)):
            await learner.publish(1, models[1])
            seen = set()
            async with asyncio.timeout(200):
                while (listing := await versions(api))["canary"] is None or listing["canary"]["state"] == "trial":
                    answer = await api.chat()
                    seen.add(answer["policy_version"])
                    good = answer["policy_versions"] == [0]
                    assert (await api.feedback(answer["id"], reward=float(good)))[0] == 200
            assert seen == {0, 1}
            assert listing["served"] == 0
            assert [v["status"] for v in listing["versions"]] == ["serving", "returned"]
            assert (await api.chat())["policy_versions"] == [0]


async def versions(api: Client) -> dict[str, Any]:
    status, listing = await api.call("GET", "/v1/versions")
    assert status == 200
    return listing


class _Closing:
    def __init__(self, engine: HttpEngine) -> None:
        self._engine = engine

    async def aclose(self) -> None:
        await self._engine.close()
