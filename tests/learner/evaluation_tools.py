"""The smallest recipe of the tests with several environments and several evaluation sets."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml
from run_tools import write_run


def write_mixed(folder: Path, *, steps: int, **evaluation: Any) -> Path:
    """`write_run` with environments "many" and "few" (weights 3 and 1) and sets "plain" and "often"; its path.

    "plain" is greedy and evaluated every 2 steps, "often" has 4 samples of each of 2 tasks, every step. `evaluation`:
    further keys of that section.
    """
    path = write_run(folder, steps=steps)
    recipe = yaml.safe_load(path.read_text())
    env, held_out = recipe.pop("env"), recipe["evaluation"].pop("env")
    recipe["environments"] = [
        {"name": "many", "weight": 3, **env},
        {"name": "few", **env, "kwargs": {**env["kwargs"], "max_turns": 3}},
    ]
    recipe["evaluation"] |= {
        "env": held_out,
        "sets": [
            {"name": "plain", "tasks": 4, "sampling": {"temperature": 0.0}, "max_tokens_per_turn": 20, "every": 2},
            {"name": "often", "tasks": 2, "samples": 4, "every": 1},
        ],
        **evaluation,
    }
    recipe["value_pretraining"] = None
    path.write_text(yaml.safe_dump(recipe))
    return path
