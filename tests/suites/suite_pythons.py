"""The other environments of `make suites`: whether they are there, or must be."""

from __future__ import annotations

import os
from pathlib import Path

ROOT = Path(__file__).parents[2]
VERIFIERS_PYTHON = ROOT / ".venv-verifiers" / "bin" / "python"
CLIENTS_PYTHON = ROOT / ".venv-clients" / "bin" / "python"
OPENENV_PYTHON = ROOT / ".venv-openenv" / "bin" / "python"


def have(python: Path) -> bool:
    """Whether tests with the library there are run: where it is, and where it is required, to fail without it."""
    return python.exists() or os.environ.get("SAO_REQUIRE_SUITES") == "1"
