"""A rollback is not undone by the next publication: weights, critic and moments go back, and so do the episodes."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from online_tools import NAME, call, converse, learners, learning_server, trained, until, write_recipe
from safetensors.torch import load_file

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600), pytest.mark.xdist_group("online")]


def weights(run: Path, version: int) -> torch.Tensor:
    """All weights of a version as the server keeps them, float32[N]."""
    tensors = load_file(run / "serve" / "versions" / f"v{version}" / "model.safetensors")
    return torch.cat([tensors[name].float().flatten() for name in sorted(tensors)])


def test_after_a_rollback_the_learner_goes_on_from_the_weights_that_are_served(tmp_path: Path) -> None:
    """Was: the version after `unpin` lay .02 from the poisoned one and .755 from the one rolled back to."""
    recipe = write_recipe(tmp_path, steps=None, policy={"lr": 1e-2, "warmup_steps": 0}, held_out_probe=None)
    run = tmp_path / "runs" / NAME

    def why() -> Any:
        return call(url, "/v1/versions"), trained(run), (run / "learner.log").read_text()[-3000:]

    def serving(version: int) -> None:
        until(lambda: call(url, "/v1/versions")["served"] == version, why)

    def store() -> Counter[str]:
        return Counter(trained(run).values())

    with learning_server(recipe) as (url, server):
        for version in (1, 2, 3):
            converse(url, 4)
            serving(version)
        converse(url, 2)
        until(lambda: store() == Counter(trained=12, ready=2), why)
        [first] = learners(server)
        answer = call(url, "/v1/versions/rollback", {"version": 1})
        assert (answer["version"], answer["set_aside"]) == (4, 8 + 2)
        assert store() == Counter(trained=4, set_aside=10)
        assert [(one["episodes"]) for one in call(url, "/v1/set_aside")["judges"]] == [10]
        converse(url, 4)  # of the old weights, and good: it waits for a learner
        assert call(url, "/healthz")["learning"] == "paused"

        call(url, "/v1/versions/unpin", {})
        serving(6)
        assert "rollback to version 1: going on from step_00001" in (run / "learner.log").read_text()
        assert first.pid not in [process.pid for process in learners(server)]
        assert torch.equal(weights(run, 5), weights(run, 1)), "what it publishes first is what is served"
        near, far = [float((weights(run, 6) - weights(run, version)).norm()) for version in (1, 3)]
        assert near < 0.75 * far
        until(lambda: store() == Counter(trained=8, set_aside=10), why)

        assert call(url, "/v1/set_aside/return", {})["returned"] == 10
        until(lambda: store() == Counter(trained=16, ready=2), why)
        assert call(url, "/healthz")["learner"]["restarts"] == 0
    progress = json.loads((run / "checkpoints" / "step_00004" / "progress.json").read_text())
    assert progress["episodes"] == 16
