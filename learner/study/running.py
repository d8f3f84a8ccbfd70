"""Runs of a study as child processes: several at once, with a budget of time, resumed where they were stopped.

A run's life: absent ──cold start──▶ (value pretraining)──▶ training ──all updates──▶ CSV, and its folder goes
                                                              └──stopped──▶ its folder stays, and the next call goes on

Cold start and value pretraining are made once a seed, under `starts/`, and copied into each run's folder: every arm
begins with the same policy and, if it has one, the same critic.
"""

from __future__ import annotations

import asyncio
import contextlib
import datetime
import hashlib
import json
import os
import shutil
import signal
import sys
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from agent.child_processes import log_tail, start_child, stop_child
from agent.simulate.recovery import by_step
from agent.simulate.runs import read_csv
from learner.faults import LearnerFault
from learner.run.plots import read_metrics
from learner.study.arms import Job, shipped
from learner.study.machine import machine
from learner.study.record import read_record, record_path, rows_of, write_record

_GRACE_S = 60.0  # a learner that is stopped finishes its step and its checkpoint
_LOOK_S = 1.0


class OutOfTime(Exception):
    """The budget is used up; what was under way goes on with the next call."""


@dataclass
class Watch:
    """What a person sees; any of these may do nothing."""

    begun: Callable[[str, int], None] = lambda name, total: None
    moved: Callable[[str, int], None] = lambda name, done: None
    ended: Callable[[str, str], None] = lambda name, how: None


@dataclass
class Runner:
    """Runs jobs, `parallel` at a time, until all are done or `deadline` (of `time.monotonic`) has come.

    `results`: the folder with a folder of CSVs for each study. `runs`: where runs lie meanwhile. What cannot be run is
    in `failed`, by name; what was stopped in `unfinished`.
    """

    results: Path
    runs: Path
    parallel: int = 1
    deadline: float | None = None
    keep: bool = False
    watch: Watch = field(default_factory=Watch)
    python: Sequence[str] = (sys.executable,)
    failed: dict[str, str] = field(default_factory=dict)
    unfinished: list[str] = field(default_factory=list)
    _starting: dict[str, asyncio.Lock] = field(default_factory=dict)

    def path(self, job: Job) -> Path:
        """Where the job's CSV is, once it is finished."""
        return record_path(self.results / job.study.name, job.arm.name, job.seed)

    def missing(self, jobs: Sequence[Job]) -> list[Job]:
        """Those that have no CSV yet, or one of a shorter run, which the longer one will replace."""
        return [job for job in jobs if not self._is_finished(job)]

    def _is_finished(self, job: Job) -> bool:
        path = self.path(job)
        return path.is_file() and read_record(path).rows[-1]["step"] >= job.updates

    async def run(self, jobs: Sequence[Job]) -> None:
        """Run what is missing of `jobs`. A job that fails does not keep the others from running."""
        left = asyncio.Semaphore(self.parallel)

        async def one(job: Job) -> None:
            async with left:
                try:
                    await self._one(job)
                except OutOfTime:
                    self.unfinished.append(job.name)
                except LearnerFault as error:
                    self.failed[job.name] = str(error)
                    self.watch.ended(job.name, "failed")

        async with asyncio.TaskGroup() as group:
            for job in self.missing(jobs):
                group.create_task(one(job))

    def folder(self, job: Job) -> Path:
        """The run's folder, while it is not finished; of other words there is another."""
        return self.runs / job.study.name / f"{job.name}-{_digest(job.words)}"

    async def _one(self, job: Job) -> None:
        if self.deadline is not None and time.monotonic() >= self.deadline:
            raise OutOfTime
        self.watch.begun(job.name, job.updates)
        folder = self.folder(job)
        rows = await (self._simulate if job.study.runner == "simulate" else self._train)(job, folder)
        facts = {
            "study": job.study.name,
            "command": f"python -m learner.train recipes/{job.study.recipe} " + " ".join(job.words),
            "machine": machine(),
            "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
            "seconds": f"{sum(row.get('seconds', 0.0) for row in rows):.0f}",
        }
        if job.study.runner == "simulate":
            facts["command"] = " ".join(["python", *self._simulation(job, Path("OUT"))])
        await asyncio.to_thread(write_record, self.path(job), rows, facts)
        if not self.keep:
            await asyncio.to_thread(shutil.rmtree, folder, ignore_errors=True)
        self.watch.ended(job.name, "done")

    async def _train(self, job: Job, folder: Path) -> list[dict[str, float]]:
        for part, begun in [("sft", await self._start(job)), ("value", await self._values(job))]:
            if begun is not None:
                await asyncio.to_thread(_copied, begun, folder / part)
        words = ["-m", "learner.train", str(shipped(job.study.recipe)), *job.words]
        await self._child(job.name, [*words, *_placed(folder)], folder, lambda: _updates_in(folder))
        rows = rows_of(await asyncio.to_thread(read_metrics, folder / "metrics.jsonl"))
        if not rows or rows[-1]["step"] < job.updates:
            raise LearnerFault(f"{folder} ended without its {job.updates} updates; see {folder / 'study.log'}")
        return rows

    async def _start(self, job: Job) -> Path | None:
        """The cold-started policy of the job's seed, made if it is not there."""
        if job.recipe().sft is None:
            return None
        said = job.start_words
        folder = self.runs / "starts" / f"policy-seed{job.seed}-{_digest([job.study.recipe, *said])}"
        words = ["-m", "learner.sft", str(shipped(job.study.recipe)), f"seed={job.seed}", *said]
        async with self._starting.setdefault(folder.name, asyncio.Lock()):
            if not (folder / "sft" / "config.json").exists():
                await self._begin(f"cold start of seed {job.seed}", words, folder)
        return folder / "sft"

    async def _values(self, job: Job) -> Path | None:
        """The pretrained critic for the job's seed and its words of value pretraining, made if it is not there."""
        if not job.recipe().pretrains_critic:
            return None
        policy, said = await self._start(job), job.value_words
        folder = self.runs / "starts" / f"values-seed{job.seed}-{_digest([job.study.recipe, *said])}"
        words = ["-m", "learner.pretrain_value", str(shipped(job.study.recipe)), f"seed={job.seed}", *said]
        async with self._starting.setdefault(folder.name, asyncio.Lock()):
            if not (folder / "value" / "config.json").exists():
                if policy is not None:
                    await asyncio.to_thread(_copied, policy, folder / "sft")
                await self._begin(f"value pretraining of seed {job.seed}", words, folder)
        return folder / "value"

    async def _begin(self, name: str, words: list[str], folder: Path) -> None:
        self.watch.begun(name, 0)
        await self._child(name, [*words, *_placed(folder)], folder, lambda: 0)
        self.watch.ended(name, "made")

    def _simulation(self, job: Job, folder: Path) -> list[str]:
        settings = ("seed=", "learner.steps=", "learner.algorithm=")
        words = [word for word in job.words if not word.startswith(settings)]
        where = ["--methods", job.algorithm, "--seeds", str(job.seed), "--out", str(folder)]
        return ["-m", "agent.simulate", str(shipped(job.study.recipe)), *words, *where]

    async def _simulate(self, job: Job, folder: Path) -> list[dict[str, float]]:
        begun, start = await self._start(job), folder / "runs" / "start" / "sft"
        if begun is not None:
            await asyncio.to_thread(_copied, begun, start)
        await self._child(job.name, self._simulation(job, folder), folder, lambda: 0)
        found = await asyncio.to_thread(_matching, folder, f"{job.algorithm}-*seed{job.seed}.csv")
        if not found:
            raise LearnerFault(f"{folder} holds no CSV of {job.name}; see {folder / 'study.log'}")
        interactions = await asyncio.to_thread(read_csv, found[0])
        steps = 1 + max(i.step for i in interactions)
        means = by_step(interactions, steps)
        return [{"step": step + 1.0, "reward": mean} for step, mean in enumerate(means) if mean is not None]

    async def _child(self, name: str, words: list[str], folder: Path, done: Callable[[], int]) -> None:
        """Run a command to its end. `OutOfTime`, with the child ended in order, at the deadline; `LearnerFault` if it
        fails."""
        log = folder / "study.log"
        env = {**os.environ, "OMP_NUM_THREADS": "1"}
        process = await start_child(*self.python, *words, log=log, env=env, when_parent_dies=signal.SIGTERM)
        try:
            while process.returncode is None:
                self.watch.moved(name, await asyncio.to_thread(done))
                if self.deadline is not None and time.monotonic() >= self.deadline:
                    raise OutOfTime
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(process.wait(), _LOOK_S)
            self.watch.moved(name, await asyncio.to_thread(done))
        finally:
            await stop_child(process, grace_s=_GRACE_S)
        if process.returncode:
            raise LearnerFault(f"{name} ended with code {process.returncode}. The end of {log}:\n{log_tail(log, 600)}")


@contextlib.asynccontextmanager
async def interruptible() -> AsyncIterator[None]:
    """SIGTERM ends the block as Ctrl-C does: children are ended in order."""
    task, loop = asyncio.current_task(), asyncio.get_running_loop()
    assert task is not None
    loop.add_signal_handler(signal.SIGTERM, task.cancel)
    try:
        yield
    finally:
        loop.remove_signal_handler(signal.SIGTERM)


def _placed(folder: Path) -> list[str]:
    return [f"name={folder.name}", f"runs_dir={json.dumps(str(folder.parent))}"]


def _matching(folder: Path, pattern: str) -> list[Path]:
    return sorted(folder.glob(pattern))


def _digest(words: Sequence[str]) -> str:
    return hashlib.sha256("\n".join(words).encode()).hexdigest()[:8]


def _copied(source: Path, target: Path) -> None:
    """A copy that is whole, or not there; one that is there stays."""
    if target.exists():
        return
    part = target.with_name(f".{target.name}.part")
    shutil.rmtree(part, ignore_errors=True)
    part.parent.mkdir(parents=True, exist_ok=True)
    shutil.copytree(source, part)
    part.rename(target)


def _updates_in(folder: Path) -> int:
    """The last update that a run has reported."""
    try:
        lines = (folder / "metrics.jsonl").read_bytes().splitlines()
    except FileNotFoundError:
        return 0
    for line in reversed(lines):
        with contextlib.suppress(ValueError):
            record: Mapping[str, float] = json.loads(line)
            return int(record["step"])
    return 0
