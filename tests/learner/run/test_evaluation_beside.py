"""Evaluation beside training: the learner does not wait, and what a kill cuts off is done by the next session."""

from __future__ import annotations

import sqlite3
from pathlib import Path
from typing import Any

import pytest
from run_tools import last_step, metrics, training, write_run

from learner.run.evaluation.rounds import Round, Rounds, copy_snapshot
from learner.run.plots import read_metrics

pytestmark = pytest.mark.timeout(900)
WORDS = ("value_pretraining=null", "evaluation.tasks=8", "store.max_lag=1")


def rows(folder: Path, query: str) -> list[tuple[Any, ...]]:
    with sqlite3.connect(f"file:{folder / 'episodes.sqlite'}?mode=ro", uri=True) as sql:
        return sql.execute(query).fetchall()


def evaluated(folder: Path) -> list[int]:
    return [record["step"] for record in metrics(folder) if "evaluation/success" in record]


@pytest.mark.slow
def test_training_goes_on_beside_it_and_a_killed_one_is_finished_by_the_next_session(tmp_path: Path) -> None:
    """On an engine of its own. 8 times as many episodes are evaluated as a step trains, so steps come first."""
    recipe, folder = write_run(tmp_path, steps=6), tmp_path / "runs" / "micro"
    words = (*WORDS, "evaluation.engines=1", "evaluation.samples=8")
    with training(str(recipe), *words, output=tmp_path / "killed.log") as command:
        command.wait_for(lambda: last_step(folder) >= 2, within_s=420)
        assert evaluated(folder) == []
        [(begun,)] = rows(folder, "SELECT count(*) FROM evaluations")
        assert begun == 1
        command.process.kill()
        command.end(within_s=10)
        assert command.survivors() == []
    [done] = rows(folder, "SELECT count(*) FROM episodes WHERE kind = 'evaluate'")
    with training(str(recipe), *words, output=tmp_path / "resumed.log") as command:
        assert command.end(within_s=420) == 0, command.said[-4000:]
        assert command.survivors() == []
        assert "going on with the evaluation of step 0" in command.said
    assert evaluated(folder) == [0, 6]
    order = [record["step"] for record in metrics(folder)]
    assert order.index(0) > order.index(2)  # the point stands at the step whose weights were evaluated
    versions = rows(
        folder,
        "SELECT v.version, count(*), min(e.oldest_version = v.version AND e.newest_version = v.version) "
        "FROM episodes e JOIN evaluations v ON v.id = e.evaluation GROUP BY v.id ORDER BY v.version",
    )
    assert [(count, pinned) for _, count, pinned in versions] == [(64, 1), (64, 1)]
    assert versions[0][0] == 0  # one evaluation over both sessions, of weights that training had left behind
    assert done[0] < 64
    assert not list((folder / "evaluations").glob("step_*"))
    final = read_metrics(folder / "metrics.jsonl")[-1]
    assert (final["step"], "rollout/reward" in final) == (6, True)


@pytest.mark.slow
def test_on_the_engines_of_training_the_result_says_of_which_versions_it_is(tmp_path: Path) -> None:
    recipe, folder = write_run(tmp_path, steps=6), tmp_path / "runs" / "micro"
    words = (*WORDS, "evaluation.share=0.25", "evaluation.samples=8")
    with training(str(recipe), *words, output=tmp_path / "run.log") as command:
        assert command.end(within_s=420) == 0, command.said[-4000:]
        assert command.survivors() == []
        assert "tokens of versions 0 to" in command.said
    records = read_metrics(folder / "metrics.jsonl")
    assert records[0]["evaluation/version_min"] == 0
    assert records[0]["evaluation/version_max"] > 0
    assert 0 < records[0]["evaluation/version_share"] < 1
    assert records[-1]["evaluation/version_share"] == 1  # at the end nothing moves any more


def test_a_round_that_was_never_whole_is_none_and_weights_outlive_the_snapshot(tmp_path: Path) -> None:
    rounds = Rounds(tmp_path / "evaluations")
    snapshot = tmp_path / "v3"
    snapshot.mkdir()
    (snapshot / "model.safetensors").write_bytes(b"weights")
    copy_snapshot(snapshot, rounds.weights(4))
    assert rounds.read() == []
    opened = Round(4, 3, "step 4", {"": {"tasks": 8}})
    rounds.save(opened)
    (snapshot / "model.safetensors").unlink()
    assert (rounds.weights(4) / "model.safetensors").read_bytes() == b"weights"
    assert rounds.read() == [opened]
    (tmp_path / "evaluations" / "step_00005").mkdir()
    (tmp_path / "evaluations" / "step_00005" / "round.json").write_text('{"step": 5')
    assert rounds.read() == [opened]
    rounds.close(4)
    rounds.sweep(keep=4)
    assert rounds.weights(4).exists()
    rounds.sweep()
    assert not rounds.weights(4).exists()
    assert rounds.read() == []
