"""How a recipe starts its engines: the program, its options, and the GPUs of each."""

from __future__ import annotations

import os
from asyncio.subprocess import Process
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from agent.engines.local.launch import launch_local
from agent.engines.vllm.launch import launch_vllm
from learner.config import Recipe
from learner.faults import LearnerFault

Launch = Callable[[Path, int, int], Awaitable[tuple[Process, str]]]
"""(model folder, version, port; 0: any) -> the process and its URL."""


def launcher(recipe: Recipe, index: int, log_file: Path, key: str) -> Launch:
    """How the recipe starts its `index`-th engine, which asks for `key`."""
    section, hardware = recipe.engine, recipe.hardware
    shared: dict[str, Any] = {
        "log": log_file,
        "key": key,
        "max_sequences": section.max_sequences,
        "max_context": section.max_context,
        "threads": section.threads,
    }

    async def local(model: Path, version: int, port: int) -> tuple[Process, str]:
        return await launch_local(model, version=version, port=port, **shared)

    async def vllm(model: Path, version: int, port: int) -> tuple[Process, str]:
        parallel = hardware.gpus_per_engine if hardware.engine_gpus else 1
        tensor_parallel = ("--tensor-parallel-size", str(parallel)) if parallel > 1 else ()
        return await launch_vllm(
            model,
            version=version,
            port=port,
            **shared,
            dtype=recipe.published_dtype,
            eager=section.vllm_eager,
            environment=section.vllm_environment,
            options=(*tensor_parallel, *section.vllm_options),
            returns_experts=recipe.learner.routing != "own",
            devices=engine_devices(recipe, index, os.environ.get("CUDA_VISIBLE_DEVICES")),
        )

    return local if section.launch == "local" else vllm


def engine_devices(recipe: Recipe, index: int, visible: str | None) -> str | None:
    """CUDA_VISIBLE_DEVICES of the `index`-th launched engine; None: left as it is.

    The learner has the first `hardware.learner_gpus` of the devices that are visible here, the engines those after.
    """
    hardware = recipe.hardware
    if not hardware.engine_gpus:
        return None
    first = hardware.learner_gpus + index * hardware.gpus_per_engine
    names = visible.split(",") if visible else [str(i) for i in range(first + hardware.gpus_per_engine)]
    chosen = names[first : first + hardware.gpus_per_engine]
    if len(chosen) < hardware.gpus_per_engine:
        raise LearnerFault(
            f"engine {index} needs {hardware.gpus_per_engine} GPUs after the learner's {hardware.learner_gpus}, and "
            f"CUDA_VISIBLE_DEVICES names {len(names)}; change hardware, or start engines elsewhere and give engine.urls"
        )
    return ",".join(chosen)
