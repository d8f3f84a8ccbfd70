from __future__ import annotations

from pathlib import Path

import pytest
import torch
from learner_tools import write_micro_model

torch.set_num_threads(1)


@pytest.fixture(scope="session")
def micro_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random micro Qwen3-MoE, as a model folder."""
    return write_micro_model(tmp_path_factory.mktemp("model") / "moe")


@pytest.fixture(scope="session")
def dense_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random micro dense Qwen3, as a model folder."""
    return write_micro_model(tmp_path_factory.mktemp("model") / "dense", experts=0)
