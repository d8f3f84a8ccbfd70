"""Containers for many episodes: placement, waiting, spares, and that the end of the pool is the end of all of them."""

from __future__ import annotations

import asyncio
import contextlib
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sandboxes.base import Limits, SandboxFault
from sandboxes.docker.engine import DockerEngine, EngineGone
from sandboxes.docker.pool import DockerPool, Place, best
from sandboxes.docker.settings import DockerSettings

DOCKER = [pytest.mark.docker, pytest.mark.xdist_group("docker")]
LONG = Limits(wall_clock_s=60)


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 5), st.sampled_from([0.0, 100.0])), max_size=6))
def test_the_best_place_is_open_and_has_the_largest_free_part(rows: list[tuple[int, int, float]]) -> None:
    engine = cast(Any, SimpleNamespace())
    places = [Place(engine, slots, used, back) for slots, used, back in rows]
    chosen = best(places, 50.0)
    usable = [place for place in places if place.used < place.slots and place.back_at_s <= 50.0]
    assert (chosen is None) == (not usable)
    if chosen is not None:
        assert chosen in usable
        assert chosen.free == max(place.free for place in usable)


class TestPool:
    pytestmark = DOCKER

    async def test_a_full_pool_waits_and_a_close_gives_the_place_back(
        self, docker_image: str, small: DockerSettings
    ) -> None:
        async with DockerPool(small, slots=2) as pool:
            one, two = await pool.sandbox(docker_image), await pool.sandbox(docker_image)
            third = asyncio.create_task(pool.sandbox(docker_image))
            done, _ = await asyncio.wait([third], timeout=1)
            assert not done
            await one.close()
            await one.close()
            async with asyncio.timeout(60):
                await third
            assert len({one.id, two.id, third.result().id}) == 3

    async def test_a_spare_is_used_once_and_one_that_died_is_not_given(
        self, docker_image: str, docker_engine: DockerEngine, small: DockerSettings
    ) -> None:
        async with DockerPool(small, warm=1, slots=4) as pool:
            first = await pool.sandbox(docker_image)
            await first.put("/mark", b"")
            spare = await spare_of(pool, docker_image)
            await asyncio.to_thread(docker_engine.client.api.kill, spare.id)
            second = await pool.sandbox(docker_image)
            assert second.id not in (first.id, spare.id)
            third_spare = await spare_of(pool, docker_image)
            third = await pool.sandbox(docker_image)
            assert third.id == third_spare.id
            with pytest.raises(FileNotFoundError):
                await third.get("/mark")

    async def test_an_engine_that_is_away_is_passed_over(
        self, docker_image: str, small: DockerSettings, tmp_path: Path
    ) -> None:
        async with DockerPool(small, hosts=[f"unix://{tmp_path}/none.sock", ""], slots=2) as pool:
            sandbox = await pool.sandbox(docker_image)
            assert sandbox.host == ""
            assert (await sandbox.run(["echo", "x"], limits=LONG)).stdout == "x\n"
        async with DockerPool(small, hosts=[f"unix://{tmp_path}/none.sock"]) as pool:
            with pytest.raises(EngineGone, match="make sandboxes"):
                await pool.sandbox(docker_image)

    async def test_two_engines_share_the_load(self, docker_image: str, small: DockerSettings) -> None:
        hosts = ["", "unix:///var/run/../run/docker.sock"]
        async with DockerPool(small, hosts=hosts, slots=2) as pool:
            given = await asyncio.gather(*(pool.sandbox(docker_image) for _ in range(4)))
            assert sorted(sandbox.host for sandbox in given) == sorted(hosts * 2)

    async def test_a_cancellation_is_not_lost_to_a_place_that_comes_free(
        self, docker_image: str, small: DockerSettings
    ) -> None:
        async with DockerPool(small, slots=1) as pool:
            await pool.sandbox(docker_image)
            waiting = asyncio.create_task(pool.sandbox(docker_image))
            async with asyncio.timeout(60):
                while not pool._changed._waiters:  # type: ignore[attr-defined]  # noqa: ASYNC110
                    await asyncio.sleep(0.01)
            async with pool._changed:
                pool._changed.notify_all()
            waiting.cancel()
            await asyncio.wait({waiting}, timeout=60)
            assert waiting.cancelled()

    async def test_the_end_of_the_pool_is_the_end_of_all(self, docker_image: str, small: DockerSettings) -> None:
        """Those in use, the spares, those being started, and those who wait; the fixture `small` finds what is left."""
        pool = DockerPool(small, warm=2, slots=4)
        await pool.sandbox(docker_image)
        asking = [asyncio.create_task(pool.sandbox(docker_image)) for _ in range(6)]
        await asyncio.sleep(0.3)
        await pool.close()
        for ask in asking:
            with contextlib.suppress(SandboxFault):
                await asyncio.wait_for(ask, 60)
        await pool.close()
        with pytest.raises(SandboxFault, match="closed"):
            await pool.sandbox(docker_image)


async def spare_of(pool: DockerPool, image: str) -> Any:
    """The first spare of `image`, once there is one."""
    async with asyncio.timeout(60):
        while True:
            for place in pool._places:
                if place.spares.get(image):
                    return place.spares[image][0]
            await asyncio.sleep(0.05)
