"""Several environments, several evaluation sets, their place, the end of a run: keys act or are refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from learner_tools import micro_recipe

from agent.episode import EpisodeError
from agent.runtime.assignments import UnknownEnvironment, assignment_of
from agent.runtime.settings import RuntimeConfig
from agent.store.protocol import Ticket
from learner.config import Recipe, RecipeError, load_recipe, save_recipe
from learner.run.evaluation.target import reached

TWO = [
    {"id": "sao/PythonTIR-v0", "weight": 3, "kwargs": {"max_turns": 4}},
    {"name": "styles", "id": "sao/StyleShift-v0"},
]


def recipe_of(**sections: Any) -> Recipe:
    return micro_recipe(Path("runs"), **sections)


@pytest.mark.parametrize(
    ("sections", "said"),
    [
        ({"environments": [{**TWO[0], "weight": 0}]}, "weight"),
        ({"environments": [{**TWO[0], "weight": float("nan")}]}, "weight"),
        ({"environments": [TWO[0], TWO[0]]}, "give each a `name`"),
        ({"environments": [{**TWO[0], "name": "a/b"}]}, "name"),
        ({"environments": TWO, "env": {"id": "sao/StyleShift-v0"}}, "not both"),
        ({"environments": TWO, "store": {"url": "http://store"}}, "environments: the store at store.url"),
        ({"environments": TWO, "learner": {"online": True}}, "environments: learner.online"),
        ({"evaluation": {"sets": [{"name": "a"}, {"name": "a"}]}}, "two have the same name"),
        ({"evaluation": {"sets": [{"name": "a", "samples": 0}]}}, "samples"),
        ({"evaluation": {"sets": [{"name": "a", "max_context_tokens": 9999}]}}, "larger than engine.max_context"),
        ({"evaluation": {"engines": 1, "share": 0.5}}, "not both"),
        ({"evaluation": {"share": 1.5}}, "share"),
        ({"evaluation": {"engines": 1}, "runtime": {"launch": False}}, "evaluation.engines: the runtime"),
        ({"evaluation": {"share": 0.5}, "store": {"url": "http://store"}}, "evaluation.share: the store"),
        ({"evaluation": {"engines": 1}, "learner": {"online": True}}, "evaluation.engines has no effect"),
        ({"evaluation": {"stop_at": {"value": 1.5}}}, "evaluation.stop_at.value"),
        ({"evaluation": {"stop_at": {"value": 0.0}}}, "evaluation.stop_at.value"),
        ({"evaluation": {"stop_at": {"set": "hard", "value": 0.5}}}, "there is no evaluation set 'hard'"),
        ({"evaluation": {"stop_at": {"metric": "pass_at_4", "value": 0.5}}}, "needs as many samples, and there are 1"),
        ({"evaluation": {"stop_at": {"metric": "loss", "value": 0.5}}}, "'loss' is none of success"),
    ],
)
def test_what_makes_no_sense_is_refused_by_name(sections: dict[str, Any], said: str) -> None:
    with pytest.raises(RecipeError, match=said.replace("(", r"\(")):
        recipe_of(**sections)


def test_a_recipe_of_several_environments_survives_being_saved(tmp_path: Path) -> None:
    """`env` is the first of them, also where the saved recipe says so."""
    recipe = recipe_of(environments=TWO)
    assert [one.name for one in recipe.environments] == ["PythonTIR-v0", "styles"]
    assert recipe.env == recipe.environments[0].env
    save_recipe(recipe, tmp_path / "saved.yaml")
    assert load_recipe(tmp_path / "saved.yaml") == recipe
    assert yaml.safe_load((tmp_path / "saved.yaml").read_text())["env"]["kwargs"] == {"max_turns": 4}


def test_what_is_evaluated_follows_from_the_most_special_key_that_is_there() -> None:
    [only] = recipe_of().held_out_sets
    assert (only.name, only.env.id, only.prefix, only.every) == ("", "sao/PythonTIR-v0", "evaluation", 10)
    assert [one.name for one in recipe_of(environments=TWO).held_out_sets] == ["PythonTIR-v0", "styles"]
    [asked] = recipe_of(environments=TWO, evaluation={"env": {"id": "sao/StyleShift-v0"}}).held_out_sets
    assert (asked.name, asked.env.id) == ("", "sao/StyleShift-v0")
    sets = [{"name": "a", "samples": 4, "every": 3}, {"name": "b", "sampling": {"temperature": 0}, "tasks": 9}]
    config = {"samples": 2, "tasks": 5, "max_tokens_per_turn": 11, "sets": sets}
    a, b = recipe_of(evaluation=config, learner={"evaluate_every": 7}).held_out_sets
    assert (a.samples, a.tasks, a.every, a.sampling.temperature, a.max_tokens_per_turn) == (4, 5, 3, 1.0, 11)
    assert (b.samples, b.tasks, b.every, b.sampling.temperature, b.prefix) == (2, 9, 7, 0.0, "evaluation/b")


def test_a_runtime_does_what_the_ticket_names_or_says_that_it_cannot() -> None:
    config = RuntimeConfig.model_validate(
        {
            "store": "http://store",
            "engines": ["http://engine"],
            "model": "m",
            "env": {"id": "only"},
            "environments": {"a": {"id": "first"}},
            "evaluation_env": {"id": "held"},
            "evaluations": {"hard": {"env": {"id": "hard"}, "sampling": {"temperature": 0.5}, "max_context_tokens": 9}},
        }
    )

    def assigned(kind: Any, environment: str) -> Any:
        return assignment_of(config, Ticket("t", kind, 0, 0, 0, environment=environment))

    assert assigned("train", "").env.id == "only"
    assert assigned("train", "a").env.id == "first"
    assert assigned("evaluate", "").env.id == "held"
    hard = assigned("evaluate", "hard")
    assert (hard.env.id, hard.sampling.temperature, hard.max_context_tokens) == ("hard", 0.5, 9)
    assert hard.max_tokens_per_turn == config.max_tokens_per_turn
    for kind, name in (("train", "hard"), ("evaluate", "a")):
        with pytest.raises(UnknownEnvironment, match=name):
            assigned(kind, name)
    assert issubclass(UnknownEnvironment, EpisodeError)


def test_a_target_counts_once_the_weights_that_met_it_are_on_the_disk() -> None:
    """A line of a step that the last checkpoint does not hold is of weights that are gone."""
    config = {"sets": [{"name": "a"}, {"name": "b"}], "stop_at": {"set": "b", "value": 0.9}}
    recipe = recipe_of(evaluation=config)
    records = [
        {"step": 0, "evaluation/a/success": 1.0, "evaluation/b/success": 0.1},
        {"step": 2, "evaluation/b/success": None},
        {"step": 4, "evaluation/b/success": 0.9},
        {"step": 6, "evaluation/b/success": 0.95},
    ]
    assert reached(recipe, records, until=3) is None
    found = reached(recipe, records, until=6)
    assert found is not None
    assert found.step == 4
    assert "b success 0.9" in str(found)
    assert reached(recipe_of(), records, until=6) is None
