"""Early stop: whether a run's figures have met `evaluation.stop_at`. Decided from the figures alone, in any session."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from learner.config import Recipe


@dataclass(frozen=True)
class Reached:
    """The target was met by the weights of `step`; `what` says how, in words."""

    step: int
    what: str

    def __str__(self) -> str:
        return f"step {self.step}: {self.what}"


def reached(recipe: Recipe, records: Sequence[Mapping[str, Any]], until: int) -> Reached | None:
    """The first of `records` (lines of metrics, by step) up to the step `until` that meets the recipe's target.

    What a session before has measured of steps that no checkpoint holds is later than `until`: those weights are gone.
    """
    stop_at = recipe.evaluation.stop_at
    if stop_at is None:
        return None
    chosen = next(one for one in recipe.held_out_sets if one.name == stop_at.set)
    for record in records:
        value = record.get(f"{chosen.prefix}/{stop_at.metric}")
        if value is not None and record["step"] <= until and value >= stop_at.value:
            of = f"{chosen.name} " if chosen.name else ""
            return Reached(record["step"], f"{of}{stop_at.metric} {value:.4g}, at least {stop_at.value:g}")
    return None
