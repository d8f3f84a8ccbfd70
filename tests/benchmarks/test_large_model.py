"""A plan is a promise about memory: held against two ranks that hold a model in halves."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.large_model import sizes, write_model
from learner.config import ModelConfig
from learner.model.loading import load_policy_model

ROOT = Path(__file__).resolve().parents[2]


def test_a_model_that_is_written_a_tensor_at_a_time_is_whole(tmp_path: Path) -> None:
    for kind in ("moe", "dense"):
        config = sizes(kind, 1, 256).model_copy(update={"vocab_size": 320})
        write_model(tmp_path / kind, config)
        model = load_policy_model(tmp_path / kind, ModelConfig(path=tmp_path / kind))
        for name, weight in model.state_dict().items():
            wanted = 0.0 if weight.dim() == 1 else config.init_std
            assert float(weight.std()) == pytest.approx(wanted, rel=0.1), name
            assert float(weight.mean()) == pytest.approx(1.0 if weight.dim() == 1 else 0.0, abs=0.01), name


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_memory_is_what_the_plan_says_and_nothing_is_lost_between_two_runs(tmp_path: Path) -> None:
    """Two halves of 38 million parameters: refused as whole copies, trained, resumed, published."""
    words = ["--layers", "2", "--hidden", "768", "--memory-gib", "4.6", "--folder", str(tmp_path)]
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.large_model", *words, "--json", str(tmp_path / "figures.json")],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=1700,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads((tmp_path / "figures.json").read_text())
    assert "each of 2 processes on the CPU needs" in found["refused"]
    assert found["same"] == [True, True]
    parity = found["first"][0]["parity"]
    assert parity["after"]["mean"] < 0.1 * parity["before"]["mean"]
    assert parity["after"]["version"] == 1
    peak = found["rows"][-1]
    assert peak["phase"] == "the run's peak"
    assert abs(peak["off"]) < 0.15, found["rows"]
