"""The key that this run's processes share."""

from __future__ import annotations

from agent.doors.keys import run_key
from learner.config import Recipe


def shared_key(recipe: Recipe) -> str:
    """The key that the recipe or $SAO_KEY gives; without one, the run's own, made once and kept in its folder.

    What is started here asks for it, and what has an address in the recipe is shown it. Raises `DoorFault`.
    """
    return run_key(recipe.run_dir, recipe.key_file)
