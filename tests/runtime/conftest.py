from __future__ import annotations

from pathlib import Path

import pytest
from runtime_tools import write_model_folder

from agent.chat import ChatRenderer


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model_folder(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="session")
def renderer(model_folder: Path) -> ChatRenderer:
    return ChatRenderer.from_pretrained(model_folder)
