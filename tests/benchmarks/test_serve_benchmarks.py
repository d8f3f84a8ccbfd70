"""The benchmarks of the server: their arithmetic, and that they run as their documentation says."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

from benchmarks import serve_kills, serve_load, serve_newcomer
from benchmarks.serving import Reply
from envs.style_shift.traces import style_traces
from learner.config import TinyModelConfig
from learner.model.tiny import write_tiny_model

ROOT = Path(__file__).resolve().parents[2]


def reply(sent: float, *pieces: float) -> Reply:
    return Reply(sent, list(pieces), id="r", conversation="c", versions=[0])


def test_a_gap_counts_for_a_publication_that_it_touches() -> None:
    replies = [reply(0.0, 1.0, 2.0, 6.0, 6.5), reply(0.0, 4.0, 4.25)]
    assert serve_load.longest(replies, 2.5, 3.0) == 4.0
    assert serve_load.longest(replies, 6.1, 6.2) == 0.5
    assert serve_load.longest(replies, 7.0, 8.0) is None


def test_publications_are_compared_with_as_long_a_time_between_them() -> None:
    stream = reply(0.0, 0.5, 1.0, 3.0, 3.5, 4.0, 4.5, 5.0, 5.5, 6.5, 7.0, 8.0)
    load: Any = SimpleNamespace(replies=[stream], feedback_s=[], faults=Counter())
    found = serve_load.figures_of(load, 0.0, 10.0, [(1.5, 2.5), (6.0, 7.0)], 2)
    assert found["gap_during_s"] == [2.0, 1.0]
    assert found["gap_outside_s"] == [0.5]  # 3.75 to 4.75
    assert found["first_token_s"]["p50"] == 0.5
    assert found["answers_per_s"] == 0.1


SOUND: dict[str, Any] = {
    **dict.fromkeys(("lost", "responses_twice", "trained_twice", "trained_without_batch"), 0),
    "states": {"ready": 3, "trained": 32},
    "checkpoint_episodes": 32,
}


@pytest.mark.parametrize(
    "change",
    [
        {"lost": 1},
        {"responses_twice": 1},
        {"trained_twice": 1},
        {"trained_without_batch": 1},
        {"checkpoint_episodes": 48},
        {"states": {"ready": serve_kills.BATCH, "trained": 32}},
        {"states": {"claimed": 16, "trained": 32}},
    ],
    ids=str,
)
def test_the_audit_lets_nothing_pass(change: dict[str, Any]) -> None:
    assert serve_kills.sound(SOUND)
    assert not serve_kills.sound(SOUND | change)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_it_runs_with_a_random_model_in_small(tmp_path: Path) -> None:
    recipe = yaml.safe_load((ROOT / "recipes/style_shift_tiny.yaml").read_text())
    recipe["learner"] |= {"batch_size": 4, "steps": 100, "held_out_probe": None}
    path = tmp_path / "recipe.yaml"
    path.write_text(yaml.safe_dump(recipe))
    shape = TinyModelConfig(**{**recipe["model"]["tiny"], "hidden_size": 16, "layers": 1})
    texts = [m["content"] for trace in style_traces(400, bad=0.3, seed=1) for m in trace]
    write_tiny_model(tmp_path / "runs/start/sft", shape, texts, 0)
    common = ["--recipe", str(path), "--runs", str(tmp_path / "runs"), "--clients", "4"]
    for script, options in (
        ("serve_load.py", ["--seconds", "3", "--warmup", "0.5"]),
        ("serve_kills.py", ["--kills", "1"]),
    ):
        target = tmp_path / f"{script}.json"
        process = subprocess.run(
            [sys.executable, f"benchmarks/{script}", *common, *options, "--json", str(target)],
            cwd=ROOT,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
            timeout=420,
        )
        assert process.returncode == 0, process.stdout + process.stderr
        report = json.loads(target.read_text())
        if script == "serve_load.py":
            assert [row["learning"] for row in report["rows"]] == [False, True]
            assert all(row["answers"] > 0 and not row["faults"] for row in report["rows"])
        else:
            assert report["accepted"] > 0
        shutil.rmtree(tmp_path / "runs/kills", ignore_errors=True)


def test_a_lucky_start_counts_as_learned() -> None:
    def clicks(styles: str) -> list[serve_newcomer.Click]:
        return [serve_newcomer.Click(4.0 * i, {"c": "cute"}.get(s, "none"), s == "c", 0) for i, s in enumerate(styles)]

    assert serve_newcomer.seen(clicks("cccccccc"), "cute") is None, "eight of eight are not yet of ten"
    assert serve_newcomer.seen(clicks("cnnncnncnncccncccccccc"), "cute") == 19
    assert serve_newcomer.seen(clicks("cn" * 20), "cute") is None
