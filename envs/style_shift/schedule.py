"""Which style is preferred at which step: a pure function of the global step, written down beforehand.

A phase runs from its first step to the next phase's. Before the first phase there is nothing, after the last one
it goes on for ever; `steps` is the length of the experiment, for whoever draws it or picks a step in it.
"""

from __future__ import annotations

import bisect
import itertools
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

STYLES = ("academic", "cute", "chuunibyou", "classical")
"""The styles a text can be asked for, in the order in which candidates are always listed."""

NONE = "none"
"""What a judge calls a text that is in none of `STYLES`."""

PAPER_PHASES: tuple[dict[str, Any], ...] = (
    {"start": 0, "style": "cute", "candidates": ("academic", "cute", "chuunibyou")},
    {"start": 160, "style": "chuunibyou", "candidates": ("academic", "cute", "chuunibyou")},
    {"start": 300, "style": "classical", "candidates": ("cute", "chuunibyou", "classical")},
)
"""The paper's experiment: 430 steps, changes near 160 and 300, Academic leaves when Classical enters."""

PAPER_STEPS = 430


class ScheduleError(ValueError):
    """A schedule that cannot be; the message says which phase and why."""


@dataclass(frozen=True, slots=True)
class Phase:
    """From step `start` on, `style` is preferred among `candidates` (which hold it)."""

    start: int
    style: str
    candidates: tuple[str, ...]


class Schedule:
    """Phases by global step. Two schedules made alike answer alike; nothing in here changes after it is made."""

    def __init__(self, phases: Sequence[Phase], steps: int = PAPER_STEPS) -> None:
        _check(phases, steps)
        self.phases = tuple(phases)
        self.steps = steps
        self._starts = [phase.start for phase in phases]

    @classmethod
    def from_spec(cls, phases: Sequence[Mapping[str, Any]] | None = None, steps: int = PAPER_STEPS) -> Schedule:
        """Read phases written as mappings (`start`, `style`, and `candidates`: all styles if left out).

        None gives the paper's. Raises `ScheduleError` for an unknown key or style, or phases out of order.
        """
        return cls([_phase(i, raw) for i, raw in enumerate(PAPER_PHASES if phases is None else phases)], steps)

    @classmethod
    def seeded(cls, seed: int, *, phases: int = 3, steps: int = PAPER_STEPS) -> Schedule:
        """A schedule drawn from `seed`: equal phases, every style a candidate, the preferred one changing each time."""
        if not 1 <= phases <= steps:
            raise ScheduleError(f"{phases} phases do not fit into {steps} steps")
        rng, style, drawn = random.Random(seed), "", []
        for index in range(phases):
            style = rng.choice([other for other in STYLES if other != style])
            drawn.append(Phase(index * steps // phases, style, STYLES))
        return cls(drawn, steps)

    def index(self, step: int) -> int:
        """Which phase holds in `step` (0 is the first). Raises `ValueError` below 0."""
        if step < 0:
            raise ValueError(f"a global step is 0 or more, not {step}")
        return bisect.bisect_right(self._starts, step) - 1

    def at(self, step: int) -> Phase:
        """The phase of `step`. Raises `ValueError` below 0."""
        return self.phases[self.index(step)]

    @property
    def changes(self) -> tuple[int, ...]:
        """The steps in which another style becomes the preferred one: the first of each new phase."""
        pairs = itertools.pairwise(self.phases)
        return tuple(after.start for before, after in pairs if before.style != after.style)


def _phase(index: int, raw: Mapping[str, Any]) -> Phase:
    unknown = set(raw) - {"start", "style", "candidates"}
    if unknown or "start" not in raw or "style" not in raw:
        raise ScheduleError(f"phase {index}: start, style and candidates are its keys, not {sorted(raw)}")
    candidates = raw.get("candidates", STYLES)
    if isinstance(candidates, str) or not set(candidates) <= set(STYLES):
        raise ScheduleError(f"phase {index}: candidates are some of {', '.join(STYLES)}, not {candidates!r}")
    # In one order, whatever the recipe's: the place in a list must not tell the target.
    return Phase(raw["start"], raw["style"], tuple(style for style in STYLES if style in candidates))


def _check(phases: Sequence[Phase], steps: int) -> None:
    if not phases:
        raise ScheduleError("a schedule has at least one phase")
    if steps < 1:
        raise ScheduleError(f"an experiment has at least one step, not {steps}")
    previous = -1
    for index, phase in enumerate(phases):
        if type(phase.start) is not int or phase.start <= previous or (index == 0 and phase.start != 0):
            raise ScheduleError(f"phase {index}: starts are whole numbers that grow from 0, not {phase.start!r}")
        if phase.style not in phase.candidates:
            raise ScheduleError(f"phase {index}: the preferred style {phase.style!r} is not one of its candidates")
        previous = phase.start
