"""Pinning and stopping while a real learner trains: it goes on, and nothing that it did is lost."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from online_tools import NAME, call, converse, learners, learning_server, trained, until, write_recipe

pytestmark = [pytest.mark.timeout(600), pytest.mark.xdist_group("online")]


def statuses(url: str) -> dict[int, str]:
    """The versions by number."""
    return {version["version"]: version["status"] for version in call(url, "/v1/versions")["versions"]}


def test_a_learner_goes_on_through_pin_unpin_and_a_stop_between_checkpoints(tmp_path: Path) -> None:
    """Cases G6, G7: held versions are served later, and what was learned since the last checkpoint is saved."""
    recipe = write_recipe(tmp_path, steps=100, checkpoint_every=2)
    run = tmp_path / "runs" / NAME

    def why() -> Any:
        return statuses(url), (run / "learner.log").read_text()[-3000:]

    with learning_server(recipe) as (url, server):
        converse(url, 4)
        until(lambda: statuses(url).get(1) == "serving", why)
        [learner] = learners(server)
        call(url, "/v1/versions/pin", {})
        converse(url, 4)
        until(lambda: statuses(url).get(2) == "held", why)
        assert call(url, "/v1/versions/unpin", {})["served"] == 2
        converse(url, 4)
        until(lambda: statuses(url).get(3) == "serving", why)
        assert [process.pid for process in learners(server)] == [learner.pid], "it never died"
        assert call(url, "/healthz")["learner"]["restarts"] == 0
    # Stopped while it waited for conversations, with one step since its last checkpoint.
    assert list(trained(run).values()) == ["trained"] * 12
    progress = json.loads((run / "checkpoints" / "step_00003" / "progress.json").read_text())
    assert (progress["step"], progress["episodes"]) == (3, 12)
