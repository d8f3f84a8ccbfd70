from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from byte_model import write_byte_model
from runtime_tools import AnyStore, StoreInside, StoreProcess

from agent.chat.renderer import ChatRenderer
from agent.store.client import StoreClient
from agent.store.config import StoreConfig


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_byte_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="session")
def renderer(model_folder: Path) -> ChatRenderer:
    return ChatRenderer.from_pretrained(model_folder)


@pytest.fixture
async def store(tmp_path: Path) -> AsyncIterator[AnyStore]:
    """A store of 20 tasks; a batch of 10 is its whole staleness budget."""
    inside = StoreInside(tmp_path / "episodes.sqlite", StoreConfig(tasks=20, batch=10, max_lag=0))
    await inside.start()
    yield inside
    await inside.stop()


@pytest.fixture
async def store_process(tmp_path: Path) -> AsyncIterator[StoreProcess]:
    """The same as a process of its own, that can be killed."""
    process = StoreProcess(tmp_path / "episodes.sqlite", "tasks=20", "batch=10", "max_lag=0")
    await process.start()
    yield process
    await process.stop()


@pytest.fixture
async def client(store: AnyStore) -> AsyncIterator[StoreClient]:
    """A client of the store: the learner's side of a test."""
    async with StoreClient(store.url) as connected:
        yield connected
