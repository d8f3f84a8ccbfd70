"""`learner.study task` on episodes whose return is known to the prompt, to the middle, or to nobody."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from learner_tools import action, episode, micro_recipe, observation, prompt
from rich.console import Console

from agent.episode import Episode
from learner.config import RecipeError
from learner.run.display import Display
from learner.study import task
from learner.study.task import measure

SETTINGS = {"episodes": 192, "held_out_episodes": 96, "steps": 40, "batch_size": 64, "optimizer": {"lr": 1e-2}}


def episodes(known: str, count: int) -> list[Episode]:
    """Three turns each; the token before the first turn, or before the second, tells the reward, or none does."""
    rng, found = random.Random(0), []
    for i in range(count):
        won = rng.random() < 0.5
        tells = 7 if won else 9
        at_prompt, in_the_middle = (tells if known == place else 8 for place in ("prompt", "middle"))
        segments = [prompt([1, at_prompt]), action([2, 3]), observation([in_the_middle]), action([2, 3])]
        found.append(episode([*segments, observation([4]), action([2])], [0.0, 0.0, float(won)], name=f"e{i:04}"))
    return found


@pytest.mark.parametrize(
    ("known", "at_prompt", "in_the_middle"), [("prompt", True, True), ("middle", False, True), ("never", False, False)]
)
def test_what_a_critic_can_know_is_found_where_it_can_know_it(
    known: str,
    at_prompt: bool,
    in_the_middle: bool,
    micro_model: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def collected(recipe: object, model: object, folder: object, count: int, display: object) -> list[Episode]:
        return episodes(known, count)

    monkeypatch.setattr(task, "starting_model", lambda *_: micro_model)
    monkeypatch.setattr(task, "collect_episodes", collected)
    recipe = micro_recipe(tmp_path, value_pretraining=SETTINGS)
    with Display("task", console=Console(quiet=True)) as display:
        fitness = measure(recipe, display)
    assert (fitness.explained["prompt"] > 0.8) == at_prompt, fitness
    assert (fitness.explained["middle"] > 0.8) == in_the_middle, fitness
    assert fitness.is_fit == (at_prompt and in_the_middle)
    assert (fitness.trained_on, fitness.held_out, fitness.action_tokens) == (192, 96, 5.0)
    assert (tmp_path / "micro" / "task.json").is_file()


def test_a_recipe_without_a_critic_cannot_be_measured(tmp_path: Path) -> None:
    with Display("task", console=Console(quiet=True)) as display:
        with pytest.raises(RecipeError, match="value_pretraining"):
            measure(micro_recipe(tmp_path), display)
        with pytest.raises(RecipeError, match="'grpo' has no critic"):
            measure(micro_recipe(tmp_path, value_pretraining=SETTINGS, learner={"algorithm": "grpo"}), display)
