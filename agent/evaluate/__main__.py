"""Evaluate any chat endpoint, or rollout engines of ours, on any environment; the same command goes on where it was.

    export OPENAI_API_KEY=...                      # the key is never an argument
    python -m agent.evaluate sao/PythonTIR-v0 --url https://api.example.com/v1 --model some-model \\
        --env-arg problems=aime25 --samples 4 --rpm 60 --out evaluations/aime25
    python -m agent.evaluate sao/PythonTIR-v0 --url http://127.0.0.1:8000/v1 --model Qwen/Qwen3-4B --limit 20
    python -m agent.evaluate my_package.game:Game --engine http://127.0.0.1:8001 --model-folder runs/game/final

Exit status: 0 every sample has a reward; 1 some are faults (the same command runs them again); 2 a wrong argument;
3 the endpoint, the engine or the environment cannot be used; 130 stopped by Ctrl-C, what had ended is kept.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import signal
import sys
from collections.abc import Iterator, Mapping, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from rich.console import Console

from agent.descriptors import TooFewDescriptors, raise_limit
from agent.evaluate.actors import acting
from agent.evaluate.arguments import evaluation_of, folder_of, parser
from agent.evaluate.config import Evaluation, EvaluationError, Workload, WrongArgument
from agent.evaluate.display import Display, show
from agent.evaluate.figures import Summary, plain, summarise
from agent.evaluate.folder import ResultsFolder
from agent.evaluate.report import page
from agent.evaluate.running import CLOSE_S, Session, jobs
from agent.evaluate.sample import Sample
from envs import EnvironmentFault, make_core
from envs.core import AsyncEnv
from envs.tool_calls import FamilyFormat

STOPPED = 130


def main(argv: Sequence[str] | None = None, console: Console | None = None) -> int:
    """Command line; see the exit status above."""
    options = parser(__doc__ or "").parse_args(argv)
    console = console or Console()
    try:
        evaluation = evaluation_of(options)
        raise_limit(4 * evaluation.pacing.concurrency, f"--concurrency {evaluation.pacing.concurrency}")
        return asyncio.run(evaluate(evaluation, folder_of(options, evaluation), console))
    except (WrongArgument, TooFewDescriptors) as error:
        return _complain(error, 2)
    except (EvaluationError, EnvironmentFault) as error:
        return _complain(error, 3)
    except KeyboardInterrupt:  # before anything was there to be stopped in order
        return _complain("stopped", STOPPED)


async def evaluate(evaluation: Evaluation, out: Path, console: Console) -> int:
    """Run what `out` still lacks, write summary and report, show them; returns the exit status.

    Raises `EvaluationError` (and its `WrongArgument`), after whatever had ended is in the report.
    """
    stop = asyncio.Event()
    task_ids = await _task_ids(evaluation)
    chosen = _choose(task_ids, evaluation.workload)
    async with acting(evaluation) as actor:
        identity = evaluation.identity(actor.policy_version)
        with ResultsFolder.opened(out, identity) as folder:
            kept = await asyncio.to_thread(folder.samples)
            report = _Report(evaluation, [task_ids[index] for index in chosen], identity, actor.tool_format)
            try:
                if todo := jobs(task_ids, chosen, evaluation.workload.samples, kept):
                    done = report.of(kept, without_faults=True)
                    console.print(_announcement(evaluation, len(todo), len(done), out), markup=False, soft_wrap=True)
                    total, passes_at = len(todo) + len(done), evaluation.workload.passes_at
                    display = Display(console, "samples", total, passes_at, done)
                    with _stopping(stop):
                        async with display.shown(lambda: actor.held_s):
                            await Session(evaluation, actor, folder, ended=display.sample).run(todo, stop)
            finally:
                summary = await asyncio.to_thread(report.write, folder)
    show(console, summary, report.title, out / "report.html")
    if stop.is_set():
        console.print("stopped; what had ended is kept, and the same command goes on", highlight=False)
        return STOPPED
    return 1 if summary.faults else 0


class _Report:
    """Summary and report of one session."""

    def __init__(
        self,
        evaluation: Evaluation,
        task_ids: Sequence[str],
        identity: Mapping[str, Any],
        tool_format: FamilyFormat,
    ) -> None:
        self._workload, self._task_ids = evaluation.workload, task_ids
        self._identity, self._tool_format = identity, tool_format
        self.title = f"{evaluation.policy_name} on {evaluation.env.id}"

    def of(self, kept: Mapping[tuple[str, int], Sample], *, without_faults: bool = False) -> list[Sample]:
        """The samples that this session is about."""
        wanted, names = self._workload.samples, frozenset(self._task_ids)
        found = [sample for sample in kept.values() if sample.number < wanted and sample.task_id in names]
        return [sample for sample in found if sample.reward is not None] if without_faults else found

    def write(self, folder: ResultsFolder) -> Summary:
        """Both files, from what the folder holds."""
        samples = self.of(folder.samples())
        passes_at = self._workload.passes_at
        summary = summarise(samples, self._task_ids, self._workload.samples, passes_at)
        folder.write("summary.json", json.dumps(plain(summary), indent=1).encode())
        described = {**self._identity, "--samples": self._workload.samples}
        html = page(
            summary,
            samples,
            title=self.title,
            described=described,
            tool_format=self._tool_format,
            passes_at=passes_at,
        )
        folder.write("report.html", html)
        return summary


async def _task_ids(evaluation: Evaluation) -> Sequence[str]:
    """The environment's tasks; raises `WrongArgument` where it cannot be made, or has none."""
    env = await asyncio.to_thread(_made, evaluation)
    try:
        ids = await asyncio.to_thread(lambda: list(env.task_ids))
    except (ValueError, OSError) as error:  # an environment's own errors of configuration are ValueErrors
        raise WrongArgument(f"{evaluation.env.id} has no tasks to read: {error}") from error
    finally:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(CLOSE_S):
                await env.aclose()
    if not ids:
        raise WrongArgument(f"--env-arg: with them {evaluation.env.id} has no task")
    return ids


def _made(evaluation: Evaluation) -> AsyncEnv:
    try:
        return make_core(evaluation.env.id, **evaluation.env.kwargs)
    except TypeError as error:
        raise WrongArgument(f"--env-arg: {evaluation.env.id} cannot be made with them: {error}") from error
    except (ValueError, OSError) as error:
        raise WrongArgument(f"ENV: {error}") from error


def _choose(task_ids: Sequence[str], workload: Workload) -> list[int]:
    """The places of the wanted tasks; raises `WrongArgument` for one that is not there."""
    if workload.tasks is None:
        return list(range(len(task_ids)))[: workload.limit]
    places = {task_id: index for index, task_id in enumerate(task_ids)}
    for task_id in workload.tasks:
        if task_id not in places:
            near = get_close_matches(task_id, task_ids[:5000], n=3, cutoff=0.3) or list(task_ids[:3])
            raise WrongArgument(
                f"--tasks: there is no {task_id!r} among {len(task_ids)}; there is, for example, {', '.join(near)}"
            )
    return [places[task_id] for task_id in dict.fromkeys(workload.tasks)]


def _announcement(evaluation: Evaluation, todo: int, done: int, out: Path) -> str:
    goes_on = f"{done} are there, " if done else ""
    return f"{evaluation.policy_name} on {evaluation.env.id}: {goes_on}{todo} samples to run; results in {out}"


@contextlib.contextmanager
def _stopping(stop: asyncio.Event) -> Iterator[None]:
    """SIGINT and SIGTERM set `stop`; where that is not possible (not the main thread) they stay as they were."""
    loop = asyncio.get_running_loop()
    numbers = []
    for number in (signal.SIGINT, signal.SIGTERM):
        with contextlib.suppress(ValueError, RuntimeError, NotImplementedError):
            loop.add_signal_handler(number, stop.set)
            numbers.append(number)
    try:
        yield
    finally:
        for number in numbers:
            loop.remove_signal_handler(number)


def _complain(error: object, status: int) -> int:
    print(f"agent.evaluate: {error}", file=sys.stderr)
    return status


if __name__ == "__main__":
    raise SystemExit(main())
