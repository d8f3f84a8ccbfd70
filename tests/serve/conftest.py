from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
from serve_tools import Client, ServerProcess, client, serving, write_models, write_recipe


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Two snapshots of one tiny model."""
    return write_models(tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="session")
def server(models: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """A server that the tests of one worker share: they must not change its versions."""
    with serving(write_recipe(tmp_path_factory.mktemp("shared"), models[0], max_body_bytes=1 << 16)) as running:
        yield running


@pytest.fixture
async def api(server: ServerProcess) -> AsyncIterator[Client]:
    """A client of the shared server."""
    async with client(server.url) as connected:
        yield connected
