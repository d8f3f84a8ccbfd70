"""How a recipe starts its engines: the program, its options, and the GPUs of each."""

from __future__ import annotations

import os
from asyncio.subprocess import Process
from collections.abc import Awaitable, Callable
from pathlib import Path

from agent.engines.base import EngineFault
from agent.engines.launching import EngineLaunch, devices_after
from learner.config import Recipe
from learner.faults import LearnerFault

Launch = Callable[[Path, int, int], Awaitable[tuple[Process, str]]]
"""(model folder, version, port; 0: any) -> the process and its URL."""


def launcher(recipe: Recipe, index: int, log_file: Path, key: str) -> Launch:
    """How the recipe starts its `index`-th engine, which asks for `key`. Raises `LearnerFault` for too few GPUs."""
    hardware = recipe.hardware
    engine = EngineLaunch.of(
        recipe.engine,
        dtype=recipe.published_dtype,
        parallel=hardware.gpus_per_engine if hardware.engine_gpus else 1,
        devices=engine_devices(recipe, index, os.environ.get("CUDA_VISIBLE_DEVICES")),
        returns_experts=recipe.learner.routing != "own",
    )

    async def start(model: Path, version: int, port: int) -> tuple[Process, str]:
        return await engine.start(model, version=version, log=log_file, key=key, port=port)

    return start


def engine_devices(recipe: Recipe, index: int, visible: str | None) -> str | None:
    """CUDA_VISIBLE_DEVICES of the `index`-th launched engine; None: left as it is.

    The learner has the first `hardware.learner_gpus` of the devices that are visible here, the engines those after.
    """
    hardware = recipe.hardware
    if not hardware.engine_gpus:
        return None
    try:
        return devices_after(hardware.learner_gpus, index, hardware.gpus_per_engine, visible)
    except EngineFault as fault:
        raise LearnerFault(str(fault)) from fault
