"""Two environments mixed by weight and several evaluation sets in one run: killed, resumed, and ended by its target."""

from __future__ import annotations

import json
import sqlite3
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from evaluation_tools import write_mixed
from run_tools import last_step, metrics, training

from agent.episode import Episode, decode
from agent.store.rules import draw_environment, epoch_order
from learner.run.checkpoint import checkpoints, load_progress
from learner.run.plots import panels, read_metrics

pytestmark = [pytest.mark.timeout(900), pytest.mark.xdist_group("mixed_run")]
STEPS, TASKS = 40, 64


@dataclass
class Story:
    folder: Path
    killed_at: int = 0
    said: dict[str, str] = field(default_factory=dict)
    lines: dict[str, int] = field(default_factory=dict)

    @property
    def target_at(self) -> int:
        """The step at which the set "late" is evaluated first, which meets the target."""
        return self.killed_at + 2


@pytest.fixture(scope="module")
def story(tmp_path_factory: pytest.TempPathFactory) -> Story:
    base = tmp_path_factory.mktemp("mixed")
    recipe, told = write_mixed(base, steps=STEPS), Story(base / "runs" / "micro")
    with training(str(recipe), output=base / "killed.log") as command:
        command.wait_for(lambda: last_step(told.folder) >= 2, within_s=300)
        command.process.kill()
        command.end(within_s=10)
        assert command.survivors() == []
    told.killed_at = load_progress(checkpoints(told.folder / "checkpoints")[-1]).step
    late = {"name": "late", "tasks": 2, "every": told.target_at}
    words = (
        f"evaluation.sets={json.dumps([{'name': 'often', 'tasks': 2, 'samples': 4, 'every': 1}, late])}",
        f"evaluation.stop_at={json.dumps({'set': 'late', 'metric': 'reward', 'value': 0.0})}",
    )
    for session in ("ended", "again"):
        with training(str(recipe), *words, output=base / f"{session}.log") as command:
            assert command.end(within_s=300) == 0, command.said[-4000:]
            told.said[session] = command.said
            told.lines[session] = len(metrics(told.folder))
    return told


def episodes_of(folder: Path, kind: str) -> list[Episode]:
    with sqlite3.connect(f"file:{folder / 'episodes.sqlite'}?mode=ro", uri=True) as sql:
        return [decode(data) for (data,) in sql.execute("SELECT data FROM episodes WHERE kind = ?", (kind,))]


@pytest.mark.slow
def test_a_killed_run_goes_on_with_the_draws_that_were_next(story: Story) -> None:
    """The stream of tasks over all sessions is a function of the seed: none is left out, none dealt twice."""
    with sqlite3.connect(f"file:{story.folder / 'episodes.sqlite'}?mode=ro", uri=True) as sql:
        dealt = [name for (name,) in sql.execute("SELECT id FROM tickets WHERE kind = 'train' ORDER BY number")]
    places, expected = Counter[str](), list[str]()
    for draw in range(len(dealt)):
        name = ("many", "few")[draw_environment(0, draw, [3.0, 1.0])]
        epoch, position = divmod(places[name], TASKS)
        places[name] += 1
        expected.append(f"{name}.e{epoch}-t{epoch_order(0, epoch, TASKS)[position]}-m0")
    assert dealt == expected
    assert min(places.values()) > 0


def test_each_episode_says_which_environment_it_came_from_and_figures_are_kept_apart(story: Story) -> None:
    episodes = episodes_of(story.folder, "train")
    assert {episode.environment for episode in episodes} == {"many", "few"}
    assert all(episode.id.startswith(episode.environment) for episode in episodes)
    assert max(len(e.actions) for e in episodes if e.environment == "few") <= 3
    records = [r for r in read_metrics(story.folder / "metrics.jsonl") if "rollout/reward" in r]
    shares = [(r.get("rollout/many/share", 0.0), r.get("rollout/few/share", 0.0)) for r in records]
    assert all(many + few == pytest.approx(1) for many, few in shares)
    assert sum(many for many, _ in shares) > sum(few for _, few in shares) > 0
    for key in ("reward", "success", "action_tokens", "turns"):
        assert any(f"rollout/few/{key}" in record for record in records)


def test_sets_have_their_own_cadence_sampling_samples_and_curves(story: Story) -> None:
    records = read_metrics(story.folder / "metrics.jsonl")
    before = [r for r in records if r["step"] < story.killed_at]
    plain = {r["step"] for r in before if "evaluation/plain/success" in r}
    assert plain == {r["step"] for r in before if r["step"] % 2 == 0}
    # SIGKILL may come between the checkpoint of a step and its line.
    assert {r["step"] for r in records if "evaluation/often/pass_at_4" in r} >= set(range(story.killed_at))
    for record in records:
        if "evaluation/often/success" in record:
            success, two, four = (record[f"evaluation/often/{k}"] for k in ("success", "pass_at_2", "pass_at_4"))
            assert success <= two <= four
    evaluated = episodes_of(story.folder, "evaluate")
    assert {e.sampling.temperature for e in evaluated if e.environment == "plain"} == {0.0}
    assert {e.sampling.max_tokens for e in evaluated if e.environment == "plain"} == {20}
    assert {e.sampling.temperature for e in evaluated if e.environment == "often"} == {1.0}
    titles = {title: [name for _, name in lines] for title, lines in panels({key for r in records for key in r})}
    assert titles["Success"][:3] == ["late", "often", "plain"]
    assert titles["Reward, by environment"] == ["few", "many"]
    assert titles["pass@k, held out"] == ["often pass@2", "often pass@4"]
    assert (story.folder / "curves.png").stat().st_size > 0


def test_the_target_ends_the_run_with_a_checkpoint_and_a_model(story: Story) -> None:
    said = story.said["ended"]
    assert f"the run ends at step {story.target_at}" in said
    assert f"{story.target_at} of {STEPS}" in said
    assert "target met" in said
    assert load_progress(checkpoints(story.folder / "checkpoints")[-1]).step == story.target_at
    assert (story.folder / "final" / "config.json").exists()
    with sqlite3.connect(f"file:{story.folder / 'episodes.sqlite'}?mode=ro", uri=True) as sql:
        assert sql.execute("SELECT count(*) FROM claims WHERE status = 'open'").fetchone() == (0,)
    assert list((story.folder / "evaluations").glob("step_*")) == []


def test_the_same_command_again_finds_the_target_met_and_trains_nothing(story: Story) -> None:
    assert f"the run ends at step {story.target_at}" in story.said["again"]
    assert "target met" in story.said["again"]
    assert last_step(story.folder) == story.target_at
    trained = [r for r in metrics(story.folder)[story.lines["ended"] :] if "rollout/reward" in r]
    assert trained == []
