"""The paper's tables and figures in small: `python -m learner.study NAME`, or `task` for what a task is worth.

python -m learner.study main --seeds 1 --budget 30m
python -m learner.study lag --seeds 3 --arms dis-lag16,open-lag16 --updates 60
python -m learner.study main --search --budget 2h
python -m learner.study task recipes/studies/chains.yaml
"""

from __future__ import annotations

import argparse
import asyncio
import datetime
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from learner.config import RecipeError
from learner.faults import LearnerFault
from learner.run.cli import guarded, read_words
from learner.run.display import Display
from learner.study.arms import RECIPE, Job, Study, shipped
from learner.study.display import StudyDisplay
from learner.study.machine import machine, seconds
from learner.study.page import write_page
from learner.study.record import RecordError
from learner.study.running import Runner, interruptible
from learner.study.search import UPDATES as SEARCH_UPDATES
from learner.study.search import chosen, conclude, search_jobs
from learner.study.table import STUDIES, get_study

_CORES_A_RUN = 2  # a learner and an engine


def jobs_of(
    study: Study, seeds: Sequence[int], updates: int, results: Path, arms: Sequence[str] = (), more: Sequence[str] = ()
) -> list[Job]:
    """The runs of a study, a seed of all arms before the next seed; with what the search has found for each."""
    picked = [study.arm(name) for name in arms] if arms else list(study.arms)
    found = {arm.name: chosen(results, arm, study.recipe) for arm in picked}
    return [Job(study, arm, seed, updates, found[arm.name], tuple(more)) for seed in seeds for arm in picked]


def _parser() -> argparse.ArgumentParser:
    description, _, example = (__doc__ or "").partition("\n\n")
    names = "\n".join(f"  {name:<12} {study.source}" for name, study in STUDIES.items())
    parser = argparse.ArgumentParser(
        prog="python -m learner.study",
        description=description,
        epilog=f"studies:\n{names}\n\nRuns that are finished are found again, and one that was stopped goes on.\n\n"
        f"example:\n{example}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("name", choices=[*STUDIES, "task"], metavar="NAME", help="a study (below), or task")
    parser.add_argument(
        "words", nargs="*", metavar="RECIPE|key=value", help="task: a recipe; then keys that lie over everything"
    )
    parser.add_argument("--seeds", type=int, default=1, help="run seeds 0 to N-1 (default: 1)")
    parser.add_argument("--budget", type=seconds, help="stop after so long, e.g. 30m; the next call goes on")
    parser.add_argument("--arms", default="", help="some of the study's arms only, by name")
    parser.add_argument("--updates", type=int, help="policy updates of a run (default: the study's)")
    parser.add_argument("--parallel", type=int, help="runs at once (default: one for two cores)")
    parser.add_argument("--search", action="store_true", help="search settings for the presets of the study instead")
    parser.add_argument("--page", action="store_true", help="write the page from what is finished, and run nothing")
    parser.add_argument("--keep", action="store_true", help="keep the folders of finished runs")
    parser.add_argument(
        "--results", type=Path, default=Path("docs/studies"), help="CSVs and pages (default: %(default)s)"
    )
    parser.add_argument("--runs", type=Path, default=Path("runs/studies"), help="runs under way (default: %(default)s)")
    return parser


async def _run(runner: Runner, jobs: Sequence[Job]) -> None:
    async with interruptible():
        await runner.run(jobs)


def run_study(arguments: argparse.Namespace) -> int:
    """Run what is missing, as far as the budget goes, and write the page. 0, or 1 if a run has failed."""
    study = get_study(arguments.name)
    updates = arguments.updates or study.updates
    arms = [name for name in arguments.arms.split(",") if name]
    try:
        if arguments.search:
            jobs = search_jobs(study, updates=arguments.updates or SEARCH_UPDATES, more=arguments.words)
        else:
            jobs = jobs_of(study, range(arguments.seeds), updates, arguments.results, arms, arguments.words)
    except ValueError as error:
        raise RecipeError(str(error)) from error
    for job in jobs:
        job.recipe()  # a word that no recipe takes is an error before the first run
    deadline = None if arguments.budget is None else time.monotonic() + arguments.budget
    parallel = arguments.parallel or max(1, (os.cpu_count() or 1) // _CORES_A_RUN)
    runner = Runner(arguments.results, arguments.runs, parallel, deadline, arguments.keep)
    console = Console()
    missing = [] if arguments.page else runner.missing(jobs)
    try:
        if missing:
            total = sum(job.updates for job in missing)
            with StudyDisplay(study.name, runs=len(missing), updates=total, console=console) as display:
                runner.watch = display.watch
                asyncio.run(_run(runner, jobs))
    except asyncio.CancelledError as error:
        raise KeyboardInterrupt from error
    finally:
        if arguments.search:
            conclude(study, arguments.results)
            console.print(str(arguments.results / "search.md"), highlight=False, markup=False, soft_wrap=True)
        else:
            console.print(str(write_page(study, arguments.results)), highlight=False, markup=False, soft_wrap=True)
    for name, why in runner.failed.items():
        console.print(f"{name} failed: {why}", highlight=False, markup=False, soft_wrap=True, style="red")
    if runner.unfinished:
        console.print(
            f"out of time: {len(runner.unfinished)} of {len(jobs)} runs are left; the same command goes on with them "
            "(--arms takes some, --updates makes shorter ones)",
            style="yellow",
        )
    return 1 if runner.failed else 0


def run_task(arguments: argparse.Namespace) -> int:
    """Measure a task, print the findings, and write them to a page."""
    from learner.study.task import measure, task_page, write_task_page

    own = arguments.words[:1] if arguments.words and "=" not in arguments.words[0] else []
    words = [*(own or [f"recipes/{RECIPE}"]), *arguments.words[len(own) :]]
    path = own[0] if own else str(shipped(RECIPE))
    recipe = read_words([path, f"runs_dir={arguments.runs}", "name=task", *words[1:]])
    with Display(recipe.name) as display:
        fitness = measure(recipe, display)
    command = " ".join(["python -m learner.study task", *words])
    told = (command, machine(), datetime.datetime.now(datetime.UTC).date().isoformat())
    print(task_page(fitness, *told))
    write_task_page(fitness, arguments.results / "task.md", *told)
    return 0 if fitness.is_fit else 1


def main(argv: list[str] | None = None) -> int:
    """Command line; see `--help`. 0; 1 where a run has failed or a task is not fit; 130 after Ctrl-C."""
    arguments = _parser().parse_intermixed_args(argv)

    def body() -> int:
        try:
            return run_task(arguments) if arguments.name == "task" else run_study(arguments)
        except RecordError as error:
            raise LearnerFault(str(error)) from error

    return guarded(body)


if __name__ == "__main__":
    sys.exit(main())
