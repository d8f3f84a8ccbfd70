"""After a rollback the learner is what it was at that version: policy, critic, moments and counters together."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from learner_tools import build_learner, changed, moments, random_episodes, snapshot

from agent.serve.versions.rollback_note import RollbackNote, write_note
from learner.config import ENDLESS, parse_recipe
from learner.config.reading import RecipeError
from learner.faults import LearnerFault
from learner.run.checkpoint import checkpoints
from learner.run.going_back import heed_rollback, kept_checkpoints
from learner.run.learner import Learner

CHUNKS = [random_episodes(8, seed=seed) for seed in range(4)]


def state(own: Learner) -> dict[str, Any]:
    assert own.critic is not None
    trainees = {"policy": own.policy, "critic": own.critic}
    return {n: (snapshot(t), [m.clone() for m in moments(t)], t.updates) for n, t in trainees.items()}


def is_same(left: dict[str, Any], right: dict[str, Any]) -> bool:
    return all(
        not list(changed(left[n][0], right[n][0]))
        and left[n][2] == right[n][2]
        and all(torch.equal(a, b) for a, b in zip(left[n][1], right[n][1], strict=True))
        for n in left
    )


@pytest.fixture
def line(micro_model: Path, tmp_path: Path) -> Iterator[tuple[Path, dict[int, dict[str, Any]]]]:
    """A run of versions 1 to 4, with a checkpoint of all but version 2; and the learner's state at each."""
    own = build_learner(micro_model, tmp_path, learner={"keep_checkpoints": 9})
    states = {}
    for version, chunk in enumerate(CHUNKS, 1):
        own.step(chunk)
        own.progress.version = version
        states[version] = state(own)
        if version != 2:
            own.save(tmp_path / "checkpoints")
    yield tmp_path, states
    own.release()


def resumed(model: Path, run: Path) -> dict[str, Any]:
    own = build_learner(model, run)
    own.resume(checkpoints(run / "checkpoints")[-1])
    return state(own)


def heeded(run: Path, version: int, served: int) -> str:
    write_note(run, RollbackNote(version, served))
    said: list[str] = []
    heed_rollback(run, said.append)
    heed_rollback(run, said.append)  # the next learner finds no note
    [line] = said
    return line


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.glob("*step_*"))


def test_critic_and_moments_are_those_of_the_version_rolled_back_to(
    micro_model: Path, line: tuple[Path, dict[int, dict[str, Any]]]
) -> None:
    run, states = line
    assert heeded(run, 3, 5).endswith("going on from step_00003")
    assert is_same(resumed(micro_model, run), states[3])
    assert not is_same(states[3], states[4])
    assert names(run / "checkpoints" / "before_rollback_00005") == ["step_00004"]


def test_without_a_checkpoint_of_the_version_the_nearest_before_it_is_taken_and_named(
    micro_model: Path, line: tuple[Path, dict[int, dict[str, Any]]]
) -> None:
    run, states = line
    assert heeded(run, 2, 5).endswith("step_00001, version 1, the nearest before it that has one")
    assert is_same(resumed(micro_model, run), states[1])


def test_going_forward_again_finds_the_checkpoints_that_were_moved(
    micro_model: Path, line: tuple[Path, dict[int, dict[str, Any]]]
) -> None:
    run, states = line
    heeded(run, 1, 5)
    own = build_learner(micro_model, run, learner={"keep_checkpoints": 9})
    own.resume(checkpoints(run / "checkpoints")[-1])
    own.step(CHUNKS[3])
    own.progress.version = 7
    own.save(run / "checkpoints")  # step 2 of another line, whose name was free
    own.release()
    assert heeded(run, 4, 8).endswith("going on from step_00004")
    assert is_same(resumed(micro_model, run), states[4])
    assert names(run / "checkpoints") == ["step_00001", "step_00003", "step_00004"]
    assert names(run / "checkpoints" / "before_rollback_00008") == ["step_00002"]


def test_before_the_first_checkpoint_a_learner_begins_anew_and_says_so(line: tuple[Path, Any]) -> None:
    run, _ = line
    assert "begins anew" in heeded(run, 0, 5)
    assert checkpoints(run / "checkpoints") == []


def test_a_note_that_is_none_is_no_reason_to_guess(tmp_path: Path) -> None:
    (tmp_path / "rollback.json").write_text("{}")
    with pytest.raises(LearnerFault, match="remove it"):
        heed_rollback(tmp_path, print)


def test_every_version_that_may_be_gone_back_to_has_its_checkpoint() -> None:
    assert kept_checkpoints(None, None, 5) == 2, "nobody goes back in a run that serves nobody"
    assert kept_checkpoints(None, 8, 1) == 9
    assert kept_checkpoints(None, 8, 5) == 3
    assert kept_checkpoints(1, 8, 1) == 1, "what a recipe says holds"


def test_what_learns_online_has_no_end_unless_it_is_given_one() -> None:
    def steps(**learner: Any) -> int:
        return parse_recipe({"name": "x", "model": {"path": "m"}, "learner": learner}).learner.steps

    assert (steps(), steps(online=True), steps(online=True, steps=7)) == (60, ENDLESS, 7)
    with pytest.raises(RecipeError, match="policy: a rate that falls"):
        steps(online=True, policy={"lr": 1e-3, "final_lr_ratio": 0.1})
