"""What a shell, a launcher or a missing package would change of a run is refused at its start.

`accelerate launch` hands its settings on in variables that Accelerate reads by itself: some of them change numbers.
"""

from __future__ import annotations

import os
from collections.abc import Mapping

from accelerate.tracking import LOGGER_TYPE_TO_CLASS, get_available_trackers

from learner.config import Recipe, RecipeError

_PREFIX = "ACCELERATE_"
# Where and how it runs, what it says; everything else changes what is computed, or may.
_HARMLESS = {
    "BYPASS_DEVICE_MAP",
    "CONFIG_FILE",
    "CPU_AFFINITY",
    "DEBUG_MODE",
    "DEBUG_RDV_FILE",
    "DISABLE_RICH",
    "ENABLE_RICH",
    "IN_TPU_POD",
    "LOG_LEVEL",
    "NUM_PROCESSES",
    "TORCH_DEVICE",
    "USE_CPU",
}
_NEUTRAL = {"", "0", "no", "none", "false", "default"}
_ONE = {"GRADIENT_ACCUMULATION_STEPS"}  # where 1 is what changes nothing
_PACKAGES = {"comet_ml": "comet-ml"}


def check_environment(recipe: Recipe, environment: Mapping[str, str] | None = None) -> None:
    """Raise `RecipeError` for a variable that would change the run behind the recipe's back, or an unusable tracker."""
    precision = "bf16" if recipe.model.computes_in == "bfloat16" else "no"
    for name, value in sorted((os.environ if environment is None else environment).items()):
        setting, word = name.removeprefix(_PREFIX), value.strip().lower()
        if setting == name or setting in _HARMLESS or word in _NEUTRAL or (setting in _ONE and word == "1"):
            continue
        if setting == "MIXED_PRECISION" and word == precision:
            continue
        key = {
            "GRADIENT_ACCUMULATION_STEPS": "learner.micro_batch_tokens",
            "MIXED_PRECISION": "model.compute_dtype",
            "GRADIENT_CLIPPING": "learner.policy.clip_norm",
        }.get(setting)
        raise RecipeError(
            f"{name}={value} is set in the environment, by hand or by accelerate launch. The recipe alone says what is "
            f"computed{f' (see {key})' if key else ''}: unset {name}, or take it out of the launcher's configuration"
        )
    _check_tracker(recipe.learner.tracker)


def _check_tracker(tracker: str | None) -> None:
    if tracker is None:
        return
    if tracker not in LOGGER_TYPE_TO_CLASS:
        raise RecipeError(
            f"learner.tracker: {tracker!r} is no tracker that Accelerate knows; choose one of "
            f"{', '.join(sorted(LOGGER_TYPE_TO_CLASS))}, or null for metrics.jsonl alone"
        )
    if tracker not in [str(found) for found in get_available_trackers()]:
        raise RecipeError(
            f"learner.tracker: {tracker} is not installed here: pip install {_PACKAGES.get(tracker, tracker)}, or "
            "choose tensorboard, or null for metrics.jsonl alone"
        )
