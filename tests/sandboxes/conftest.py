"""Interpreters of both backends, and a real Docker engine; without one its tests fail and say how to get one."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from sandboxes.base import Limits, PythonSession
from sandboxes.docker import host_image
from sandboxes.docker.engine import DockerEngine
from sandboxes.docker.labels import LABEL_PROJECT
from sandboxes.docker.sandbox import DockerSandbox
from sandboxes.docker.settings import DockerSettings
from sandboxes.pool import PythonPool


@pytest_asyncio.fixture(params=["bubblewrap", "process"], scope="module", loop_scope="module")
async def pool(request: pytest.FixtureRequest) -> AsyncIterator[PythonPool]:
    """A pool of each backend, on the event loop of a module's tests; a file with limits of its own has its own."""
    async with PythonPool(request.param, Limits(wall_clock_s=20, memory_bytes=400 * 2**20), spares=1) as pool:
        yield pool


@pytest_asyncio.fixture(loop_scope="module")
async def python(pool: PythonPool) -> AsyncIterator[PythonSession]:
    """An interpreter out of `pool`."""
    session = await pool.session()
    yield session
    await session.close()


@pytest.fixture(scope="session")
def docker_image() -> str:
    """The base image, made of this machine's packages if it is not there; the test fails where no engine answers."""
    host_image.build()
    return host_image.TAG


@pytest.fixture
async def docker_engine(docker_image: str) -> AsyncIterator[DockerEngine]:
    """The engine at DOCKER_HOST or the default socket."""
    engine = DockerEngine()
    yield engine
    await engine.close()


def containers(engine: DockerEngine, project: str) -> list[dict[str, object]]:
    """All containers of `project`, those never started too."""
    found: list[dict[str, object]] = engine.client.api.containers(
        all=True, filters={"label": f"{LABEL_PROJECT}={project}"}
    )
    return found


def settled(engine: DockerEngine, project: str, patience_s: float = 60) -> list[dict[str, object]]:
    """What is left of `project` once the engine has removed what it was told to remove."""
    deadline = time.monotonic() + patience_s
    while (left := containers(engine, project)) and time.monotonic() < deadline:
        time.sleep(0.1)
    return left


@pytest.fixture
async def small(docker_engine: DockerEngine) -> AsyncIterator[DockerSettings]:
    """Settings of small containers under a project name of this test's own; after the test none may be left."""
    settings = DockerSettings(
        memory_bytes=256 * 2**20, cpus=1.0, pids=64, ttl_s=600, project=f"test-{secrets.token_hex(6)}"
    )
    yield settings
    left = await asyncio.to_thread(settled, docker_engine, settings.project)
    for container in left:
        await asyncio.to_thread(docker_engine.client.api.remove_container, container["Id"], force=True)
    assert left == []


@pytest.fixture
async def sandbox(
    docker_image: str, docker_engine: DockerEngine, small: DockerSettings
) -> AsyncIterator[DockerSandbox]:
    """A started container."""
    async with DockerSandbox(docker_image, settings=small, engine=docker_engine) as started:
        yield started
