"""A whole run whose turns are made by an agent that knows nothing of training: a small script over OpenAI's client."""

from __future__ import annotations

import os
import sqlite3
from pathlib import Path

import pytest
from run_tools import ROOT, metrics, training, write_run

from agent.episode import Episode, decode
from learner.config import load_recipe

pytestmark = pytest.mark.timeout(600)
STEPS = 3

SCRIPT = '''
"""Asks a second one for its opinion, then works on the problem with the tool that there is."""

import openai

from agent.harness.loops import openai_loop


async def solve(task):
    async with openai.AsyncOpenAI(base_url=task.openai_base_url, api_key=task.api_key) as client:
        asked = [{"role": "user", "content": "What is 1 + 1? (train 0)"}]
        await client.chat.completions.create(model="helper", messages=asked, temperature=0.2)
    return await openai_loop.solve(task)
'''


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    base = tmp_path_factory.mktemp("harness_run")
    (base / "a_small_script.py").write_text(SCRIPT)
    recipe = write_run(
        base,
        steps=STEPS,
        learner={"algorithm": "sao_running_mean"},
        evaluation={"tasks": 2},
        value_pretraining=None,
        runtime={
            "concurrency": 8,
            "max_tokens_per_turn": 24,
            "max_context_tokens": 200,
            "harness": {"call": "a_small_script:solve"},
        },
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", f"{base}:{ROOT}")
        with training(str(recipe), output=base / "run.log") as command:
            assert command.end(within_s=400) == 0, command.said[-4000:]
            assert command.survivors(within_s=10.0) == []
    return base / "runs" / "micro"


@pytest.fixture(scope="module")
def episodes(folder: Path) -> list[Episode]:
    with sqlite3.connect(f"file:{folder / 'episodes.sqlite'}?mode=ro", uri=True) as sql:
        rows = sql.execute("SELECT data FROM episodes WHERE kind = 'train' AND status = 'trained'").fetchall()
    return [decode(data) for (data,) in rows]


def test_the_policy_learns_from_what_the_script_asked(folder: Path, episodes: list[Episode]) -> None:
    lines = [line for line in metrics(folder) if "policy/gradient_norm" in line]
    assert len(lines) == STEPS
    assert any(line["policy/gradient_norm"] > 0 for line in lines)
    assert len(episodes) == 8 * STEPS
    assert {e.reward for e in episodes} == {0.0, 1.0}, "graded by the environment's own verifier"
    assert max(e.oldest_version or 0 for e in episodes) > 0, "later ones were sampled by weights that had learned"


def test_what_it_asked_of_others_is_a_branch_of_the_same_episode(episodes: list[Episode]) -> None:
    assert all(len(e.branches) == 1 for e in episodes)
    for episode in episodes:
        assert {e.kind for e in episode.segments} <= {"prompt", "action", "observation"}
        assert "(train 0)" in episode.segments[0].text
        assert episode.sampling.temperature == 1.0
        assert episode.metrics["sampling_overridden"] is True


def test_no_secret_of_a_session_is_in_the_runtimes_log(folder: Path) -> None:
    assert "/sessions/" not in (folder / "runtime.log").read_text()


def test_the_recipe_that_comes_along_names_a_harness_that_is_there() -> None:
    recipe = load_recipe(ROOT / "recipes" / "harness_tiny.yaml", [])
    assert recipe.runtime.harness is not None
    module, _, name = recipe.runtime.harness.call.partition(":")
    assert (ROOT / f"{module.replace('.', os.sep)}.py").is_file()
    assert name == "solve"
