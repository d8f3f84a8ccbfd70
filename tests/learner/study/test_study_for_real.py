"""A study from nothing: cold start, critic, runs of two arms, CSVs and page, by the command that a person types."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from learner.study.record import read_record

SMALL = [
    "sft.clean_traces=120",
    "sft.imperfect_traces=40",
    "sft.clean_steps=4",
    "sft.imperfect_steps=2",
    "sft.batch_size=8",
    "value_pretraining.episodes=16",
    "value_pretraining.held_out_episodes=8",
    "value_pretraining.steps=2",
    "value_pretraining.batch_size=8",
    "learner.batch_size=8",
    "learner.evaluate_every=2",
    "evaluation.tasks=8",
    "runtime.concurrency=8",
    "engine.max_sequences=8",
    "store.forced_lag=1",
    "store.max_lag=3",
]


@pytest.mark.slow  # three starts of a run's processes
@pytest.mark.timeout(400)
def test_the_command_leaves_a_csv_a_run_and_a_page(tmp_path: Path) -> None:
    words = ["main", "--arms", "sao,flash_reinforce", "--updates", "3", "--results", str(tmp_path / "results")]
    command = [sys.executable, "-m", "learner.study", *words, "--runs", str(tmp_path / "runs"), *SMALL]
    done = subprocess.run(command, capture_output=True, text=True, timeout=380, check=False)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    page = (tmp_path / "results" / "main.md").read_text()
    for arm, has_critic in (("sao", True), ("flash_reinforce", False)):
        record = read_record(tmp_path / "results" / "main" / f"{arm}-seed0.csv")
        assert [step for step, _ in record.column("reward")] == [1, 2, 3]
        assert [step for step, _ in record.column("held_out")] == [0, 2, 3]
        assert bool(record.column("critic_experts")) == has_critic
        lags = [lag for _, lag in record.column("lag")]
        assert lags[0] == 0
        assert lags[-1] >= 1
    assert "FlashREINFORCE | 1 |" in page
    assert "Not run yet" in page
