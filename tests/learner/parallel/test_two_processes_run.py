"""A whole run on two ranks, launched as people launch it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from run_tools import ROOT, last_step, training, write_run

from learner.run.checkpoint import checkpoints, load_progress
from learner.run.plots import read_metrics

LAUNCHER = ("-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2", "-m", "learner.train")


@pytest.mark.timeout(300)
def test_two_ranks_share_one_run_and_one_set_of_services(tmp_path: Path) -> None:
    """Ranks that each took the run's lock, the claims or the engine's port would refuse or train everything twice."""
    recipe = write_run(tmp_path, steps=3)
    done = subprocess.run(
        [sys.executable, *LAUNCHER, str(recipe)],
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


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_rank_that_is_killed_in_mid_run_ends_the_run_and_the_same_command_goes_on(tmp_path: Path) -> None:
    """Case N3: far within the ten minutes of a collective; no service is left, and the run's lock is free."""
    recipe, run, output = write_run(tmp_path, steps=40), tmp_path / "runs" / "micro", tmp_path / "out"
    with training(str(recipe), output=output, program=LAUNCHER) as command:
        command.wait_for(lambda: last_step(run) >= 2, within_s=280)
        other = [p for p in command.descendants if p.is_running() and p.environ().get("RANK") == "1"]
        next(p for p in other if "learner.train" in p.cmdline()).kill()
        assert command.end(within_s=90) != 0
        assert not command.survivors()
        assert "rank 1 is gone" in command.said
    done = last_step(run)
    with training(str(recipe), f"learner.steps={done + 1}", output=output, program=LAUNCHER) as command:
        assert command.end(within_s=200) == 0, command.said[-3000:]
    assert load_progress(checkpoints(run / "checkpoints")[-1]).step == done + 1
