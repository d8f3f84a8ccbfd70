"""What an environment reports of its episodes is in the figures of a step, and cannot spoil them."""

from __future__ import annotations

import math
from typing import Any

import msgspec
from learner_tools import random_episodes

from learner.run.metrics import MOST_OWN, episode_metrics


def test_numbers_are_averaged_over_the_episodes_that_have_them_and_the_rest_is_left_out() -> None:
    reported: list[dict[str, Any]] = [
        {"probes": 4, "right": True, "kind": "hard", "turns": 3},
        {"probes": 2, "right": False, "score": math.nan, "nested": {"a": 1}},
        {"right": True},
    ]
    episodes = [
        msgspec.structs.replace(episode, metrics=metrics)
        for episode, metrics in zip(random_episodes(3), reported, strict=True)
    ]
    figures = episode_metrics(episodes)
    assert {name: value for name, value in figures.items() if name.startswith("env/")} == {
        "env/probes": 3.0,
        "env/right": 2 / 3,
    }


def test_no_environment_floods_a_tracker() -> None:
    (episode,) = random_episodes(1)
    many = {f"task_{i}": i for i in range(1000)}
    figures = episode_metrics([msgspec.structs.replace(episode, metrics=many)])
    assert sum(name.startswith("env/") for name in figures) == MOST_OWN
