"""What a person sees in the terminal: how far it is while it runs, and the figures at its end."""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
from collections.abc import AsyncIterator, Callable, Iterable
from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from rich.table import Table
from rich.text import Text

from agent.evaluate.figures import Summary, passed
from agent.evaluate.report import interval
from agent.evaluate.sample import Sample

REFRESH_S = 0.5
LINE_EVERY_S = 30.0
"""Between two lines, where the output is no terminal."""
MOST_TASKS = 20
"""Rows of the table by task; the report has all."""


class Score:
    """The running score: plain means over what has ended, faults left out."""

    def __init__(self, passes_at: float | None, samples: Iterable[Sample] = ()) -> None:
        self._passes_at = passes_at
        self.ended = self.graded = self.passes = self.faults = self.tokens = 0
        self._reward = 0.0
        for sample in samples:
            self.add(sample)

    def add(self, sample: Sample) -> None:
        """Count one that has ended."""
        self.ended += 1
        self.tokens += sample.tokens.completion
        if sample.reward is None:
            self.faults += 1
            return
        self.graded += 1
        self._reward += sample.reward
        self.passes += passed(sample, self._passes_at)

    def __str__(self) -> str:
        if not self.graded:
            return f"faults {self.faults}" if self.faults else ""
        faults = f", faults {self.faults}" if self.faults else ""
        return f"reward {self._reward / self.graded:.3f}, passed {self.passes / self.graded:.1%}{faults}"


class Display:
    """A line of progress: done of all, samples a minute, time left, the score so far, and whether it is being held.

    async with Display(console, name, total, passes_at, done).shown(actor_held_s) as display:
        display.sample(sample)
    """

    def __init__(
        self, console: Console, name: str, total: int, passes_at: float | None, done: Iterable[Sample] = ()
    ) -> None:
        self._console, self._name, self._total = console, name, total
        self.score = Score(passes_at, done)
        self._began, self._had = time.monotonic(), self.score.ended
        self._progress = Progress(
            TextColumn("{task.description}", markup=False),
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
            TextColumn("{task.fields[pace]}", markup=False, style="dim"),
            TextColumn("{task.fields[score]}", markup=False),
            TextColumn("{task.fields[held]}", markup=False, style="yellow"),
            console=console,
            transient=True,
            disable=not console.is_terminal,
        )
        self._task = self._progress.add_task(name, total=total, completed=self._had, pace="", score="", held="")

    @contextlib.asynccontextmanager
    async def shown(self, held_s: Callable[[], float]) -> AsyncIterator[Display]:
        """Show it while the context is open."""
        ticking = asyncio.create_task(self._tick(held_s), name="display")
        try:
            with self._progress:
                yield self
        finally:
            ticking.cancel()
            await asyncio.gather(ticking, return_exceptions=True)

    def sample(self, sample: Sample) -> None:
        """One sample has ended."""
        self.score.add(sample)
        self._progress.update(self._task, advance=1, pace=self._pace(), score=str(self.score))

    async def _tick(self, held_s: Callable[[], float]) -> None:
        said_at = time.monotonic()
        while True:
            await asyncio.sleep(REFRESH_S)
            held = held_s()
            told = f"asked to wait {math.ceil(held)} s" if held else ""
            self._progress.update(self._task, pace=self._pace(), held=told)
            if not self._console.is_terminal and time.monotonic() - said_at >= LINE_EVERY_S:
                said_at = time.monotonic()
                self._console.print(self._line(), highlight=False, markup=False, soft_wrap=True)

    def _pace(self) -> str:
        """Samples a minute and the time left, of this session; "" before its first sample."""
        ended, seconds = self.score.ended - self._had, max(time.monotonic() - self._began, 1e-3)
        if not ended:
            return ""
        minutes, rest = divmod(round((self._total - self.score.ended) * seconds / ended), 60)
        return f"{60 * ended / seconds:.1f}/min, {minutes}:{rest:02d} left"

    def _line(self) -> str:
        parts = [f"{self._name}: {self.score.ended} of {self._total}", self._pace(), str(self.score)]
        return ", ".join(part for part in parts if part)


def show(console: Console, summary: Summary, name: str, report: Path) -> None:
    """The figures, the tasks that fared worst, and where the rest is."""
    table = Table("", "", "95 %", title=escape(name), title_justify="left", show_header=False)
    table.add_row("samples", f"{summary.samples} of {summary.wanted}", f"{summary.tasks} tasks")
    if summary.reward is not None:
        table.add_row("mean reward", interval(summary.reward), summary.reward.method)
    for rate in summary.passes:
        estimate = rate.estimate
        table.add_row(f"pass@{rate.k}", interval(estimate), f"{estimate.method}, {estimate.tasks} tasks")
    cut = sum(summary.truncated.values())
    share = f"{cut / summary.samples:.1%}" if summary.samples else "none yet"
    table.add_row("truncated", share, ", ".join(f"{reason} {count}" for reason, count in summary.truncated.items()))
    kinds = ", ".join(f"{escape(kind)} {count}" for kind, count in summary.fault_kinds.items())
    table.add_row("faults", str(summary.faults), kinds)
    tokens = summary.tokens
    table.add_row("tokens", f"{tokens.prompt:,} read, {tokens.completion:,} written", f"{summary.requests} requests")
    for family, estimate in summary.families:
        table.add_row(f"reward, {escape(family)}", interval(estimate), f"{estimate.method}, {estimate.tasks} tasks")
    console.print(table)
    if len(summary.by_task) > 1 and summary.samples + summary.faults:
        console.print(_by_task(summary))
    console.print(Text(f"report: {report}"), soft_wrap=True)


def _by_task(summary: Summary) -> Table:
    begun = [task for task in summary.by_task if task.samples or task.faults]
    ordered = sorted(begun, key=lambda task: (task.mean_reward is not None, task.mean_reward or 0.0))
    shown = ordered[:MOST_TASKS]
    title = "by task" if len(shown) == len(ordered) else f"the {len(shown)} tasks that fared worst, of {len(ordered)}"
    table = Table("task", "passed", "mean reward", "truncated", "faults", "turns", "tokens", title=title)
    for task in shown:
        table.add_row(
            escape(task.task_id),
            f"{task.passed}/{task.samples}",
            "" if task.mean_reward is None else f"{task.mean_reward:.3f}",
            str(task.truncated),
            str(task.faults),
            f"{task.turns:.1f}",
            f"{task.tokens:,}",
        )
    return table
