"""Train a policy with SAO: `python -m learner.train [RECIPE] [key=value ...]`.

python -m learner.train recipes/tir_tiny.yaml name=my_run learner.steps=80
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
import time
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

from learner.checkpoint import Progress, checkpoints, load_progress
from learner.cli import guarded, read_words, recipe_parser
from learner.config import Recipe
from learner.display import Display
from learner.evaluate import Score, count_held_out, score, score_table
from learner.learner import Learner
from learner.loop import Loop
from learner.models import save_policy_model
from learner.plots import draw_curves
from learner.pretrain_value import count_tasks, run_value_pretraining, starting_model
from learner.ranks import Ranks, beating, is_main, make_accelerator, share
from learner.run_dir import claim_run
from learner.services import Services


async def run_loop(recipe: Recipe, learner: Learner, ranks: Ranks, folder: Path, display: Display) -> list[Score]:
    """Start the other processes, train until the recipe's last step or the first Ctrl-C, evaluate at the end."""
    algorithm = learner.algorithm
    # A store elsewhere knows its tasks; what judged conversations teach needs no environment at all.
    tasks = 0 if recipe.store.url else await asyncio.to_thread(count_tasks, recipe)
    store_config = {
        "tasks": tasks,
        "seed": recipe.seed,
        "group_size": algorithm.samples_per_prompt,
        "batch": recipe.learner.batch_size,
        "drop_truncated": recipe.learner.truncation == "drop",
        **recipe.store.model_dump(exclude={"url"}),
    }
    model = learner.export(folder / "weights" / "start")
    stop = asyncio.Event()
    with _first_interrupt(stop, display):
        held = learner.progress.version
        async with Services.start(recipe, model=model, folder=folder, store_config=store_config, held=held) as services:
            held_out = 0 if recipe.learner.online else await count_held_out(recipe)
            loop = Loop(recipe, learner, ranks, services, folder, display, stop, held_out=held_out)
            episodes = await loop.run()
            return score(episodes) if episodes else []


@contextlib.contextmanager
def _first_interrupt(stop: asyncio.Event, display: Display):  # type: ignore[no-untyped-def]
    """The first Ctrl-C lets the step in hand finish; the second one is an ordinary KeyboardInterrupt."""
    loop = asyncio.get_running_loop()

    def once() -> None:
        display.log("stopping after this step; press Ctrl-C again to stop at once")
        stop.set()
        loop.remove_signal_handler(signal.SIGINT)

    loop.add_signal_handler(signal.SIGINT, once)
    loop.add_signal_handler(signal.SIGTERM, stop.set)
    try:
        yield
    finally:
        loop.remove_signal_handler(signal.SIGINT)
        loop.remove_signal_handler(signal.SIGTERM)


def train(recipe: Recipe, display: Display) -> list[Score]:
    """The whole pipeline of a recipe: cold start, value pretraining, SAO. Each stage is done once and found again."""
    torch.manual_seed(recipe.seed)
    folder = recipe.run_dir
    with claim_run(recipe) if is_main() else contextlib.nullcontext():
        accelerator = make_accelerator(recipe)
        model = starting_model(recipe, display, accelerator)
        critic = run_value_pretraining(recipe, model, display, accelerator)
        learner = Learner.build(recipe, accelerator, policy_folder=model, critic_folder=critic)
        for path in share(accelerator, checkpoints(folder / "checkpoints")[-1:]):
            for line in learner.resume(path):
                display.log(line)
        ranks = Ranks(learner)
        if not accelerator.is_main_process:
            ranks.follow()
            accelerator.end_training()
            return []
        try:
            # Engines that start or stay away, and evaluations, may take longer than a collective may.
            with beating(accelerator, ranks.heartbeat, recipe.learner.collective_timeout_s):
                scores = asyncio.run(run_loop(recipe, learner, ranks, folder, display))
        finally:
            ranks.dismiss()
            accelerator.end_training()
        draw_curves(folder / "metrics.jsonl", folder / "curves.png", recipe.name)
        if learner.progress.step >= recipe.learner.steps:
            save_policy_model(learner.policy.unwrapped.model, model, folder / "final")
        return scores


def summary(recipe: Recipe, scores: list[Score], seconds: float) -> list[Table]:
    """What is printed at the end."""
    saved = checkpoints(recipe.run_dir / "checkpoints")
    progress = load_progress(saved[-1]) if saved else Progress()  # none where Ctrl-C came before the first step
    table = Table(show_header=False)
    rows = {
        "policy updates": f"{progress.step} of {recipe.learner.steps}",
        "episodes trained": f"{progress.episodes:,}",
        "action tokens trained": f"{progress.action_tokens:,}",
        "tokens trained at lag >= 1": f"{progress.stale_tokens / max(progress.action_tokens, 1):.1%}",
        "time": f"{seconds / 60:.1f} min",
        "curves": str(recipe.run_dir / "curves.png"),
        "episodes": f"python -m agent.inspect {recipe.run_dir}",
    }
    if (recipe.run_dir / "final").exists():
        rows["model"] = str(recipe.run_dir / "final")
    for name, value in rows.items():
        table.add_row(name, value)
    return [score_table(scores), table] if scores else [table]


def main(argv: list[str] | None = None) -> int:
    """Command line; see `--help`."""
    arguments = recipe_parser(__doc__).parse_args(argv)

    def body() -> int:
        recipe = read_words(arguments.words)
        started = time.monotonic()
        with Display(recipe.name) as display:
            scores = train(recipe, display)
        if not is_main():
            return 0
        for table in summary(recipe, scores, time.monotonic() - started):
            Console().print(table)
        return 0

    return guarded(body)


if __name__ == "__main__":
    raise SystemExit(main())
