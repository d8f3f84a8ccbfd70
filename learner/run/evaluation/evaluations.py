"""The evaluations of a run: begun when they are due, in the way of training or beside it, and given back as points."""

from __future__ import annotations

import asyncio
import contextlib
import time
import uuid
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from agent.episode import Episode
from agent.store.protocol import StoreFault
from learner.config import HeldOutSet, Recipe
from learner.run.display import Display
from learner.run.evaluation.figures import set_figures
from learner.run.evaluation.rounds import Round, Rounds
from learner.run.evaluation.running import EvaluationFault, run_evaluation
from learner.run.plots import read_metrics
from learner.services.processes import Services

Export = Callable[[Path, int], Awaitable[None]]
"""Writes the policy as it is, published as that version, to a folder."""


@dataclass(frozen=True)
class Point:
    """What an evaluation gave: a point of the curves at `step`, whose weights were evaluated."""

    step: int
    figures: dict[str, float]


class Evaluations:
    """All evaluations of one session. A round is the sets that are due at one step; where it is run:

        neither key            in the way: `start` returns when it is done, nothing is published meanwhile
        evaluation.share       beside, on the engines of training, whose versions move on under it
        evaluation.engines     beside, on engines of its own, which are given the weights of its step and keep them

        async with Evaluations(...) as evaluations:
            await evaluations.begin(step, version)          # what a session before has cut off, what is due now
            await evaluations.start(step, version, evaluations.due(step))
            for point in evaluations.take(): ...; evaluations.recorded(point)
            await evaluations.finish(step, version)

    Beside, one round runs at a time; one more waits where its weights are kept, and what is due then is left out, in
    words. A round is a folder from its start until its point is recorded, so the next session takes up what was cut
    off: the same weights on engines of its own, elsewhere the weights that it has by then.
    """

    def __init__(
        self,
        recipe: Recipe,
        services: Services,
        folder: Path,
        display: Display,
        stop: asyncio.Event,
        *,
        tasks: Mapping[str, int],
        export: Export,
    ) -> None:
        self._recipe, self._services, self._display, self._stop = recipe, services, display, stop
        self._metrics, self._export, self._tasks = folder / "metrics.jsonl", export, tasks
        self._sets = {one.name: one for one in recipe.held_out_sets if tasks.get(one.name)}
        self._own, self._beside = recipe.evaluation.engines is not None, recipe.evaluation.is_beside
        self._rounds = Rounds(folder / "evaluations")
        self._open: deque[Round] = deque()
        self._task: asyncio.Task[None] | None = None
        self._points: list[Point] = []
        self._evaluated: dict[str, int] = {}
        # An evaluation that was given up must not be found again by the next session under the same name.
        self._session = uuid.uuid4().hex[:8]
        self.episodes: dict[str, list[Episode]] = {}

    async def __aenter__(self) -> Evaluations:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        self._rounds.sweep()

    def due(self, step: int) -> list[str]:
        """The sets whose turn it is at `step`; all of them at the first one and at the last."""
        ends = step in (0, self._recipe.learner.steps)
        return [name for name, one in self._sets.items() if ends or step % one.every == 0]

    async def begin(self, step: int, version: int) -> None:
        """Take up what a session before has cut off, and evaluate what is due at `step` and in no figures yet."""
        again: list[str] = []
        for cut_off in self._rounds.read():
            same = {name for name in cut_off.sets if self._wanted(name) == cut_off.sets[name]}
            resumed = (
                same if self._own and cut_off.step <= step and self._rounds.weights(cut_off.step).exists() else set()
            )
            for name, evaluation in cut_off.ids.items():
                if name not in resumed:
                    with contextlib.suppress(StoreFault):  # another store's
                        await self._services.store.cancel_evaluation(evaluation)
            if resumed:
                cut_off.sets = {name: cut_off.sets[name] for name in resumed}
                self._open.append(cut_off)
                self._display.log(f"going on with the evaluation of step {cut_off.step}")
            else:
                self._rounds.close(cut_off.step)
                again += [name for name in cut_off.sets if name in self._sets]
        recorded = {name for name in self._sets if self._is_recorded(name, step)}
        names = [name for name in self._sets if name in {*again, *self.due(step)} - recorded]
        if same_step := [one for one in self._open if one.step == step]:
            same_step[0].sets |= {name: self._wanted(name) for name in names}
            names = []
        if self._open:
            self._work()
        await self.start(step, version, names)

    async def start(self, step: int, version: int, names: Iterable[str]) -> None:
        """Evaluate the sets `names` with the weights of `step`; beside training it is only begun, or left out."""
        names = list(names)
        if not names:
            return
        if self._beside and len(self._open) > (1 if self._own else 0):
            longest = "evaluation.engines" if self._own else "evaluation.share"
            self._display.log(
                f"no evaluation of step {step}: that of step {self._open[0].step} goes on; evaluate less often, or "
                f"raise {longest}"
            )
            return
        if self._own:
            await self._export(self._rounds.weights(step), version)
        name = f"step {step}, session {self._session}"
        opened = Round(step, version, name, {one: self._wanted(one) for one in names})
        self._rounds.save(opened)
        self._open.append(opened)
        if self._beside:
            self._work()
        else:
            await self._run_open()

    def take(self) -> list[Point]:
        """The points that have come since the last call; raises what went wrong with an evaluation."""
        self.check()
        points, self._points = self._points, []
        return points

    def recorded(self, point: Point) -> None:
        """The point is in the figures: its round is over for every session."""
        self._rounds.close(point.step)
        if not self._own:
            self._rounds.sweep()

    def check(self) -> None:
        """Raise what went wrong with an evaluation beside training, if anything did."""
        if self._task is not None and self._task.done() and not self._task.cancelled():
            self._task.result()

    async def finish(self, step: int, version: int) -> None:
        """Wait for what is under way, and for every set with the weights of `step`; not once the run is to stop."""
        await self._ended()
        if not self._stop.is_set():
            await self.start(step, version, [name for name in self._sets if self._evaluated.get(name) != step])
            await self._ended()

    async def _ended(self) -> None:
        if self._task is not None:
            await self._task

    def _work(self) -> None:
        self.check()
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._run_open(), name="evaluations")

    async def _run_open(self) -> None:
        while self._open and not self._stop.is_set():
            await self._run(self._open[0])
            self._open.popleft()

    async def _run(self, opened: Round) -> None:
        started = time.monotonic()
        if self._own:
            assert self._services.evaluation_fleet is not None
            limit_s = self._recipe.learner.publication_timeout_s
            weights = self._rounds.weights(opened.step)
            await self._services.evaluation_fleet.publish(opened.version, weights, timeout_s=limit_s)
            self._rounds.sweep(keep=opened.step)
        running = [asyncio.create_task(self._evaluate(opened, self._sets[name])) for name in opened.sets]
        try:
            found = dict(zip(opened.sets, await asyncio.gather(*running), strict=True))
        except EvaluationFault:
            self._rounds.close(opened.step)
            raise
        finally:
            for task in running:
                task.cancel()
            await asyncio.gather(*running, return_exceptions=True)
        if not all(found.values()):  # given up
            return
        figures: dict[str, float] = {}
        for name, episodes in found.items():
            self._evaluated[name] = opened.step
            if self._is_recorded(name, opened.step):  # by a session before: a finished run that is started again
                continue
            moved_from = opened.version if self._recipe.evaluation.share is not None else None
            figures |= set_figures(self._sets[name], episodes, moved_from)
        self.episodes |= found
        if figures:
            self._points.append(Point(opened.step, figures | {"time/evaluation_s": time.monotonic() - started}))
        else:
            self._rounds.close(opened.step)

    async def _evaluate(self, opened: Round, chosen: HeldOutSet) -> list[Episode]:
        def began(evaluation: str) -> None:
            opened.ids[chosen.name] = evaluation
            self._rounds.save(opened)

        config = self._recipe.evaluation
        return await run_evaluation(
            self._services.store,
            self._services.check,
            chosen,
            version=opened.version,
            tasks=self._tasks[chosen.name],
            timeout_s=config.timeout_s * len(opened.sets),
            name=opened.name,
            pinned=config.share is None,
            stop=self._stop,
            keep=self._own,
            began=began,
        )

    def _wanted(self, name: str) -> dict[str, Any] | None:
        """What is evaluated of a set, in plain data; None if there is no such set."""
        chosen = self._sets.get(name)
        if chosen is None:
            return None
        return {**chosen.model_dump(mode="json", exclude={"every"}), "tasks": self._tasks[name]}

    def _is_recorded(self, name: str, step: int) -> bool:
        key = f"{self._sets[name].prefix}/success"
        return any(record["step"] == step and record.get(key) is not None for record in read_metrics(self._metrics))
