"""Imports go downwards only, and what runs without torch does not import it."""

from __future__ import annotations

import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


def run(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)


def linted(config: Path) -> subprocess.CompletedProcess[str]:
    return run(str(Path(sys.executable).with_name("lint-imports")), "--no-cache", str(config))


def test_imports_go_downwards_only_and_in_no_circle() -> None:
    """The contracts of pyproject.toml: floors, the rooms of learner and agent, and no circle in any folder."""
    done = linted(ROOT / "pyproject.toml")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "4 kept, 0 broken" in done.stdout


def test_an_import_for_types_alone_that_goes_upwards_is_a_circle(tmp_path: Path) -> None:
    """The contract against circles can fail, and does so for what only a type checker imports."""
    package = tmp_path / "circle"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "above.py").write_text("import circle.below\n")
    (package / "below.py").write_text(
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from circle.above import Thing\n"
    )
    config = tmp_path / "linter.toml"
    contract = next(
        contract
        for contract in tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
        if contract["type"] == "acyclic_siblings"
    )
    lines = [f'{key} = "{value}"' for key, value in contract.items() if key != "ancestors"]
    contract_text = "\n".join(["[[tool.importlinter.contracts]]", *lines, 'ancestors = ["circle"]'])
    config.write_text(f'[tool.importlinter]\nroot_package = "circle"\n{contract_text}\n')
    done = subprocess.run(
        [str(Path(sys.executable).with_name("lint-imports")), "--no-cache", str(config)],
        cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(tmp_path)}, capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert done.returncode == 1, done.stdout + done.stderr
    assert "No cycles are allowed in circle" in done.stdout


def sources(*folders: str) -> list[Path]:
    return [path for folder in folders for path in (ROOT / folder).rglob("*.py")]


def test_no_file_grows_past_what_one_reading_holds() -> None:
    longest = {
        str(path.relative_to(ROOT)): lines
        for path in sources("learner", "agent", "envs", "sandboxes", "benchmarks", "tests", "docs")
        if (lines := len(path.read_text(encoding="utf-8").splitlines())) > 450
    }
    assert not longest, f"over 450 lines; cut each along what it does: {longest}"


@pytest.mark.parametrize("package", ["learner", "agent"])
def test_a_packages_own_shelf_holds_few_files(package: str) -> None:
    """What belongs together has a room; the shelf is for what a reader should see first."""
    shelf = sorted(path.name for path in (ROOT / package).glob("*.py"))
    assert len(shelf) <= 14, shelf


@pytest.mark.parametrize(
    "modules",
    [
        "sandboxes",
        "envs, envs.python_tir.env",
        "agent.episode, agent.runtime.runtime, agent.runtime.rollout, agent.chat.renderer",
        "agent.store.server, agent.store.client, agent.engines.client",
        "agent.evaluate.__main__",
        "agent.engines.local.launch, agent.engines.vllm.launch, agent.engines.pool",
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
