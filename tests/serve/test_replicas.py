"""Several servers of one run before one store: one owns the versions, the others follow."""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any, cast

import pytest
from pydantic import ValidationError
from serve_tools import Client, ServerProcess, client, write_recipe

from agent.child_processes import start_service, stop_child
from agent.engines.base import Engine, EngineHealth
from agent.engines.client import HttpEngine
from agent.serve.config import ServeError, ServeRecipe, load_recipe
from agent.serve.conversations.journal import Journal
from agent.serve.versions.following import Follower
from agent.serve.versions.publishing import Versions
from agent.store.client import StoreClient
from agent.store.database_thread import DatabaseThread

KEY = "a-key-of-the-whole-run-that-is-long-enough"


@contextlib.asynccontextmanager
async def shared_store(folder: Path) -> AsyncIterator[str]:
    """A store of its own process."""
    process, port = await start_service(
        *(sys.executable, "-m", "agent.store", "--path", str(folder / "episodes.sqlite"), "--exit-with-parent"),
        *("tasks=0", "batch=4"),
        name="the store",
        log=folder / "store.log",
        env={**os.environ, "SAO_KEY": KEY},
        limit_s=60,
        fault=RuntimeError,
    )
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        await stop_child(process)


async def until(holds: Callable[[], Awaitable[bool]], within_s: float = 60.0) -> None:
    async with asyncio.timeout(within_s):
        while not await holds():  # noqa: ASYNC110
            await asyncio.sleep(0.05)


async def health(api: Client) -> dict[str, Any]:
    return (await api.call("GET", "/healthz"))[1]


@pytest.mark.timeout(400)
async def test_a_replica_follows_the_owner_and_hands_in_to_the_same_store(
    models: tuple[Path, Path], tmp_path: Path
) -> None:
    """A second server before the store kept versions of its own, which nobody published to."""
    (tmp_path / "shared-key").write_text(KEY)
    os.chmod(tmp_path / "shared-key", 0o600)
    recipe = write_recipe(tmp_path, models[0])
    async with contextlib.AsyncExitStack() as stack:
        store_url = await stack.enter_async_context(shared_store(tmp_path))
        words = [f"store.url={store_url}", f"key_file={tmp_path / 'shared-key'}"]
        owner = ServerProcess(recipe, *words)
        stack.callback(lambda: owner.stop() if owner.process.poll() is None else 0)
        await asyncio.to_thread(owner.start)
        following = [*words, f"serve.replicas.owner={owner.engine}", "serve.replicas.name=b"]
        replica = ServerProcess(recipe, *following, "serve.replicas.poll_s=0.1")
        replica.output = tmp_path / "replica.out"
        await asyncio.to_thread(replica.start)
        stack.callback(lambda: replica.stop() if replica.process.poll() is None else 0)
        there = await stack.enter_async_context(client(owner.url))
        here = await stack.enter_async_context(client(replica.url))
        learner = HttpEngine(owner.engine, key=KEY)
        await learner.publish(1, models[1])
        await learner.close()

        async def follows() -> bool:
            return (await health(here))["version"] == (await health(there))["version"]

        await until(follows)
        answer = await here.chat("to the replica")
        assert answer["policy_versions"] == [1]
        status, given = await here.feedback(answer["id"], thumbs="up")
        assert (status, given["in_store"]) == (200, True)
        _, given = await there.feedback((await there.chat("to the owner"))["id"], thumbs="up")
        assert given["in_store"]
        async with StoreClient(store_url, key=KEY) as store:
            assert (await store.status()).ready == 2
        for path in ("pin", "unpin", "rollback"):
            status, refused = await here.call("POST", f"/v1/versions/{path}", {"version": 0})
            assert status == 409
            assert owner.engine in refused["error"]["message"]
        status, back = await there.call("POST", "/v1/versions/rollback", {"version": 0})
        assert (status, back["version"]) == (200, 2)
        await until(follows)
        assert (await here.chat("after the rollback"))["policy_versions"] == [2]

        await asyncio.to_thread(owner.stop)

        async def is_alone() -> bool:
            return (await health(here))["status"] == "degraded"

        await until(is_alone)
        assert "no owner answers" in (await health(here))["owner"]
        assert (await here.chat("alone"))["policy_versions"] == [2]


@pytest.mark.parametrize(
    ("replicas", "store", "named"),
    [
        ({"owner": "http://127.0.0.1:1"}, {"url": "http://127.0.0.1:2"}, "name is missing"),
        ({"owner": "http://127.0.0.1:1", "name": "b"}, {}, "store.url is missing"),
        ({"name": "../x"}, {}, "serve.replicas.name"),
    ],
)
def test_what_a_replica_needs_is_said_at_its_start(
    replicas: dict[str, Any], store: dict[str, Any], named: str, tmp_path: Path
) -> None:
    with pytest.raises(ValidationError) as caught:
        ServeRecipe.model_validate({"name": "x", "store": store, "serve": {"replicas": replicas}})
    assert named in str(caught.value)


def test_an_override_that_is_none_says_how_to_write_one(tmp_path: Path) -> None:
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text("name: x\n")
    with pytest.raises(ServeError, match=r"serve\.port=8080"):
        load_recipe(recipe, ["serve.port"])
    assert load_recipe(recipe, ["serve.feedback_ttl_s=1e3"]).serve.feedback_ttl_s == 1000.0


class NoEngine:
    """An engine as far as versions see it."""

    version = 0

    async def publish(self, version: int, weights: Path) -> None:
        self.version = version

    async def health(self) -> EngineHealth:
        return EngineHealth(self.version, 0, 0, 1, 0)


async def test_a_replica_that_is_started_without_its_owner_goes_on_with_what_it_knows(
    models: tuple[Path, Path], tmp_path: Path
) -> None:
    """And a new one, which knows nothing, says whom it has asked."""
    thread = DatabaseThread(journal := Journal(tmp_path / "journal.sqlite"))
    try:
        versions = Versions(thread, journal, tmp_path / "versions", keep=2, publish_s=60)
        follower = Follower("http://127.0.0.1:9", KEY, poll_s=1.0)
        with pytest.raises(ServeError, match=r"serve\.replicas\.owner http://127\.0\.0\.1:9"):
            await follower.first(versions)
        await versions.load(await versions.adopt(5, models[0]), 5)
        await versions.align(cast(Engine, NoEngine()))
        assert await follower.first(versions) is None
        assert "no owner answers" in follower.fault
        assert versions.served == 5
    finally:
        await asyncio.to_thread(thread.close)
