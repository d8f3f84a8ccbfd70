"""Rolling back, pinning and stopping while a real learner trains: it goes on, and nothing that it did is lost."""

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


def test_a_learner_goes_on_through_rollback_pin_unpin_and_a_stop_between_checkpoints(tmp_path: Path) -> None:
    """Cases G6, G7: a number that the server has taken for a rollback is renumbered; held versions are served later."""
    recipe = write_recipe(tmp_path, steps=100, checkpoint_every=4)
    run = tmp_path / "runs" / NAME

    def why() -> Any:
        return statuses(url), (run / "learner.log").read_text()[-3000:]

    with learning_server(recipe) as (url, server):
        converse(url, 4)
        until(lambda: statuses(url).get(1) == "serving", why)
        [learner] = learners(server)
        assert call(url, "/v1/versions/rollback", {"version": 0})["version"] == 2
        converse(url, 4)
        until(lambda: statuses(url).get(3) == "held", why)  # it wanted to be 2
        assert call(url, "/v1/versions")["served"] == 2
        assert call(url, "/v1/versions/unpin", {})["served"] == 3
        converse(url, 4)
        until(lambda: statuses(url).get(4) == "serving", why)
        call(url, "/v1/versions/pin", {})
        converse(url, 4)
        until(lambda: statuses(url).get(5) == "held", why)
        assert call(url, "/v1/versions/rollback", {"version": 1})["version"] == 6
        converse(url, 4)
        until(lambda: statuses(url).get(7) == "held", why)
        assert call(url, "/v1/versions/unpin", {})["served"] == 7
        assert [process.pid for process in learners(server)] == [learner.pid], "it never died"
        assert call(url, "/healthz")["learner"]["restarts"] == 0
    # Stopped while it waited for conversations, with one step since its last checkpoint.
    assert list(trained(run).values()) == ["trained"] * 20
    progress = json.loads((run / "checkpoints" / "step_00005" / "progress.json").read_text())
    assert (progress["step"], progress["episodes"]) == (5, 20)
