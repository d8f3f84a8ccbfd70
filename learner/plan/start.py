"""May this run start here? Its processes against the recipe's `hardware`, and its plan against their memory."""

from __future__ import annotations

import torch

from learner.config import Recipe, RecipeError
from learner.parallel.layout import Layout
from learner.plan.phases import make_plan


def check_start(recipe: Recipe, processes: int) -> None:
    """Raise an error of one paragraph where `recipe`, started in `processes` processes, could not do what it says.

    A folder without a model is left to whoever loads it.
    """
    hardware = recipe.hardware
    Layout.of(hardware, processes)
    if hardware.learner_gpus not in (0, processes):
        raise RecipeError(
            f"hardware.learner_gpus: the recipe is for {hardware.learner_gpus} GPUs, a process on each, and this was "
            f"started in {processes}; start it with `accelerate launch --num_processes {hardware.learner_gpus} -m "
            "learner.train RECIPE`, or say what there is (0: the CPU)"
        )
    if hardware.learner_gpus and not torch.cuda.is_available():
        raise RecipeError(
            f"hardware.learner_gpus: the recipe is for {hardware.learner_gpus} GPUs, and no GPU is seen here; "
            "set it to 0 for the CPU"
        )
    if recipe.model.path is None or (recipe.model.path / "config.json").exists():
        make_plan(recipe, processes).check()
