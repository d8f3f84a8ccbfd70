"""How far a study is: a bar for all updates that are left, one for each run under way; lines where nobody looks."""

from __future__ import annotations

import time
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from learner.study.running import Watch

_EVERY_S = 30.0


class StudyDisplay:
    """A context manager whose `watch` a `Runner` tells.

    with StudyDisplay("main", runs=8, updates=1600) as display:
        runner.watch = display.watch
    """

    def __init__(self, title: str, *, runs: int, updates: int, console: Console | None = None) -> None:
        self.console = console or Console()
        self._progress = Progress(
            TextColumn("{task.description:<34}"),
            BarColumn(bar_width=30),
            TextColumn("{task.fields[note]}"),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(elapsed_when_finished=False),
            console=self.console,
            disable=not self.console.is_terminal,
        )
        self._all = self._progress.add_task(f"{title}: {runs} runs", total=updates, note=f"0/{updates} updates")
        self._own: dict[str, TaskID] = {}
        self._done: dict[str, int] = {}
        self._updates = updates
        self._started = self._told = time.monotonic()
        self.watch = Watch(self._begun, self._moved, self._ended)

    def __enter__(self) -> StudyDisplay:
        self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._progress.stop()

    def _begun(self, name: str, total: int) -> None:
        self._own[name] = self._progress.add_task(name, total=total or None, note="")
        self._say(f"{name}: begun")

    def _moved(self, name: str, done: int) -> None:
        if name not in self._own or not done:
            return
        self._done[name] = done
        self._progress.update(self._own[name], completed=done, note=f"{done} updates")
        made = sum(self._done.values())
        self._progress.update(self._all, completed=made, note=f"{made}/{self._updates} updates")
        if time.monotonic() - self._told > _EVERY_S and made:
            self._told = time.monotonic()
            left = (self._told - self._started) / made * (self._updates - made)
            self._say(f"{made} of {self._updates} updates, left {left / 60:.0f} min; {name} is at {done}")

    def _ended(self, name: str, how: str) -> None:
        if name in self._own:
            self._progress.remove_task(self._own.pop(name))
        self._say(f"{name}: {how}")

    def _say(self, text: str) -> None:
        if not self.console.is_terminal or ": " in text:
            self.console.print(text, highlight=False, markup=False, soft_wrap=not self.console.is_terminal)
