"""The tracker of a run: started with the whole recipe, and in a session that goes on as the same run."""

from __future__ import annotations

import secrets
from collections.abc import Callable
from pathlib import Path
from typing import Any

from accelerate import Accelerator

from learner.config import Recipe

PROJECT = "sao"
_ID_FILE = "tracker_run"

# How each tracker is told that this is a run which it may know already. tensorboard goes by its folder.
_SAME_RUN: dict[str, Callable[[str, str], dict[str, Any]]] = {
    "comet_ml": lambda _, run: {"experiment_key": run.ljust(32, "0"), "mode": "get_or_create"},
    "swanlab": lambda name, run: {"experiment_name": name, "id": run, "resume": "allow"},
    "trackio": lambda name, run: {"name": f"{name}-{run}", "resume": "allow"},
    "wandb": lambda name, run: {"name": name, "id": run, "resume": "allow"},
}


def start_tracker(recipe: Recipe, accelerator: Accelerator, folder: Path) -> None:
    """Start the tracker that `accelerator` was made with, if any; `folder` is the run's and keeps its id."""
    tracker = recipe.learner.tracker
    if tracker is None:
        return
    same_run = _SAME_RUN.get(tracker)
    options = {tracker: same_run(recipe.name, run_id(folder))} if same_run else None
    accelerator.init_trackers(PROJECT, config=flat(recipe.model_dump(mode="json")), init_kwargs=options)


def step_of(tracker: str | None, step: int, now: int) -> int:
    """The step to log figures of `step` under, once the run is at `now`: most trackers drop what goes back."""
    return step if tracker in (None, "tensorboard") else max(step, now)


def run_id(folder: Path) -> str:
    """What trackers know this run by: made once, and kept with the run."""
    path = folder / _ID_FILE
    if not path.exists():
        path.write_text(secrets.token_hex(16)[:21])  # swanlab takes exactly 21 characters
    return path.read_text().strip()


def flat(section: dict[str, Any], prefix: str = "") -> dict[str, int | float | str | bool]:
    """A recipe by dotted keys, as it is overridden; lists as text, and what is not set left out."""
    found: dict[str, int | float | str | bool] = {}
    for key, value in section.items():
        if isinstance(value, dict):
            found |= flat(value, f"{prefix}{key}.")
        elif value is not None:
            found[prefix + key] = value if isinstance(value, bool | int | float | str) else str(value)
    return found
