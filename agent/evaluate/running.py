"""`Session`: the samples that are still wanted, run side by side, each kept as it ends."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence

from agent.episode import StopReason
from agent.evaluate.actors import Actor
from agent.evaluate.config import Evaluation, EvaluationError
from agent.evaluate.folder import ResultsFolder
from agent.evaluate.sample import Sample
from agent.runtime.settings import ConfigError, EnvConfig
from agent.runtime.slot_environments import SlotEnvironments
from envs import make_core
from envs.core import AsyncEnv, EnvironmentFault

log = logging.getLogger(__name__)

CLOSE_S = 30.0
"""How long an environment may take to close."""
_KEY = ("evaluate", "")
Job = tuple[int, str, int]
"""A task's index in the environment, its id, and which of its samples."""


def jobs(
    task_ids: Sequence[str], chosen: Sequence[int], samples: int, done: Mapping[tuple[str, int], Sample]
) -> list[Job]:
    """What is still to run: every sample of the tasks `chosen` that is not in `done`, or is a fault there.

    All first samples come before any second one, so that what there is at any moment is as even as can be.
    """
    wanted = ((index, task_ids[index], number) for number in range(samples) for index in chosen)
    return [job for job in wanted if (found := done.get(job[1:])) is None or found.reward is None]


def most_faults_in_a_row(concurrency: int) -> int:
    """So many faults, one after the other, are no accident any more."""
    return max(10, 2 * concurrency)


class Session:
    """Runs jobs at the evaluation's concurrency.

        session = Session(evaluation, actor, folder, ended=display.sample)
        await session.run(todo, stop)          # returns when all are run, or soon after `stop` is set

    Each worker has an environment of its own, made when it is first needed and made anew after a fault. Once `stop` is
    set, samples in flight are given up (their requests are cancelled, their environments closed); those that had ended
    are kept, and so is one that is just being written.
    """

    def __init__(
        self,
        evaluation: Evaluation,
        actor: Actor,
        folder: ResultsFolder,
        *,
        ended: Callable[[Sample], None] = lambda sample: None,
        make: Callable[[EnvConfig], AsyncEnv] = lambda config: make_core(config.id, **config.kwargs),
    ) -> None:
        self._evaluation, self._actor, self._folder = evaluation, actor, folder
        self._ended, self._make = ended, make
        self._disk = asyncio.Lock()
        self._writing: set[asyncio.Task[None]] = set()
        self._faults = 0
        self._told: set[str] = set()

    async def run(self, todo: Iterable[Job], stop: asyncio.Event) -> None:
        """Run `todo`. Raises `EvaluationError` for what makes it useless to go on; all is closed when it returns."""
        pending = deque(todo)
        workers = min(self._evaluation.pacing.concurrency, len(pending))
        work = asyncio.create_task(self._all(pending, workers), name="samples")
        stopped = asyncio.create_task(stop.wait(), name="stop")
        try:
            await asyncio.wait({work, stopped}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in (work, stopped):
                task.cancel()
            await asyncio.gather(work, stopped, return_exceptions=True)
            await asyncio.gather(*self._writing, return_exceptions=True)
        if not work.cancelled() and (error := work.exception()) is not None:
            raise _first(error)

    async def _all(self, pending: deque[Job], workers: int) -> None:
        async with asyncio.TaskGroup() as group:
            for _ in range(workers):
                group.create_task(self._worker(pending))

    async def _worker(self, pending: deque[Job]) -> None:
        environments = SlotEnvironments(self._make, self._evaluation.pacing.reset_s)
        try:
            while pending:
                sample = await self._one(environments, *pending.popleft())
                await self._keep(sample)
                if sample.reward is None:
                    await environments.discard(_KEY, CLOSE_S)
                    self._note_fault(sample)
                else:
                    self._faults = 0
        finally:
            await environments.close(CLOSE_S)

    async def _one(self, environments: SlotEnvironments, index: int, task_id: str, number: int) -> Sample:
        began = time.monotonic()
        try:
            env = await environments.get(_KEY, self._evaluation.env)
        except EnvironmentFault as fault:
            return Sample(
                task_id,
                number,
                StopReason.INFRASTRUCTURE_ERROR.value,
                fault=f"EnvironmentFault: {fault}",
                seconds=time.monotonic() - began,
                finished_at=time.time(),
            )
        except ConfigError as error:
            raise EvaluationError(str(error)) from error
        return await self._actor.sample(index, task_id, number, env)

    async def _keep(self, sample: Sample) -> None:
        """On the disk, whatever happens to whoever waits for it."""
        writing = asyncio.create_task(self._write(sample))
        self._writing.add(writing)
        writing.add_done_callback(self._writing.discard)
        await asyncio.shield(writing)

    async def _write(self, sample: Sample) -> None:
        async with self._disk:
            try:
                await asyncio.to_thread(self._folder.append, sample)
            except OSError as error:
                raise EvaluationError(
                    f"--out: cannot write into {self._folder.path}: {error.strerror or error}; what was kept before is "
                    "there, and the same command goes on"
                ) from error
        self._ended(sample)

    def _note_fault(self, sample: Sample) -> None:
        self._faults += 1
        most = most_faults_in_a_row(self._evaluation.pacing.concurrency)
        if sample.fault not in self._told:  # a broken machine says the same of every sample
            self._told.add(sample.fault)
            log.warning("task %s, sample %d: %s", sample.task_id, sample.number, sample.fault)
        if self._faults >= most:
            last = sample.fault.rstrip(".")
            raise EvaluationError(
                f"{self._faults} samples in a row ended as faults, so it stops here; the last: {last}. The same "
                "command runs them again"
            )


def _first(error: BaseException) -> BaseException:
    """The error that ended the others, out of its groups; an `EvaluationError` if there is one."""
    if not isinstance(error, BaseExceptionGroup):
        return error
    inner = [_first(one) for one in error.exceptions]
    return next((one for one in inner if isinstance(one, EvaluationError)), inner[0])
