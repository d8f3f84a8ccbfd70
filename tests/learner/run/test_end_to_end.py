"""`python -m learner.train` as people meet it: from nothing to a trained model, killed, interrupted and resumed."""

from __future__ import annotations

import os
import shutil
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from hub_server import FakeHub, fake_hub
from run_tools import CHILDREN, ROOT, last_step, metrics, training, write_run

from learner.run.checkpoint import checkpoints, load_progress
from learner.run.plots import read_metrics

# One worker runs all of them: they share one run.
pytestmark = [pytest.mark.timeout(400), pytest.mark.xdist_group("end_to_end")]
STEPS, BATCH = 24, 8
TOKEN = "hf_of_the_end_to_end_run"

PROMISED = {
    "reward and success": ("rollout/reward", "rollout/success"),
    "lengths and turns": ("rollout/action_tokens", "rollout/action_tokens_p99", "rollout/turns"),
    "explained variance": ("critic/explained_variance",),
    "gradient norms of both": ("policy/gradient_norm", "critic/gradient_norm"),
    "gated share low and high": ("gate/low_share", "gate/high_share"),
    "ratio quantiles": ("ratio/value_p1", "ratio/value_p50", "ratio/value_p99"),
    "lag by token": ("lag/min", "lag/mean", "lag/max", "lag/stale_share", "lag/turn_0"),
    "issued against consumed": (
        "queue/issued_tokens_mean",
        "queue/consumed_tokens_mean",
        "queue/issued_latency_s_mean",
        "queue/consumed_latency_s_mean",
    ),
    "truncations": ("rollout/truncated",),
    "faults": ("count/retried", "count/given_up"),
    "tokens/s": ("engine/tokens_per_s", "speed/tokens_per_s"),
    "idle shares": ("time/learner_idle", "engine/idle"),
}


@dataclass
class Story:
    """What happened to the shared run: killed, resumed and interrupted, resumed to the end."""

    folder: Path
    recipe: Path
    killed_at: int = 0
    interrupted_at: int = 0
    interrupt_code: int | None = None
    interrupt_s: float = 0.0
    end_code: int | None = None
    left: dict[str, list[str]] = field(default_factory=dict)
    children: dict[str, set[str]] = field(default_factory=dict)
    said: dict[str, str] = field(default_factory=dict)


@pytest.fixture(scope="session")
def hub() -> Iterator[FakeHub]:
    """Where the run is to push its model; known to commands by their environment."""
    with pytest.MonkeyPatch.context() as patch, fake_hub() as server:
        patch.setenv("HF_ENDPOINT", server.url)
        patch.setenv("HF_TOKEN", TOKEN)
        yield server


@pytest.fixture(scope="session")
def story(tmp_path_factory: pytest.TempPathFactory, hub: FakeHub) -> Story:
    base = tmp_path_factory.mktemp("end_to_end")
    kept = {"repo": "somebody/micro", "every": 20}
    recipe = write_run(base, steps=STEPS, learner={"record_batches": 1}, hub=kept)
    folder = base / "runs" / "micro"
    told = Story(folder, recipe)
    with training(str(recipe), output=base / "killed.log") as command:
        command.wait_for(lambda: last_step(folder) >= 2, within_s=180)
        told.children["killed"] = command.words()
        command.process.send_signal(signal.SIGKILL)
        command.end(within_s=10)
        told.left["killed"] = command.survivors()
    told.killed_at = load_progress(checkpoints(folder / "checkpoints")[-1]).step
    with training(str(recipe), output=base / "interrupted.log") as command:
        command.wait_for(lambda: last_step(folder) >= told.killed_at + 2, within_s=120)
        command.process.send_signal(signal.SIGINT)
        started = time.monotonic()
        told.interrupt_code = command.end(within_s=60)
        told.interrupt_s = time.monotonic() - started
        told.left["interrupted"] = command.survivors(within_s=10.0)
        told.said["interrupted"] = command.said
    told.interrupted_at = load_progress(checkpoints(folder / "checkpoints")[-1]).step
    with training(str(recipe), output=base / "finished.log") as command:
        command.wait_for(lambda: last_step(folder) > told.interrupted_at, within_s=120)
        told.end_code = command.end(within_s=120)
        told.left["finished"] = command.survivors(within_s=10.0)
        told.said["finished"] = command.said
    return told


def rows(folder: Path, query: str) -> list[tuple[Any, ...]]:
    with sqlite3.connect(f"file:{folder / 'episodes.sqlite'}?mode=ro", uri=True) as sql:
        return sql.execute(query).fetchall()


def test_a_killed_learner_leaves_no_engine_runtime_store_or_sandbox(story: Story) -> None:
    """Case D8, by SIGKILL in the middle of training."""
    for module in CHILDREN:
        assert module in story.children["killed"]
    assert story.left["killed"] == []


def test_an_interrupted_learner_stops_cleanly_and_leaves_no_child(story: Story) -> None:
    assert story.interrupt_code in (0, 130), story.said["interrupted"][-3000:]
    assert story.left["interrupted"] == []
    assert "Traceback" not in story.said["interrupted"]
    assert story.killed_at + 2 <= story.interrupted_at < STEPS
    assert story.interrupt_s < 30


def test_the_same_command_goes_on_to_the_end(story: Story) -> None:
    """Case D3."""
    assert story.end_code == 0, story.said["finished"][-3000:]
    assert story.left["finished"] == []
    assert f"going on from {story.folder / 'checkpoints'}" in story.said["finished"].replace("\n", "")
    progress = load_progress(checkpoints(story.folder / "checkpoints")[-1])
    assert (progress.step, progress.episodes) == (STEPS, STEPS * BATCH)


def test_nothing_trained_is_trained_twice_and_nothing_is_left_open(story: Story) -> None:
    """Case D3: over a SIGKILL and an interrupt, every trained episode is in exactly one committed claim."""
    committed = rows(
        story.folder,
        "SELECT e.id, e.status, COUNT(*) FROM claim_members m JOIN claims c ON c.id = m.claim "
        "JOIN episodes e ON e.id = m.episode WHERE c.status = 'committed' GROUP BY e.id",
    )
    assert len(committed) == STEPS * BATCH
    assert {(status, count) for _, status, count in committed} == {("trained", 1)}
    assert rows(story.folder, "SELECT COUNT(*) FROM episodes WHERE status = 'trained'") == [(STEPS * BATCH,)]
    assert rows(story.folder, "SELECT status, COUNT(*) FROM claims WHERE status != 'released' GROUP BY status") == [
        ("committed", STEPS)
    ]


def test_evaluation_episodes_never_enter_training_and_are_of_one_version(story: Story) -> None:
    """Case D7."""
    assert rows(story.folder, "SELECT COUNT(*) FROM episodes WHERE kind = 'evaluate' AND status != 'evaluation'") == [
        (0,)
    ]
    assert rows(
        story.folder,
        "SELECT COUNT(*) FROM claim_members m JOIN episodes e ON e.id = m.episode WHERE e.kind != 'train'",
    ) == [(0,)]
    evaluated = rows(
        story.folder,
        "SELECT COUNT(*), MIN(e.oldest_version = v.version AND e.newest_version = v.version) "
        "FROM episodes e JOIN evaluations v ON v.id = e.evaluation",
    )
    [(count, pinned)] = evaluated
    assert count >= 2 * 8
    assert pinned == 1


def test_a_run_leaves_curves_a_model_checkpoints_and_episodes(story: Story) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    assert (story.folder / "curves.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    assert AutoModelForCausalLM.from_pretrained(story.folder / "final").config.hidden_size == 32
    assert AutoTokenizer.from_pretrained(story.folder / "final").chat_template
    assert len(checkpoints(story.folder / "checkpoints")) == 2
    assert (story.folder / "recipe.yaml").exists()
    assert (story.folder / "value" / "figures.json").exists()


def test_the_last_update_gives_its_figures_once_more_alone(story: Story) -> None:
    """Without engine, store and runtime, in a process of its own; and nothing of the run is changed by it."""
    before = {path: path.stat().st_mtime_ns for path in story.folder.rglob("*") if path.is_file()}
    done = subprocess.run(
        [sys.executable, "-m", "learner.replay", str(story.folder)],
        cwd=ROOT, capture_output=True, text=True, timeout=120, env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"update {STEPS}" in done.stdout
    assert "each as it was logged, to the last bit" in done.stdout, done.stdout
    assert {path: path.stat().st_mtime_ns for path in story.folder.rglob("*") if path.is_file()} == before


def test_the_hub_got_the_trained_model_and_the_folder_no_token(story: Story, hub: FakeHub) -> None:
    """And the one of step 20 while training went on."""
    assert hub.commits == ["micro, step 20", f"micro, step {STEPS}"], story.said["finished"][-3000:]
    files = hub.files["somebody/micro"]
    for path in (story.folder / "final").iterdir():
        assert files[path.name] == path.read_bytes()
    assert "learner:" in files["README.md"].decode()
    assert not any(TOKEN.encode() in path.read_bytes() for path in story.folder.rglob("*") if path.is_file())


@pytest.mark.parametrize("what", PROMISED)
def test_metrics_hold_what_was_promised(story: Story, what: str) -> None:
    records = {record["step"]: record for record in read_metrics(story.folder / "metrics.jsonl")}
    # SIGKILL may come between the checkpoint of a step and its line.
    assert set(range(STEPS + 1)) - {story.killed_at} <= set(records) <= set(range(STEPS + 1))
    for step in sorted(set(records) - {0}):
        for key in PROMISED[what]:
            assert key in records[step], f"{key} at step {step}"


def test_both_models_learn_something_and_old_tokens_are_trained(story: Story) -> None:
    """It is asynchronous: some tokens are trained at lag >= 1; gradients of both are above 0."""
    records = read_metrics(story.folder / "metrics.jsonl")
    assert max(r.get("policy/gradient_norm") or 0 for r in records) > 0
    assert max(r.get("critic/gradient_norm") or 0 for r in records) > 0
    assert max(r.get("lag/stale_share") or 0 for r in records) > 0
    assert 0 < sum(r.get("rollout/success") or 0 for r in records) / STEPS < 1
    assert max(r.get("rollout/turns") or 0 for r in records) > 1  # the tool was called
    assert records[0]["evaluation/success"] is not None
    assert records[-1]["evaluation/success"] is not None


def test_a_group_preset_trains_and_a_dead_runtime_stops_the_learner_saying_so(story: Story, tmp_path: Path) -> None:
    """Case D8: within 30 s. On the way, GRPO's groups of 8 go through the same path whole (A21)."""
    folder = story.folder.parent / "groups"
    folder.mkdir()
    shutil.copytree(story.folder / "sft", folder / "sft")
    words = ("name=groups", "learner.algorithm=grpo", "learner.steps=500")
    with training(str(story.recipe), *words, output=tmp_path / "groups.log") as command:
        command.wait_for(lambda: any("policy/gradient_norm" in r for r in metrics(folder)), within_s=120)
        command.child("agent.runtime").send_signal(signal.SIGKILL)
        assert command.end(within_s=30) == 1
        assert command.survivors() == []
        assert "the runtime ended with code -9" in command.said.replace("\n", " ")
        assert "Traceback" not in command.said
        assert "no value pretraining: grpo has no critic" in command.said
    trained = rows(folder, "SELECT group_id, COUNT(*) FROM episodes WHERE status = 'trained' GROUP BY group_id")
    assert trained
    assert {count for _, count in trained} == {8}
