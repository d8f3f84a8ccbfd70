"""Two real processes with half the batch each end with the weights of one process with all of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from learner_tools import changed, snapshot, write_untied_copy
from rank_worker import halves, learner, model_of, trained
from run_tools import run_two_ranks

JOBS = (
    "sao:plain",
    "sao:no_action",
    "sao:all_gated",
    "sao:unequal",
    "ppo:unequal",
    "sao:empty",
    "sao:untied_unequal",
    "sao:untied_no_action",
    "vapo:minibatches",
    "sao_k1:minibatches",
)


@pytest.fixture(scope="module")
def two_ranks(micro_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the two processes left what they trained, all cases in one pair of processes."""
    folder = tmp_path_factory.mktemp("ranks")
    write_untied_copy(micro_model, folder / "untied")
    worker = str(Path(__file__).parents[1] / "rank_worker.py")
    run_two_ranks([worker, str(micro_model), str(folder), *JOBS, "sao:spoiled"], within_s=240)
    return folder


@pytest.mark.timeout(300)
@pytest.mark.parametrize("job", JOBS)
def test_two_ranks_update_as_one_does(two_ranks: Path, micro_model: Path, tmp_path: Path, job: str) -> None:
    """Cases A4 and N2: a rank without a row, without an action token, all gated, with more pieces; tied or not; with
    several updates a batch, where a rank has no row of a minibatch, and with the trusted tokens for denominator."""
    algorithm, case = job.split(":")
    first, second = halves(case)
    own = learner(model_of(case, micro_model, two_ranks), tmp_path, algorithm, 100_000)
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


@pytest.mark.timeout(300)
def test_a_loss_that_is_no_number_on_one_rank_is_discarded_on_all(
    two_ranks: Path, micro_model: Path, tmp_path: Path
) -> None:
    """Case N1: its gradients were numbers, so the global norm alone would have said nothing; the next step is taken."""
    before = snapshot(learner(micro_model, tmp_path, "sao", 60).policy)
    ranks = [torch.load(two_ranks / f"sao_spoiled_{rank}.pt") for rank in range(2)]
    for found in ranks:
        assert not list(changed(found["policy 0"], before))
        assert list(changed(found["policy 1"], before))
    assert not list(changed(ranks[0]["policy 1"], ranks[1]["policy 1"]))
    assert list(changed(ranks[0]["critic 0"], ranks[0]["critic 1"]))


@pytest.mark.timeout(300)
@pytest.mark.parametrize("algorithm", ["sao_running_mean", "agentrl"])
def test_ranks_do_not_each_take_a_mean_of_their_own_share(two_ranks: Path, algorithm: str) -> None:
    """What is standardised over a task, or kept in the order of completion, is of the whole batch."""
    for rank in range(2):
        said = (two_ranks / f"refused_{algorithm}_{rank}").read_text()
        assert algorithm in said
        assert said.endswith("run it in a single process")


@pytest.mark.timeout(300)
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
