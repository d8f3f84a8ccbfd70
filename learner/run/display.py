"""What a person sees while a run goes on: a live table in a terminal, a line a step elsewhere."""

from __future__ import annotations

import math
import os
import re
import time
from collections import deque
from collections.abc import Iterable
from types import TracebackType
from typing import Any

from rich.console import Console, Group
from rich.live import Live
from rich.panel import Panel
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.table import Table

from learner.config import ENDLESS

_ROWS: tuple[tuple[str, str, str], ...] = (
    ("reward", "rollout/reward", "{:.3f}"),
    ("held-out success", "evaluation/success", "{:.1%}"),
    ("explained variance", "critic/explained_variance", "{:.3f}"),
    ("gated share", "gate/share", "{:.3%}"),
    ("policy lag", "lag/mean", "{:.2f}"),
    ("tokens/s", "engine/tokens_per_s", "{:,.0f}"),
    ("queue length", "queue/ready", "{:.0f}"),
    ("seconds a step", "time/step_s", "{:.2f}"),
)
_OF_SET = re.compile(r"evaluation/([^/]+)/success$")
_OF_ENVIRONMENT = re.compile(r"rollout/([^/]+)/reward$")
_BLOCKS = "▁▂▃▄▅▆▇█"


def sparkline(values: list[float]) -> str:
    """A row of block characters between the smallest and the largest value; empty for no data."""
    finite = [v for v in values if math.isfinite(v)]
    if not finite:
        return ""
    low, high = min(finite), max(finite)
    scale = (len(_BLOCKS) - 1) / (high - low) if high > low else 0.0
    return "".join(_BLOCKS[round((v - low) * scale)] for v in finite)


def rows_of(names: Iterable[str]) -> tuple[tuple[str, str, str], ...]:
    """What is shown of a run that has figures of these names: label, figure, format."""
    environments, sets = [], []
    for name in sorted(names):
        if found := _OF_SET.match(name):
            sets.append((f"held-out {found[1]}", name, "{:.1%}"))
        elif found := _OF_ENVIRONMENT.match(name):
            environments.append((f"reward {found[1]}", name, "{:.3f}"))
    (reward, held_out, *others) = _ROWS
    return (reward, *environments, held_out, *sets, *others)


class Display:
    """Shows stages with their progress and time left, and the figures of the last step with their history.

    with Display("tir_tiny") as display:
        with display.stage("Cold start", total=800) as advance: advance(1, loss=0.4)
        display.step(3, 60, {"rollout/reward": 0.5})
    """

    def __init__(self, title: str, console: Console | None = None) -> None:
        self.console = console or Console(quiet=os.environ.get("RANK", "0") != "0")  # one rank speaks for all
        self._title = title
        self._progress = Progress(
            TextColumn("{task.description:<18}"),
            BarColumn(bar_width=30),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(elapsed_when_finished=False),
            TextColumn("{task.fields[note]}"),
            console=self.console,
        )
        self._history: dict[str, deque[float]] = {}
        self._last: dict[str, Any] = {}
        self._training: TaskID | None = None
        self._live = Live(get_renderable=self._render, console=self.console, refresh_per_second=4)
        self._interactive = self.console.is_terminal
        self._printed = 0.0

    def __enter__(self) -> Display:
        if self._interactive:
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._interactive:
            self._live.stop()

    def log(self, text: str) -> None:
        """A line that stays; text as it is, and where nobody looks at a terminal in one piece."""
        self.console.print(text, highlight=False, markup=False, soft_wrap=not self._interactive)

    def stage(self, name: str, total: int) -> Stage:
        """A stage of known length; see `Stage`."""
        return Stage(self, name, total)

    def step(self, step: int, total: int, figures: dict[str, Any]) -> None:
        """Show the figures of step `step` of `total` (`ENDLESS`: of no end)."""
        ends = total < ENDLESS
        if self._training is None:
            self._training = self._progress.add_task("SAO", total=total if ends else None, completed=step - 1, note="")
        self._progress.update(self._training, completed=step)
        self._note_figures(figures)
        if not self._interactive:
            parts = [f"{label} {form.format(self._last[key])}" for label, key, form in self._rows if key in self._last]
            left = self._progress.tasks[self._training].time_remaining
            self.log(
                f"step {step}{f'/{total}' if ends else ''}  "
                + "  ".join(parts)
                + (f"  left {left:.0f} s" if left else "")
            )

    def evaluation(self, step: int, figures: dict[str, Any]) -> None:
        """Show what an evaluation of the weights of `step` gave while later ones were trained."""
        self._note_figures(figures)
        shown = [f"{label} {form.format(figures[key])}" for label, key, form in rows_of(figures) if key in figures]
        versions = [figures[key] for key in figures if key.endswith(("/version_min", "/version_max"))]
        if versions:
            shown.append(f"tokens of versions {min(versions):.0f} to {max(versions):.0f}")
        self.log(f"evaluation of step {step}  " + "  ".join(shown))

    def _note_figures(self, figures: dict[str, Any]) -> None:
        for _, key, _ in rows_of(figures):
            if isinstance(value := figures.get(key), int | float) and math.isfinite(value):
                self._history.setdefault(key, deque(maxlen=40)).append(float(value))
                self._last[key] = value

    @property
    def _rows(self) -> tuple[tuple[str, str, str], ...]:
        return rows_of(self._last)

    def _note(self, task: TaskID, name: str, done: float, total: float, note: str) -> None:
        self._progress.update(task, completed=done, note=note)
        now = time.monotonic()
        if not self._interactive and (done >= total or now - self._printed > 10):
            self._printed = now
            self.log(f"{name} {done:.0f}/{total:.0f}  {note}")

    def _render(self) -> Panel:
        table = Table.grid(padding=(0, 2))
        for label, key, form in self._rows:
            if key in self._last:
                table.add_row(label, form.format(self._last[key]), sparkline(list(self._history[key])))
        return Panel(Group(self._progress, table), title=self._title, title_align="left")


class Stage:
    """A context manager that yields `advance(count, **figures)`."""

    def __init__(self, display: Display, name: str, total: int) -> None:
        self._display, self._name, self._total, self._done = display, name, total, 0.0
        self._task = display._progress.add_task(name, total=total, note="")

    def __enter__(self) -> Stage:
        return self

    def __call__(self, count: float = 1, **figures: float) -> None:
        self._done += count
        note = "  ".join(f"{k} {v:.3f}" for k, v in figures.items())
        self._display._note(self._task, self._name, self._done, self._total, note)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._display._progress.stop_task(self._task)
