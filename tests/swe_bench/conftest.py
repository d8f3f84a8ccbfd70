"""A small repository with a bug, in an image built from a row's recipe, and containers of this test session's own."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
from swe_tools import Calc, make_calc

from envs.swe_bench.containers import Containers
from envs.swe_bench.images import ensure_image
from sandboxes.docker import host_image
from sandboxes.docker.engine import DockerEngine
from sandboxes.docker.labels import LABEL_PROJECT
from sandboxes.docker.settings import DockerSettings


@pytest.fixture(scope="session")
def calc(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Calc]:
    """The repository, its row, and its image; fails where no Docker engine answers."""
    host_image.build()
    folder: Path = tmp_path_factory.mktemp("calc")
    made = make_calc(folder, host_image.TAG, f"test__calc-{secrets.token_hex(4)}")

    async def build() -> str:
        engine = DockerEngine()
        try:
            name = await ensure_image(made.instance, engine)
            return str((await engine.call(lambda: engine.client.api.inspect_image(name)))["Id"])
        finally:
            await engine.close()

    async def remove(image: str) -> None:
        engine = DockerEngine()
        try:
            await engine.call(lambda: engine.client.api.remove_image(image, force=True))
        finally:
            await engine.close()

    image = asyncio.run(build())
    yield made
    asyncio.run(remove(image))


@pytest.fixture
async def containers() -> AsyncIterator[Containers]:
    """A pool of small containers of this test's own; none may be left after it."""
    settings = DockerSettings(
        memory_bytes=512 * 2**20, cpus=1.0, pids=128, ttl_s=900, project=f"test-{secrets.token_hex(6)}"
    )
    async with Containers(settings) as pool:
        yield pool
    await nothing_left(settings.project)


async def nothing_left(project: str) -> None:
    """Wait until the engine has removed the containers of `project`; fails if it does not."""
    engine = DockerEngine()
    try:
        async with asyncio.timeout(60):
            while await engine.call(  # noqa: ASYNC110 (the engine tells nobody; it is asked)
                lambda: engine.client.api.containers(all=True, filters={"label": f"{LABEL_PROJECT}={project}"})
            ):
                await asyncio.sleep(0.2)
    finally:
        await engine.close()
