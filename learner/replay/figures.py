"""Figures of an update as they were logged and as they came out again. Pure functions."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Comparison:
    """A figure as it was `logged` and `again`; NaN where it was undefined, or not logged at all (`is_logged`)."""

    name: str
    logged: float
    again: float
    is_logged: bool = True

    @property
    def difference(self) -> float:
        """Relative to the larger of the two; 0 for two that are undefined, infinite where one alone is."""
        if not self.is_logged:
            return math.nan
        undefined = [not math.isfinite(value) for value in (self.logged, self.again)]
        if any(undefined):
            return 0.0 if all(undefined) else math.inf
        scale = max(abs(self.logged), abs(self.again))
        return abs(self.logged - self.again) / scale if scale else 0.0


def compare(logged: Mapping[str, Any], again: Mapping[str, float]) -> list[Comparison]:
    """Every figure that came out `again`, in order of name, beside what was `logged` (null: it was no number)."""
    rows = []
    for name in sorted(again):
        value = logged.get(name, math.nan)
        rows.append(
            Comparison(name, math.nan if value is None else float(value), float(again[name]), is_logged=name in logged)
        )
    return rows
