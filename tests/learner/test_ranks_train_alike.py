"""Two real processes with half the batch each end with the weights of one process with all of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from rank_worker import halves, learner, trained
from run_tools import run_two_ranks

JOBS = ("sao:plain", "sao:no_action", "sao:all_gated", "sao:unequal", "ppo:unequal")


@pytest.fixture(scope="module")
def two_ranks(micro_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the two processes left what they trained, all cases in one pair of processes."""
    folder = tmp_path_factory.mktemp("ranks")
    run_two_ranks([str(Path(__file__).with_name("rank_worker.py")), str(micro_model), str(folder), *JOBS], within_s=100)
    return folder


@pytest.mark.timeout(180)
@pytest.mark.parametrize("job", JOBS)
def test_two_ranks_update_as_one_does(two_ranks: Path, micro_model: Path, tmp_path: Path, job: str) -> None:
    """Case A4: with a rank that has no action token, one that is all gated, and unequal numbers of micro-batches."""
    algorithm, case = job.split(":")
    first, second = halves(case)
    own = learner(micro_model, tmp_path, algorithm, 100_000)
    whole = trained(own, [*first, *second])
    ranks = [torch.load(two_ranks / f"{algorithm}_{case}_{rank}.pt") for rank in range(2)]
    for step in range(2):
        for name in (f"policy {step}", f"critic {step}"):
            for key, weight in whole[name].items():
                assert torch.equal(ranks[0][name][key], ranks[1][name][key]), (name, key)
                torch.testing.assert_close(ranks[0][name][key], weight, atol=3e-6, rtol=1e-4, msg=f"{name} {key}")
        close_figures(ranks, whole[f"figures {step}"], step)
    moved = [(whole["policy 1"][k] - whole["policy 0"][k]).abs().max() for k in whole["policy 0"]]
    assert max(moved) > 1e-4  # far above the tolerance


@pytest.mark.timeout(180)
@pytest.mark.parametrize("algorithm", ["sao_running_mean", "agentrl"])
def test_ranks_do_not_each_take_a_mean_of_their_own_share(two_ranks: Path, algorithm: str) -> None:
    """What is standardised over a task, or kept in the order of completion, is of the whole batch."""
    for rank in range(2):
        said = (two_ranks / f"refused_{algorithm}_{rank}").read_text()
        assert algorithm in said
        assert said.endswith("run it in a single process")


@pytest.mark.timeout(180)
def test_a_batch_of_fewer_prompts_than_ranks_is_refused_before_anything_starts(two_ranks: Path) -> None:
    """It was a traceback after the first batch, on every rank, and again after each restart."""
    for rank in range(2):
        said = (two_ranks / f"refused_batch_{rank}").read_text()
        assert said.startswith("learner.batch_size 8 is 1 prompts of 'grpo', which cannot be dealt to 2 processes")


def close_figures(ranks: list[dict[str, Any]], whole: dict[str, float], step: int) -> None:
    """Every figure that is of the global batch agrees on both ranks; ratio quantiles are each rank's own."""
    for name, figure in whole.items():
        if name.startswith("ratio/"):
            continue
        for found in ranks:
            assert found[f"figures {step}"][name] == pytest.approx(figure, rel=2e-3, abs=1e-4, nan_ok=True), name
