"""A profile must show the steps that were asked for, and no others, in a file that a viewer opens."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest
from learner_tools import build_learner, random_episodes

from learner.config import ProfileConfig
from learner.run.profiling import trace_path, traced, watching


def names_in(path: Path) -> set[str]:
    with gzip.open(path, "rt") as file:
        return {event.get("name", "") for event in json.load(file)["traceEvents"]}


def test_the_window_is_traced_and_its_parts_are_named(micro_model: Path, tmp_path: Path) -> None:
    own = build_learner(micro_model, tmp_path, learner={"profile": {"start": 2, "steps": 1}})
    for seed in range(3):
        own.step(random_episodes(8, seed=seed))
    traces = list((own.recipe.run_dir / "profile").iterdir())
    assert traces == [trace_path(own.recipe.run_dir, 2, rank=0)]
    names = names_in(traces[0])
    assert {"critic update", "values read", "policy update", "aten::mm"} <= names
    assert any(name.startswith("Optimizer.step") for name in names)


def test_a_rank_that_was_not_asked_writes_nothing(tmp_path: Path) -> None:
    config = ProfileConfig(start=1)
    with watching(config, tmp_path, 1, rank=1):
        pass
    assert not list(tmp_path.iterdir())
    with watching(config.model_copy(update={"ranks": "all"}), tmp_path, 1, rank=1):
        pass
    assert trace_path(tmp_path, 1, rank=1).exists()


def test_a_step_that_fails_leaves_no_trace_that_looks_whole(tmp_path: Path) -> None:
    def fails() -> None:
        raise RuntimeError("the step failed")

    with pytest.raises(RuntimeError, match="the step failed"), traced(tmp_path / "trace.json.gz"):
        fails()
    assert not list(tmp_path.iterdir())
