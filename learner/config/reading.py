"""Recipes as files and words: read, overridden by dotted `key=value`, checked, saved."""

from __future__ import annotations

from importlib import resources
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from agent.configuration_errors import wrong_keys
from envs.key_values import WrongWord, override
from learner.config.recipe import Recipe
from learner.config.section import RecipeError

DEFAULT_RECIPE = "tir_tiny.yaml"


def load_recipe(path: Path | None, overrides: list[str] | None = None) -> Recipe:
    """Read a recipe (None: the tiny one that ships with the package) and apply `a.b=value` overrides.

    Raises `RecipeError` with one paragraph that names the file and the key.
    """
    source = path if path is not None else resources.files("recipes") / DEFAULT_RECIPE
    try:
        data = yaml.safe_load(source.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise RecipeError(f"there is no recipe at {path}; recipes ship in the folder recipes/") from error
    except OSError as error:
        raise RecipeError(f"cannot read the recipe {source}: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        raise RecipeError(f"{source} is not a text file in UTF-8: {error}") from error
    except yaml.YAMLError as error:
        raise RecipeError(f"{source} is not valid YAML: {error}") from error
    if not isinstance(data, dict):
        raise RecipeError(f"{source} must hold a mapping of keys, got {type(data).__name__}")
    try:
        override(data, overrides or (), "section.key=value, e.g. learner.steps=20")
    except WrongWord as error:
        raise RecipeError(f"overrides: {error}") from error
    recipe = parse_recipe(data, str(source))
    for word in overrides or []:
        if word.startswith("learner.critic.") and recipe.learner.resolve().critic is None:
            key = word.partition("=")[0]
            raise RecipeError(f"{source}: {key} has no effect with {recipe.learner.algorithm!r}, which has no critic")
    return recipe


def parse_recipe(data: dict[str, Any], source: str = "the recipe") -> Recipe:
    """Check plain data against the schema; `RecipeError` names every wrong key."""
    try:
        return Recipe.model_validate(data)
    except ValidationError as error:
        raise RecipeError(f"{source}: {wrong_keys(error)}") from error


def save_recipe(recipe: Recipe, path: Path) -> None:
    """Write the resolved recipe, so that the run can be repeated from its folder alone."""
    path.write_text(yaml.safe_dump(recipe.model_dump(mode="json"), sort_keys=False), encoding="utf-8")
