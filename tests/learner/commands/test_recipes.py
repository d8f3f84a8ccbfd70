"""A recipe that cannot be run is one paragraph that names the key; a good one survives being saved."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from learner_tools import MICRO, micro_recipe

from learner.algorithms import get_algorithm
from learner.config import LearnerConfig, RecipeError, load_recipe, parse_recipe, save_recipe


def refused(words: list[str], path: Path | None = None) -> str:
    with pytest.raises(RecipeError) as caught:
        load_recipe(path, words)
    text = str(caught.value)
    assert "\n\n" not in text
    return text


@pytest.mark.parametrize(
    ("word", "named"),
    [
        ("learner.stpes=3", "learner.stpes: unknown key"),
        ("lerner.steps=3", "lerner: unknown key"),
        ("learner.policy.learning_rate=1e-3", "learner.policy.learning_rate: unknown key"),
        ("store.path=x", "store.path: unknown key"),
        ("runtime.sampling.penalty=1", "runtime.sampling.penalty: unknown key"),
        ("learner.steps=many", "learner.steps"),
        ("runtime.concurrency=0", "runtime.concurrency"),
        ("learner.truncation=maybe", "learner.truncation"),
        ("value_pretraining.trainable=lora", "value_pretraining.trainable"),  # RL could not read its adapters back
        ("runtime.sampling.top_p=0.9", "runtime.sampling.top_p and top_k must stay"),  # case A19
        ("runtime.sampling.top_k=20", "runtime.sampling.top_p and top_k must stay"),  # case A19
        ("runtime.sampling.temperature=0", "runtime.sampling.temperature must be above 0"),
        ("runtime.max_context_tokens=5000", "runtime.max_context_tokens is larger than engine.max_context"),
        ("store.max_ready=10", "store.max_ready is smaller than learner.batch_size"),
        ("learner.checkpoint_every=9", "learner.checkpoint_every 9 is above store.max_lag + 1"),
        ("learner.checkpoint_every=0", "checkpoint_every must be at least 1"),
        ("learner.commit_within=0", "commit_within 0 is below checkpoint_every 1"),
        ("learner.commit_within=9", "learner.commit_within 9 is above store.max_lag + 1"),
        ("model.path=/somewhere", "give either `path`"),
        ("learner.algorithm=sarsa", "sarsa"),
        ("learner.eps_high=-1", "eps_high"),
        ("learner.eps_low=-0.1", "eps_low"),
        ("learner.critic_updates=0", "critic"),
        ("learner.gamma=2", "gamma"),
        ("engine.count=0", "engine.count"),
        ("engine.restarts=-1", "engine.restarts"),
    ],
)
def test_bad_keys_and_impossible_values_are_named(word: str, named: str) -> None:
    assert named in refused([word])


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["learner.algorithm=grpo", "learner.batch_size=20"], "no multiple of the 8 samples"),
        (["learner.algorithm=grpo", "learner.truncation=bootstrap"], "needs a critic"),
        (["learner.algorithm=grpo", "store.order=window"], "store.order 'window' works on single rollouts"),
        (["engine.launch=vllm", "hardware.engine_gpus=2"], "engine.count 1 of hardware.gpus_per_engine 1 is not"),
    ],
)
def test_impossible_combinations_name_both_sides(words: list[str], named: str) -> None:
    assert named in refused(words)


def test_several_faults_are_said_at_once() -> None:
    text = refused(["learner.stpes=3", "store.max_lag=-1"])
    assert "learner.stpes" in text
    assert "store.max_lag" in text


@pytest.mark.parametrize("word", ["learner.steps", "=3", "steps", ""])
def test_a_word_that_is_no_override_says_how_to_write_one(word: str) -> None:
    assert "section.key=value" in refused([word])


@pytest.mark.parametrize("word", ["name.first=x", "learner.steps.more=1", "learner.policy=: [", "learner.steps=[1"])
def test_an_override_that_cannot_be_applied_is_an_error_not_a_traceback(word: str) -> None:
    assert word.split("=")[0] in refused([word])


def test_a_missing_recipe_and_a_folder_are_said_so(tmp_path: Path) -> None:
    assert "there is no recipe at" in refused([], tmp_path / "none.yaml")
    assert str(tmp_path) in refused([], tmp_path)


@pytest.mark.parametrize("text", ["a: [1, 2", "- a\n- b", "", "just words", "\t:"])
def test_bad_yaml_names_the_file(tmp_path: Path, text: str) -> None:
    path = tmp_path / "bad.yaml"
    path.write_text(text)
    assert str(path) in refused([], path)


def test_bytes_that_are_no_text_name_the_file(tmp_path: Path) -> None:
    path = tmp_path / "bad.yaml"
    path.write_bytes(b"name: \xff\xfe")
    assert str(path) in refused([], path)


@pytest.mark.parametrize(
    ("value", "number"), [("2e-6", 2e-6), ("1E-3", 1e-3), ("0.5", 0.5), ("1", 1.0), ("1.5e2", 150.0), (".5e-3", 5e-4)]
)
def test_floats_are_read_as_people_write_them(value: str, number: float) -> None:
    """YAML 1.1 reads 2e-6 as a string."""
    assert load_recipe(None, [f"learner.policy.lr={value}"]).learner.policy.lr == number


def test_overrides_reach_lists_words_and_nothing() -> None:
    recipe = load_recipe(
        None, ["name=3e", "engine.urls=[http://a, http://b]", "sft=null", "learner.policy.betas=[0.8, 0.9]", "seed=7"]
    )
    assert recipe.name == "3e"  # looks like a number with an exponent, and is none
    assert recipe.engine.urls == ("http://a", "http://b")
    assert recipe.sft is None
    assert recipe.learner.policy.betas == (0.8, 0.9)
    assert recipe.seed == 7


def test_without_a_recipe_it_is_the_tiny_one_that_ships() -> None:
    recipe = load_recipe(None)
    assert recipe.name == "tir_tiny"
    assert recipe.model.tiny is not None


def test_a_resolved_recipe_survives_being_saved(tmp_path: Path) -> None:
    recipes = [load_recipe(None, ["learner.policy.lr=2e-6", "learner.eps_low=0.8"]), micro_recipe(tmp_path)]
    for recipe in recipes:
        save_recipe(recipe, tmp_path / "recipe.yaml")
        assert load_recipe(tmp_path / "recipe.yaml") == recipe


@given(
    lr=st.floats(1e-12, 1, allow_subnormal=False),
    seed=st.integers(0, 2**31),
    lag=st.integers(0, 9),
    name=st.text("abcdefgh0123456789e-_", min_size=1, max_size=9),
    decay=st.floats(0, 1),
)
@settings(max_examples=40, deadline=None)
def test_any_recipe_survives_being_saved(
    tmp_path_factory: pytest.TempPathFactory, lr: float, seed: int, lag: int, name: str, decay: float
) -> None:
    data: dict[str, Any] = {
        "name": name,
        "seed": seed,
        "model": {"tiny": MICRO},
        "store": {"max_lag": lag},
        "learner": {"policy": {"lr": lr, "weight_decay": decay}},
    }
    recipe = parse_recipe(data)
    path = tmp_path_factory.mktemp("recipes") / "recipe.yaml"
    save_recipe(recipe, path)
    assert load_recipe(path) == recipe


def test_a_recipes_own_numbers_replace_the_presets_and_nothing_else() -> None:
    preset = get_algorithm("sao")
    own = LearnerConfig(eps_low=0.8, eps_high=3.0, critic_updates=5, critic_trainable="all").resolve()
    assert (own.eps_low, own.eps_high) == (0.8, 3.0)
    assert own.critic is not None
    assert (own.critic.updates, own.critic.trainable) == (5, "all")
    assert (own.gamma, own.alpha, own.lam) == (preset.gamma, preset.alpha, preset.lam)
    assert LearnerConfig().resolve() == preset


def test_zero_is_a_value_and_not_a_missing_one() -> None:
    """`gamma: 0` or `alpha: 0` in a recipe must not fall back to the preset's."""
    assert LearnerConfig(gamma=0.0).resolve().gamma == 0.0
