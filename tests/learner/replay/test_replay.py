"""An update that went wrong can be made again alone, from what the run kept, with the figures that it had."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from learner_tools import build_learner, random_episodes

from agent import episode as records
from agent.store.protocol import Claim
from learner.config import RecipeError, load_recipe, save_recipe
from learner.replay.__main__ import beginning, main
from learner.replay.figures import compare
from learner.run.folder import append_metrics
from learner.run.metrics import step_figures
from learner.run.recording import first_needed, forget_after, read, record, recorded

EVERY, KEEP, STEPS = 2, 3, 5
SETTINGS = {"checkpoint_every": EVERY, "keep_checkpoints": 3, "record_batches": KEEP, "entropy_every": 2}


@pytest.fixture(scope="module")
def run(micro_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder that a run of some updates leaves, its steps made and reported as the loop does."""
    base = tmp_path_factory.mktemp("replay")
    own = build_learner(micro_model, base, learner=SETTINGS, model={"path": str(micro_model)})
    folder = own.recipe.run_dir
    folder.mkdir()
    save_recipe(own.recipe, folder / "recipe.yaml")
    for step in range(1, STEPS + 1):
        episodes = random_episodes(8, seed=step)
        version = own.progress.version
        record(folder, step, version, list(map(records.encode, episodes)), keep=KEEP, checkpoint_every=EVERY)
        batch, result = own.step(episodes)
        torch.rand(1)  # something that draws between two updates
        own.progress.version += 1
        if step % EVERY == 0:
            own.save(folder / "checkpoints")
        append_metrics(folder, step, step_figures(Claim("", [], []), episodes, batch, result, version))
    return folder


@pytest.mark.parametrize("update", [3, 4, 5])
def test_an_update_gives_its_figures_to_the_last_bit(
    run: Path, update: int, capsys: pytest.CaptureFixture[str]
) -> None:
    """Right behind a checkpoint, and with another update in between."""
    assert main([str(run), "--update", str(update)]) == 0
    said = capsys.readouterr().out
    assert "policy/gradient_norm" in said
    assert "lag/mean" in said
    assert "each as it was logged, to the last bit" in said, said


def test_a_change_shows_and_a_profile_is_left(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(run), "--update", "5", "--profile", "learner.eps_high=0.001"]) == 0
    said = capsys.readouterr().out
    assert "the largest relative difference is" in said, said
    assert (run / "profile" / "replay_00005_rank_0.json.gz").exists()


def test_another_outcome_than_was_logged_is_an_error(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines = (run / "metrics.jsonl").read_text()
    try:
        append_metrics(run, 5, {"policy/gradient_norm": 123.0})
        assert main([str(run)]) == 1
        assert "(policy/gradient_norm)" in capsys.readouterr().out
    finally:
        (run / "metrics.jsonl").write_text(lines)


def test_what_was_not_kept_is_said(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(run), "--update", "1"]) == 1
    assert "has not kept the batch of update 1, but those of 3, 4, 5" in " ".join(capsys.readouterr().err.split())
    assert main([str(tmp_path)]) == 1
    assert "it has no recipe.yaml" in " ".join(capsys.readouterr().err.split())
    save_recipe(load_recipe(run / "recipe.yaml"), tmp_path / "recipe.yaml")
    assert main([str(tmp_path)]) == 1
    assert "has kept no batches: train with learner.record_batches=N" in " ".join(capsys.readouterr().err.split())


def test_what_a_lost_session_recorded_is_not_taken_for_this_one(tmp_path: Path) -> None:
    """It went on from step 2, so what the session before had recorded as steps 3 and 4 never was."""
    for step in range(1, 5):
        record(tmp_path, step, step, [], keep=10, checkpoint_every=1)
    forget_after(tmp_path, 2)
    assert list(recorded(tmp_path)) == [1, 2]
    assert (read(recorded(tmp_path)[1]).weights, read(recorded(tmp_path)[2]).weights) == (
        "start",
        "checkpoints/step_00001",
    )


@given(step=st.integers(1, 60), keep=st.integers(1, 9), every=st.integers(1, 7))
def test_every_one_of_the_last_updates_can_be_made_from_some_checkpoint(step: int, keep: int, every: int) -> None:
    """With as many checkpoints kept as the recipe demands."""
    held = -(-keep // every) + 1
    saved = [s for s in range(1, step + 1) if s % every == 0][-held:]
    batches = range(first_needed(step, keep=keep, checkpoint_every=every), step + 1)
    for update in range(max(step - keep + 1, 1), step + 1):
        assert beginning(update, batches, saved) is not None


def test_a_state_behind_which_a_batch_is_missing_is_no_beginning() -> None:
    assert beginning(5, [4, 5], [2, 3]) == 3
    assert beginning(5, [3, 5], [2]) is None
    assert beginning(2, [1, 2], []) == 0
    assert beginning(5, [4, 5], [5]) is None


def test_undefined_figures_are_equal_and_one_sided_ones_are_not() -> None:
    rows = compare({"a": None, "b": 1.0, "c": None}, {"a": float("nan"), "b": 1.0, "c": 2.0, "d": 3.0})
    assert [(row.name, row.difference) for row in rows[:3]] == [("a", 0.0), ("b", 0.0), ("c", float("inf"))]
    assert not rows[3].is_logged


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["learner.record_batches=2"], "keep_checkpoints 2 lets only the last 1 updates be made again"),
        (
            ["learner.record_batches=1", "learner.checkpoint_every=2", "learner.held_out_probe={}"],
            "record_batches with held_out_probe needs checkpoint_every 1",
        ),
    ],
)
def test_batches_that_could_not_be_replayed_are_refused(words: list[str], named: str) -> None:
    with pytest.raises(RecipeError, match=named):
        load_recipe(None, words)
