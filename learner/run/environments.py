"""Can the environments of a recipe be made? Asked at the start, and not after the cold start."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

from agent.runtime.settings import EnvConfig
from envs import make_core
from learner.config import Recipe, RecipeError


def check_environments(recipe: Recipe) -> None:
    """Raise `RecipeError`, which names the key, for an environment that cannot be made as the recipe has it.

    Making one starts nothing. What a run does not use here (a server's or another store's) is not asked for.
    """
    if recipe.learner.online or recipe.store.url:
        return
    for key, config in _used(recipe):
        # Tools are the runtime's to have, and it may have another interpreter.
        arguments = config.kwargs if recipe.runtime.python is not None else config.arguments
        try:
            core = make_core(config.id, **arguments)
        except (ValueError, TypeError, ImportError, OSError) as error:
            raise RecipeError(f"{key}: cannot make {config.id}: {error}") from error
        asyncio.run(core.aclose())


def _used(recipe: Recipe) -> Iterator[tuple[str, EnvConfig]]:
    if recipe.environments:
        yield from ((f"environments.{index}", one.env) for index, one in enumerate(recipe.environments))
    else:
        yield "env", recipe.env
    if recipe.evaluation.env is not None:
        yield "evaluation.env", recipe.evaluation.env
    for index, chosen in enumerate(recipe.evaluation.sets):
        if chosen.env is not None:
            yield f"evaluation.sets.{index}.env", chosen.env
