"""Make one update of a run again, alone: no engine, no store. Its figures must be those that were logged.

python -m learner.replay runs/my_run --update 41
python -m learner.replay runs/my_run --update 41 --profile learner.policy.clip_norm=0.5
"""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from agent.store.protocol import Claim
from learner.config import Recipe, RecipeError, load_recipe
from learner.faults import LearnerFault
from learner.parallel.ranks import Ranks, is_main, make_accelerator
from learner.replay.figures import Comparison, compare
from learner.run.checkpoint import checkpoints
from learner.run.cli import guarded
from learner.run.learner import Learner
from learner.run.metrics import step_figures
from learner.run.plots import read_metrics
from learner.run.profiling import FOLDER as PROFILES
from learner.run.profiling import traced
from learner.run.recording import read, recorded
from learner.run.state import restore_rng


def beginning(update: int, batches: Iterable[int], saved: Iterable[int]) -> int | None:
    """The newest state that `update` can be made from: a saved step, or 0, behind which no batch is missing."""
    there = set(batches)
    for step in sorted({0, *saved}, reverse=True):
        if step < update and there.issuperset(range(step + 1, update + 1)):
            return step
    return None


def recipe_of(run: Path, words: list[str]) -> Recipe:
    """The recipe that a run has left in its folder, with overrides; the run lies where it lies now."""
    if not (run / "recipe.yaml").exists():
        raise RecipeError(f"{run} is no run's folder: it has no recipe.yaml")
    recipe = load_recipe(run / "recipe.yaml", words)
    learner = recipe.learner.model_copy(update={"tracker": None, "profile": None})
    place = {"name": run.resolve().name, "runs_dir": run.resolve().parent}
    return recipe.model_copy(update={**place, "learner": learner})


def replay(run: Path, update: int | None, words: list[str], *, profile: bool = False) -> tuple[int, dict[str, float]]:
    """Make `update` (None: the last one that was kept) of `run` again, on every rank; which it was, and its figures.

    Nothing of the run is changed; with `profile` a trace is left in its folder. Raises `LearnerFault` where what it
    takes was not kept.
    """
    recipe, batches = recipe_of(run, words), recorded(run)
    if not batches:
        raise LearnerFault(f"{run} has kept no batches: train with learner.record_batches=N")
    update = max(batches) if update is None else update
    if update not in batches:
        raise LearnerFault(f"{run} has not kept the batch of update {update}, but those of {_said(batches)}")
    saved = {int(path.name.removeprefix("step_")): path for path in checkpoints(run / "checkpoints")}
    start = beginning(update, batches, saved)
    if start is None:
        raise LearnerFault(
            f"the state that update {update} began from is not there any more: {run} has checkpoints of "
            f"{_said(saved)} and batches of {_said(batches)}. Raise learner.keep_checkpoints in the next run"
        )
    accelerator = make_accelerator(recipe)
    torch.manual_seed(recipe.seed)
    model = run / "sft" if recipe.sft is not None else recipe.model.path
    assert model is not None  # a tiny model has a cold start
    learner = Learner.build(recipe, accelerator, policy_folder=model, critic_folder=run / "value")
    if start:
        learner.resume(saved[start])
    ranks = Ranks(learner)
    found: dict[str, float] = {}
    for step in range(start + 1, update + 1):
        entry = read(batches[step])
        restore_rng(entry.rng)
        learner.progress.version = entry.version
        episodes = entry.decoded()
        target = run / PROFILES / f"replay_{step:05d}_rank_{accelerator.process_index}.json.gz"
        with traced(target) if profile and step == update else contextlib.nullcontext():
            batch, result = learner.step(episodes)
        found = step_figures(Claim("", [], []), episodes, batch, result, entry.version)
    ranks.leave()
    return update, found


def _said(steps: Iterable[int]) -> str:
    return ", ".join(map(str, sorted(steps))) or "none"


def _table(update: int, rows: list[Comparison]) -> Table:
    table = Table(title=f"update {update}", title_justify="left")
    for column in ("figure", "logged", "again", "difference"):
        table.add_column(column, justify="left" if column == "figure" else "right")
    for row in rows:
        table.add_row(row.name, *(f"{value:.9g}" for value in (row.logged, row.again)), f"{row.difference:.2g}")
    return table


def main(argv: list[str] | None = None) -> int:
    """Command line; see `--help`. Exit code 1: without overrides, a figure is another than was logged."""
    description, _, example = (__doc__ or "").partition("\n\n")
    parser = argparse.ArgumentParser(
        description=description, epilog="example:\n" + example, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("run", type=Path, metavar="RUN", help="the folder of a run that kept batches")
    parser.add_argument("words", nargs="*", metavar="key=value", help="what to do otherwise this time")
    parser.add_argument("--update", type=int, metavar="K", help="which one (default: the last that was kept)")
    parser.add_argument("--profile", action="store_true", help="leave a trace of it in RUN/profile")
    parser.add_argument("--tolerance", type=float, default=1e-5, help="of a figure, relative (default: 1e-5)")
    given = parser.parse_intermixed_args(argv)

    def body() -> int:
        update, found = replay(given.run, given.update, given.words, profile=given.profile)
        if not is_main():
            return 0
        records: list[dict[str, Any]] = read_metrics(given.run / "metrics.jsonl")
        logged = next((record for record in records if record["step"] == update), {})
        rows = compare(logged, found)
        console = Console() if Console().is_terminal else Console(width=100)
        console.print(_table(update, rows))
        both = [row for row in rows if row.is_logged]
        worst = max((row for row in both), key=lambda row: row.difference, default=None)
        if worst is None:
            console.print(f"nothing was logged of update {update}")
        elif worst.difference == 0:
            console.print(f"{len(both)} figures, each as it was logged, to the last bit")
        else:
            console.print(
                f"{len(both)} figures, the largest relative difference is {worst.difference:.2g} ({worst.name})"
            )
        return int(worst is not None and worst.difference > given.tolerance and not given.words)

    return guarded(body)


if __name__ == "__main__":
    raise SystemExit(main())
