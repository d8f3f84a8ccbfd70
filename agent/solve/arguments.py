"""What the arguments ask for: which environment, which of its tasks, and what the episode may use."""

from __future__ import annotations

import argparse
import difflib
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from agent.engines.base import EngineHealth
from agent.runtime.settings import RolloutSettings, SamplingConfig, StageLimits
from envs.key_values import WrongWord, key_values
from envs.swe_bench.scaffolds.openhands.library import have_openhands

SWE_BENCH = "sao/SWEBench-v0"
SHORT_OPTIONS = {"source": "instances", "scaffold": "scaffold", "max_turns": "max_turns"}
"""Options that stand for an argument of `SWE_BENCH`."""

COMPARED_IDS = 5000
"""Of so many tasks the ids are searched for one like a mistyped one."""


class WrongArgument(ValueError):
    """An argument that cannot be used; the message names it and says what to write instead."""


@dataclass(frozen=True, slots=True)
class Request:
    """What to watch. `task_id` None: the task that `seed` draws, or the first one."""

    env_id: str
    env_kwargs: dict[str, Any]
    task_id: str | None
    engine: str
    model: Path
    seed: int | None
    temperature: float
    max_context_tokens: int | None
    max_tokens_per_turn: int
    key_file: Path | None = None


def environment_kwargs(options: argparse.Namespace) -> dict[str, Any]:
    """What `options` (`env`, `env_kwargs` and `SHORT_OPTIONS`) say of the environment; raises `WrongArgument`."""
    kwargs = _read(options.env_kwargs)
    for name, key in SHORT_OPTIONS.items():
        value = getattr(options, name)
        if value is None:
            continue
        flag = f"--{name.replace('_', '-')}"
        if options.env != SWE_BENCH:
            raise WrongArgument(
                f"{flag} is short for an argument of {SWE_BENCH}; give {options.env} its own with --env-kwargs"
            )
        if key in kwargs:
            raise WrongArgument(f"{flag} and --env-kwargs {key}= are the same argument: give one of them")
        kwargs[key] = value
    if options.env == SWE_BENCH and kwargs.get("scaffold") == "openhands" and not have_openhands():
        raise WrongArgument(
            "--scaffold: OpenHands' libraries are not installed here (Python 3.12): `make openhands`, then run "
            "this with .venv-openhands/bin/python; or take --scaffold bash"
        )
    return kwargs


def _read(words: Sequence[str]) -> dict[str, Any]:
    try:
        kwargs = key_values(words, "key=value (and TASK_ID before --env-kwargs)")
    except WrongWord as error:
        raise WrongArgument(f"--env-kwargs: {error}") from error
    for key in kwargs:
        if not key.isidentifier():
            raise WrongArgument(f"--env-kwargs: {key!r} is no name of an argument")
    return kwargs


def choose_task(request: Request, task_ids: Sequence[str]) -> int:
    """The task's place in `task_ids`; raises `WrongArgument` for one that is not there."""
    if request.task_id is None:
        return 0 if request.seed is None else random.Random(request.seed).randrange(len(task_ids))
    try:
        return task_ids.index(request.task_id)
    except ValueError:
        near = difflib.get_close_matches(request.task_id, task_ids[:COMPARED_IDS], n=3, cutoff=0.3) or task_ids[:3]
        raise WrongArgument(
            f"TASK_ID: there is no {request.task_id!r} among the {len(task_ids)} tasks of {request.env_id}; "
            f"there is, for example, {', '.join(near)}"
        ) from None


def rollout_settings(request: Request, health: EngineHealth) -> RolloutSettings:
    """What the episode may use; raises `WrongArgument` where the engine cannot give it."""
    context = request.max_context_tokens or health.max_context
    if context > health.max_context:
        raise WrongArgument(
            f"--max-context-tokens: {context} is more than the {health.max_context} of the engine at {request.engine}"
        )
    try:
        sampling = SamplingConfig(temperature=request.temperature, seeded=request.seed is not None)
    except ValueError as error:
        raise WrongArgument(f"--temperature: {request.temperature:g} is no temperature, give 0 or more") from error
    if min(request.max_tokens_per_turn, context) < 1:
        raise WrongArgument("--max-tokens-per-turn and --max-context-tokens must be at least 1")
    # The environment has a wall clock of its own; these limits are for what hangs.
    limits = StageLimits(reset_s=3600, step_s=4 * 3600, episode_s=24 * 3600)
    return RolloutSettings(
        env_id=request.env_id,
        sampling=sampling,
        max_context_tokens=context,
        max_tokens_per_turn=request.max_tokens_per_turn,
        limits=limits,
        worker="agent.solve",
    )
