"""A server and its learner as real processes: what is judged is trained once, what is spoilt is not served."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from online_tools import NAME, call, converse, learners, learning_server, metrics, trained, until, write_recipe

pytestmark = [pytest.mark.timeout(900), pytest.mark.xdist_group("online")]


def test_judged_conversations_are_trained_once_though_the_learner_is_killed(tmp_path: Path) -> None:
    """Cases G5, G7: killed after its first step, the learner goes on where it was, with what came meanwhile."""
    recipe = write_recipe(tmp_path, steps=100)
    run = tmp_path / "runs" / NAME
    with learning_server(recipe) as (url, server):
        first = converse(url, 4)
        until(lambda: call(url, "/v1/versions")["served"] >= 1, lambda: (run / "learner.log").read_text()[-3000:])
        [learner] = until(lambda: learners(server), lambda: "no learner")
        learner.kill()
        second = converse(url, 8)  # served and recorded while there is no learner

        def all_trained() -> bool:
            return sum(status == "trained" for status in trained(run).values()) == 12

        until(all_trained, lambda: (trained(run), (run / "learner.log").read_text()[-3000:]))
        assert set(trained(run)) == {*first, *second}
        assert learners(server)[0].pid != learner.pid
        until(lambda: metrics(run)[-1]["step"] >= 3, lambda: metrics(run)[-1:])
    progress = json.loads(
        next(iter(sorted((run / "checkpoints").glob("step_*"))[-1:])).joinpath("progress.json").read_text()
    )
    assert (progress["step"], progress["episodes"]) == (3, 12)


@pytest.mark.slow
def test_a_learner_that_dies_before_its_first_checkpoint_comes_back_and_trains_it_all(tmp_path: Path) -> None:
    """Case G7: its first version is served, and no checkpoint holds those weights."""
    recipe = write_recipe(tmp_path, steps=100, checkpoint_every=4)
    run = tmp_path / "runs" / NAME

    def why() -> object:
        return trained(run), (run / "learner.log").read_text()[-3000:]

    with learning_server(recipe) as (url, server):
        first = converse(url, 4)
        until(lambda: call(url, "/v1/versions")["served"] >= 1, why)
        [learner] = until(lambda: learners(server), lambda: "no learner")
        learner.kill()
        second = converse(url, 12)
        until(lambda: sum(status == "trained" for status in trained(run).values()) == 16, why)
        assert set(trained(run)) == {*first, *second}
        assert learners(server)[0].pid != learner.pid
        assert call(url, "/v1/versions")["served"] > 2, "what the dead one had published names its weights alone"


def test_weights_that_forgot_how_to_write_are_not_served(tmp_path: Path) -> None:
    """A learning rate that wrecks the model: every candidate is dropped, the version stays, training goes on."""
    recipe = write_recipe(tmp_path, steps=100, policy={"lr": 50.0, "warmup_steps": 0})
    run = tmp_path / "runs" / NAME
    with learning_server(recipe) as (url, _):
        converse(url, 12)
        until(lambda: len(metrics(run)) >= 3, lambda: (run / "learner.log").read_text()[-3000:])
        assert call(url, "/v1/versions")["served"] == 0
        assert converse(url, 1)
    steps = metrics(run)
    assert [step["publication/dropped"] for step in steps[:3]] == [1, 2, 3]
    assert "is dropped, version 0 stays" in (run / "learner.log").read_text()
