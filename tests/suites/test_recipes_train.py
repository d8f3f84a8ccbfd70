"""Each suite has a recipe that trains the tiny model on real tasks of it; only addresses are set here."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from counter_server import counting_beside
from suite_pythons import ROOT, VERIFIERS_PYTHON, have

from agent.store.reading import EpisodeFilter, EpisodeReader
from sandboxes.docker import host_image

STEPS = 2
SMALL = [f"learner.steps={STEPS}", "learner.batch_size=4", "learner.tracker=null", "sft.clean_steps=20"]
SMALL += ["evaluation.tasks=1", "runtime.concurrency=4"]


def train(name: str, folder: Path, *words: str, within_s: float = 240) -> str:
    """The recipe, to its end; fails with what it said. Returns what it said."""
    command = [
        sys.executable,
        "-m",
        "learner.train",
        f"recipes/suites/{name}.yaml",
        f"runs_dir={folder}",
        *SMALL,
        *words,
    ]
    done = subprocess.run(
        command, cwd=ROOT, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=within_s, check=False
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    with EpisodeReader(folder / f"suites_{name}" / "episodes.sqlite") as reader:
        rows = reader.list(EpisodeFilter(status="trained", limit=1000))
    assert len(rows) == STEPS * 4
    assert (folder / f"suites_{name}" / "final" / "config.json").exists()
    return done.stdout


@contextlib.contextmanager
def python_tir(folder: Path) -> Iterator[str]:
    """The server that `recipes/suites/openenv.yaml` says to start."""
    port = folder / "port"
    words = ["serve", "sao/PythonTIR-v0", "--kwargs", "recipes/suites/openenv_served.yaml", "--port", "0"]
    process = subprocess.Popen(
        [sys.executable, "-m", "envs.adapters.openenv", *words, "--port-file", str(port)], cwd=ROOT
    )
    try:
        deadline = time.monotonic() + 120
        while not port.exists():
            assert process.poll() is None
            assert time.monotonic() < deadline, "the server did not start"
            time.sleep(0.05)
        yield f"http://127.0.0.1:{port.read_text()}"
    finally:
        process.terminate()
        process.wait(60)


pytestmark = pytest.mark.timeout(300)


@pytest.mark.slow
def test_reasoning_gym_by_its_own_scorer(tmp_path: Path) -> None:
    train("reasoning_gym", tmp_path)


def test_an_openenv_server(tmp_path: Path) -> None:
    with python_tir(tmp_path) as url:
        train("openenv", tmp_path, f"env.kwargs.url={url}")


def test_a_nemo_gym_resource_server(tmp_path: Path) -> None:
    with counting_beside() as url:
        train("nemo_gym", tmp_path, f"env.kwargs.url={url}")


@pytest.mark.docker
@pytest.mark.xdist_group("harbor")
def test_harbor_tasks(tmp_path: Path) -> None:
    host_image.build()
    train("harbor", tmp_path)


@pytest.mark.suites
@pytest.mark.skipif(not have(VERIFIERS_PYTHON), reason="needs `make suites`")
@pytest.mark.timeout(600)
def test_a_verifiers_taskset(tmp_path: Path) -> None:
    train("verifiers", tmp_path, within_s=500)
