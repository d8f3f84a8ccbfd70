"""The key that this run's processes share."""

from __future__ import annotations

from pathlib import Path

from agent.doors.keys import KEY_FILE, given_key, run_key
from learner.config import Recipe


def shared_key(recipe: Recipe) -> str:
    """The key that the recipe or $SAO_KEY gives; without one, the run's own, made once and kept in its folder.

    What is started here asks for it, and what has an address in the recipe is shown it. Raises `DoorFault`.
    """
    return run_key(recipe.run_dir, recipe.key_file)


def with_own_key(recipe: Recipe, folder: Path) -> Recipe:
    """`recipe` for processes that are no run's: a key that nobody gives is made in `folder`, and no run's folder is."""
    if given_key(recipe.key_file):
        return recipe
    run_key(folder)
    return recipe.model_copy(update={"key_file": folder / KEY_FILE})
