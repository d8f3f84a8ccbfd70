"""The page's forty lines and the example package as a stranger has them: the wheel, an empty folder, no checkout."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest
from page_blocks import write_blocks

ROOT = Path(__file__).parents[2]
SMALL = [
    "sft.clean_steps=30",
    "learner.steps=3",
    "learner.batch_size=16",
    "learner.evaluate_every=1000",
    "learner.tracker=null",
    "evaluation.tasks=8",
    "runtime.concurrency=16",
    "value_pretraining=null",
]

pytestmark = pytest.mark.timeout(600)


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An interpreter of its own with this project's wheel; its dependencies are those that are installed here.

    Their folder stands behind its own on the path, and as a plain folder: what an editable install has left there
    (the checkout, for one) is not followed.
    """
    place = tmp_path_factory.mktemp("installed")
    pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]
    build = ["wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", str(place), str(ROOT)]
    subprocess.run([*pip, *build], check=True, timeout=200)
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(place / "venv")], check=True, timeout=100)
    own = place / "venv" / "bin" / "python"
    (wheel,) = place.glob("sao_agents-*.whl")
    subprocess.run([*pip, "--python", str(own), "install", "--no-deps", str(wheel)], check=True, timeout=200)
    (packages,) = (place / "venv" / "lib").glob("python*/site-packages")
    (packages / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return own


def run(python: Path, *words: str, folder: Path) -> str:
    """A command in `folder`; what it said. Nothing of the checkout is on its path."""
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        [str(python), *words],
        cwd=folder,
        env={**env, "OMP_NUM_THREADS": "1", "COLUMNS": "200"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=400,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-6000:]
    return done.stdout


def trained(folder: Path) -> list[dict[str, float]]:
    """The figures of the steps that a run has made."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [line for line in lines if "rollout/reward" in line]


def test_forty_lines_are_trained_from_an_empty_folder(python: Path, tmp_path: Path) -> None:
    where = run(python, "-c", "import envs, agent, learner; print(envs.__file__)", folder=tmp_path)
    assert str(python.parents[1]) in where
    write_blocks(tmp_path)
    (tmp_path / "traces.py").write_text((tmp_path / "traces.py").read_text().replace("count=3000", "count=300"))
    run(python, "traces.py", folder=tmp_path)
    run(python, "-m", "learner.train", "hidden_tiny.yaml", *SMALL, folder=tmp_path)
    assert len(trained(tmp_path / "runs" / "hidden_tiny")) == 3
    episodes = run(python, "-m", "agent.inspect", "runs/hidden_tiny", folder=tmp_path)
    assert "hidden-" in episodes


@pytest.mark.slow
def test_the_example_package_is_trained_by_its_name(python: Path, tmp_path: Path) -> None:
    copy = tmp_path / "codeword"
    shutil.copytree(ROOT / "examples" / "codeword", copy)
    pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check", "--python", str(python)]
    subprocess.run([*pip, "install", "--no-deps", "--no-build-isolation", str(copy)], check=True, timeout=200)
    lines = run(python, "codeword.py", "300", folder=copy)
    (tmp_path / "traces.jsonl").write_text(lines)
    shutil.copy(copy / "codeword.yaml", tmp_path)
    run(python, "-m", "learner.train", "codeword.yaml", *SMALL, folder=tmp_path)
    assert len(trained(tmp_path / "runs" / "codeword")) == 3
