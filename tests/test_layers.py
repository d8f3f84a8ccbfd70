"""Imports go downwards only, and what runs without torch does not import it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


def run(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)


def test_imports_go_downwards_only() -> None:
    """The contract of pyproject.toml: learner > agent > envs > sandboxes."""
    command = Path(sys.executable).with_name("lint-imports")
    done = run(str(command), "--no-cache")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "1 kept, 0 broken" in done.stdout


@pytest.mark.parametrize(
    "modules",
    [
        "sandboxes",
        "envs, envs.python_tir.env",
        "agent, agent.episode, agent.runtime, agent.rollout, agent.chat",
        "agent.store.server, agent.store.client, agent.engines.client, agent.engines.launch",
    ],
)
def test_everything_below_the_learner_works_without_torch(modules: str) -> None:
    """In a process where torch and transformers cannot be imported at all."""
    code = (
        "import sys\n"
        "for name in ('torch', 'transformers', 'accelerate'): sys.modules[name] = None\n"
        f"import {modules}\n"
        "above = [m for m in sys.modules if m.split('.')[0] == 'learner']\n"
        "assert not above, above\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr


def test_the_learner_does_import_torch() -> None:
    """The test above can fail: with torch blocked the learner does not import."""
    code = "import sys; sys.modules['torch'] = None\nimport learner.sao"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60, check=False
    )
    assert "ModuleNotFoundError" in done.stderr
