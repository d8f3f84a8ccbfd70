"""A recipe's numbers of a method act on the method that they are for, and on no other: every recipe, method and key."""

from __future__ import annotations

import itertools
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from learner.algorithms import ALGORITHMS, Algorithm, CriticSettings, RunningMeanSettings, get_algorithm
from learner.config import LearnerConfig, MethodConfig, RecipeError, load_recipe, save_recipe
from learner.methods.options import OPTIONS, complaints, number_of, with_options

RECIPES = sorted((Path(__file__).parents[3] / "recipes").glob("*.yaml"))

OTHER: dict[str, Any] = {
    "critic_updates": 5,
    "critic_trainable": "mlp",
    "eps_low": 0.123,
    "eps_high": 7.5,
    "mismatch": (0.25, 4.0),
    "gamma": 0.75,
    "lam": 0.5,
    "alpha": 9.0,
    "samples_per_prompt": 4,
    "aggregation": None,  # the other one
    "denominator": "trusted",
    "normalize_group": False,
    "rho_bar": 3.0,
    "c_bar": 2.0,
    "max_divergence": 0.07,
    "running_mean.window": 16,
    "running_mean.per_prompt": False,
    "running_mean.include_current": True,
}
"""For every key a number that no preset has."""


def other(key: str, algorithm: Algorithm) -> Any:
    if key == "aggregation":
        return "token_mean" if algorithm.aggregation == "sequence_mean" else "sequence_mean"
    return OTHER[key]


def as_words(key: str, value: Any) -> dict[str, Any]:
    section, _, name = key.rpartition(".")
    return {section: {name: value}} if section else {name: value}


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
@pytest.mark.parametrize("name", ALGORITHMS)
def test_choosing_another_method_for_a_shipped_recipe_is_enough(path: Path, name: str) -> None:
    """Case N4: GRPO ran with SAO's interval, which every recipe set."""
    resolved, preset = load_recipe(path, [f"learner.algorithm={name}"]).learner.resolve(), get_algorithm(name)
    allowed = preset
    if path.stem.startswith("swe") and preset.family == "sao":
        allowed = replace(preset, eps_low=0.8, eps_high=3.0)
    if path.stem.startswith("style_shift") and name == "sao_running_mean":
        allowed = replace(preset, running_mean=RunningMeanSettings(128, per_prompt=False, include_current=True))
    assert resolved == allowed


@pytest.mark.parametrize(("name", "key"), list(itertools.product(ALGORITHMS, OPTIONS)))
def test_every_key_acts_on_the_method_or_is_refused_by_name(name: str, key: str) -> None:
    """Case N7: flat, and among the methods that wait; what acts changes its own number and nothing else."""
    preset = get_algorithm(name)
    value = other(key, preset)
    if OPTIONS[key].acts(preset):
        found = LearnerConfig.model_validate({"algorithm": name, **as_words(key, value)}).resolve()
        assert number_of(found, key) == value != number_of(preset, key)
        assert with_options(found, {key: number_of(preset, key)}) == preset
        waiting = {"algorithm": name, "methods": {name: as_words(key, value)}}
        assert LearnerConfig.model_validate(waiting).resolve() == found
        return
    with pytest.raises(ValueError, match=key.rpartition(".")[2]):
        LearnerConfig.model_validate({"algorithm": name, **as_words(key, value)})
    with pytest.raises(ValueError, match=rf"{name}\.?.*{key.rpartition('.')[2]}"):
        LearnerConfig.model_validate({"algorithm": "sao", "methods": {name: as_words(key, value)}})


def test_no_number_of_a_method_is_out_of_a_recipes_reach() -> None:
    """A new field of `Algorithm` needs a key, or a place in what makes a method that method."""
    identity = {"name", "source", "family", "baseline", "ratio", "granularity", "normalize_task"}
    wanted = {field.name for field in fields(Algorithm)} - identity - {"critic", "running_mean"}
    wanted |= {f"critic.{field.name}" for field in fields(CriticSettings)}
    wanted |= {f"running_mean.{field.name}" for field in fields(RunningMeanSettings)}
    assert {option.path for option in OPTIONS.values()} == wanted
    assert {key.partition(".")[0] for key in OPTIONS} == set(MethodConfig.model_fields)


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["learner.algorithm=grpo", "learner.critic_updates=5", "learner.alpha=9", "learner.critic_trainable=all"],
         ["critic_updates has no effect with 'grpo'", "alpha has no effect", "critic_trainable has no effect"]),
        (["learner.algorithm=grpo", "learner.critic_only_steps=5"], ["critic_only_steps has no effect with 'grpo'"]),
        (["learner.algorithm=rloo", "learner.critic.lr=1e-3"], ["learner.critic.lr has no effect with 'rloo'"]),
        (["learner.algorithm=ppo", "learner.alpha=9"], ["alpha has no effect with 'ppo': it is for a method with an"]),
        (["learner.lam=.9", "learner.alpha=9"], ["alpha has no effect with 'sao'"]),
        (["learner.samples_per_prompt=8"], ["samples_per_prompt"]),
        (["learner.algorithm=grpo", "learner.samples_per_prompt=1"], ["samples_per_prompt", "at least 2"]),
        (["learner.methods={soa: {eps_low: 0.1}}"], ["unknown algorithm 'soa'"]),
        (["learner.methods={grpo: {alpha: 2}}"], ["methods.grpo.alpha has no effect with 'grpo'"]),
        (["learner.methods={grpo: {steps: 2}}"], ["learner.methods.grpo.steps: unknown key"]),
        (["learner.running_mean.window=16"], ["running_mean.window has no effect with 'sao'"]),
        (["learner.granularity=token"], ["learner.granularity: unknown key"]),
    ],
)  # fmt: skip
def test_what_cannot_act_is_said_in_one_paragraph(words: list[str], named: list[str]) -> None:
    with pytest.raises(RecipeError) as caught:
        load_recipe(None, words)
    assert all(name in str(caught.value) for name in named), caught.value
    assert "\n\n" not in str(caught.value)


@pytest.mark.parametrize(("key", "value"), [("window", 16), ("per_prompt", False), ("include_current", True)])
def test_one_number_of_a_running_mean_leaves_the_others(key: str, value: Any) -> None:
    """Case N6: `learner.running_mean.window=16` also flipped the two others."""
    words = ["learner.algorithm=sao_running_mean", f"learner.running_mean.{key}={str(value).lower()}"]
    assert load_recipe(None, words).learner.resolve().running_mean == replace(RunningMeanSettings(), **{key: value})


def test_a_number_on_the_command_line_lies_over_the_one_that_waits() -> None:
    recipe = RECIPES[0].with_name("style_shift_tiny.yaml")
    words = ["learner.algorithm=sao_running_mean", "learner.running_mean.window=16"]
    resolved = load_recipe(recipe, words).learner.resolve()
    assert resolved.running_mean == RunningMeanSettings(16, per_prompt=False, include_current=True)


def test_an_ablation_shares_what_is_set_for_its_family_but_for_what_it_ablates() -> None:
    sections = {"sao": {"eps_high": 3.0, "critic_updates": 4}, "sao_k1": {"gamma": 0.5}}
    found = {
        name: LearnerConfig.model_validate({"algorithm": name, "methods": sections}).resolve() for name in ALGORITHMS
    }
    assert {name for name, own in found.items() if own.eps_high == 3.0} == {
        name for name, own in ALGORITHMS.items() if own.family == "sao"
    }
    assert {name: own.critic.updates for name, own in found.items() if own.critic} == {
        "sao": 4, "sao_k1": 1, "sao_full_critic": 4, "sao_dis_only": 1, "sao_step_average": 4, "sao_step_last": 4,
        "vapo": 1, "ppo": 1, "impala": 1,
    }  # fmt: skip
    assert {name for name, own in found.items() if own.gamma == 0.5} == {"sao_k1"}


def test_a_fixed_lambda_becomes_adaptive_and_back() -> None:
    words = ["learner.algorithm=ppo", "learner.lam=adaptive", "learner.alpha=.05"]
    resolved = load_recipe(None, words).learner.resolve()
    assert (resolved.lam, resolved.alpha) == (None, 0.05)
    assert load_recipe(None, ["learner.lam=0.9"]).learner.resolve().lam == 0.9


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_a_saved_recipe_still_leaves_every_method_its_own_numbers(path: Path, tmp_path: Path) -> None:
    """What is saved with a run holds every key; None among them must go on meaning the preset's own."""
    save_recipe(load_recipe(path), saved := tmp_path / "recipe.yaml")
    assert load_recipe(saved) == load_recipe(path)
    assert yaml.safe_load(saved.read_text())["learner"]["eps_low"] is None
    chosen = ["learner.algorithm=gspo"]
    assert load_recipe(saved, chosen).learner.resolve() == get_algorithm("gspo")


def test_complaints_are_of_keys_that_do_not_act() -> None:
    assert complaints(get_algorithm("sao"), {"eps_low": 0.1}) == []
    assert len(complaints(get_algorithm("rloo"), {"eps_low": 0.1, "normalize_group": False, "c_bar": 1.0})) == 3
