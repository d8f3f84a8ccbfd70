"""A whole run on two ranks, launched as people launch it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from run_tools import ROOT, write_run

from learner.checkpoint import checkpoints, load_progress
from learner.plots import read_metrics


@pytest.mark.timeout(300)
def test_two_ranks_share_one_run_and_one_set_of_services(tmp_path: Path) -> None:
    """Ranks that each took the run's lock, the claims or the engine's port would refuse or train everything twice."""
    recipe = write_run(tmp_path, steps=3)
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    done = subprocess.run(
        [*launch, "-m", "learner.train", str(recipe)],
        capture_output=True,
        text=True,
        timeout=240,
        cwd=ROOT,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.count("policy updates") == 1  # one rank speaks for all
    run = tmp_path / "runs" / "micro"
    progress = load_progress(checkpoints(run / "checkpoints")[-1])
    assert (progress.step, progress.episodes) == (3, 24)
    assert [record["step"] for record in read_metrics(run / "metrics.jsonl")] == [0, 1, 2, 3]
    assert (run / "final" / "model.safetensors").exists()
