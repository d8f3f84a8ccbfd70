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

from learner.config import ENDLESS, Recipe
from learner.parallel.collectives import beating, share
from learner.parallel.ranks import Ranks, is_main, make_accelerator, world_size
from learner.plan.start import check_start
from learner.pretrain_value import run_value_pretraining, tasks_of_store
from learner.run.checkpoint import Progress, checkpoints, load_progress
from learner.run.cli import guarded, read_words, recipe_parser
from learner.run.display import Display
from learner.run.environments import check_environments
from learner.run.evaluation.rounds import Rounds
from learner.run.evaluation.running import count_held_out
from learner.run.evaluation.target import Reached, reached
from learner.run.folder import claim_run
from learner.run.going_back import heed_rollback
from learner.run.hub import Hub
from learner.run.learner import Learner
from learner.run.loop import Loop
from learner.run.pass_rates import PassRate, pass_rate_table, rates_of_sets
from learner.run.plots import draw_curves, read_metrics
from learner.services.processes import Services
from learner.sft import starting_model


async def run_loop(
    recipe: Recipe, learner: Learner, ranks: Ranks, folder: Path, display: Display, hub: Hub | None = None
) -> tuple[list[PassRate], Reached | None]:
    """Start the other processes, train until the recipe's last step, its target or the first Ctrl-C, evaluate at the
    end; the rates of that, and the target if it was met."""
    algorithm = learner.algorithm
    # A store elsewhere knows its tasks; what judged conversations teach needs no environment at all.
    tasks = {"tasks": 0} if recipe.store.url else await asyncio.to_thread(tasks_of_store, recipe)
    at_once = None if recipe.evaluation.share is None else evaluated_at_once(recipe)
    store_config = {
        **tasks,
        "evaluations_at_once": at_once,
        "seed": recipe.seed,
        "group_size": algorithm.samples_per_prompt,
        "batch": recipe.learner.batch_size,
        "drop_truncated": recipe.learner.truncation == "drop",
        **recipe.store.model_dump(exclude={"url"}),
    }
    model = await asyncio.to_thread(learner.export_for_engines, folder / "weights" / "start", ranks.weights())
    stop = asyncio.Event()
    services_of_run = Services.start(
        recipe,
        model=model,
        folder=folder,
        store_config=store_config,
        checkpoint_version=learner.progress.version,
    )
    with _first_interrupt(stop, display):
        async with ranks.watched(), services_of_run as services, _own_engines(services, learner, folder, model):
            held_out = {} if recipe.learner.online else await count_held_out(recipe)
            loop = Loop(recipe, learner, ranks, services, folder, display, stop, held_out=held_out, hub=hub)
            return rates_of_sets(await loop.run()), loop.reached


def evaluated_at_once(recipe: Recipe) -> int:
    """How many evaluation episodes may be under way beside training, with `evaluation.share`."""
    return max(1, round((recipe.evaluation.share or 1.0) * recipe.runtime.concurrency))


def _own_engines(
    services: Services, learner: Learner, folder: Path, model: Path
) -> contextlib.AbstractAsyncContextManager[None]:
    """The engines of `evaluation.engines`, if there are any: with the weights of the evaluation that was cut off."""
    recipe = learner.recipe
    if recipe.evaluation.engines is None:
        return contextlib.nullcontext()
    version, rounds = learner.progress.version, Rounds(folder / "evaluations")
    for cut_off in rounds.read()[:1]:
        if cut_off.step <= learner.progress.step and rounds.weights(cut_off.step).exists():
            version, model = cut_off.version, rounds.weights(cut_off.step)
    return services.evaluation_engines(recipe, model=model, version=version, folder=folder / "evaluations")


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


def train(recipe: Recipe, display: Display) -> list[PassRate]:
    """The whole pipeline of a recipe: cold start, value pretraining, SAO. Each stage is done once and found again."""
    check_start(recipe, world_size())
    check_environments(recipe)
    hub = Hub.of(recipe, display.log) if is_main() else None
    torch.manual_seed(recipe.seed)
    folder = recipe.run_dir
    with claim_run(recipe) if is_main() else contextlib.nullcontext():
        accelerator = make_accelerator(recipe)
        if is_main():
            heed_rollback(folder, display.log)
        model = starting_model(recipe, display, accelerator)
        critic = run_value_pretraining(recipe, model, display, accelerator)
        learner = Learner.build(recipe, accelerator, policy_folder=model, critic_folder=critic)
        for path in share(accelerator, checkpoints(folder / "checkpoints")[-1:]):
            for line in learner.resume(path):
                display.log(line)
        ranks = Ranks(learner)
        if not accelerator.is_main_process:
            ranks.follow()
            ranks.leave()
            return []
        # Engines that start or stay away, and evaluations, may take longer than a collective may.
        with ranks.led(), beating(accelerator, ranks.heartbeat, recipe.learner.collective_timeout_s):
            rates, target = asyncio.run(run_loop(recipe, learner, ranks, folder, display, hub))
            if target is not None or learner.progress.step >= recipe.learner.steps:
                learner.export(folder / "final", ranks.weights(as_trained=True), as_trained=True)
                if recipe.model.policy_adapter is not None:
                    learner.export_adapter(folder / "final_adapter")
        draw_curves(folder / "metrics.jsonl", folder / "curves.png", recipe.name)
        if hub is not None and (target is not None or learner.progress.step >= recipe.learner.steps):
            hub.finish(folder / "final", learner.progress.step)
        return rates


def summary(recipe: Recipe, rates: list[PassRate], seconds: float) -> list[Table]:
    """What is printed at the end."""
    saved = checkpoints(recipe.run_dir / "checkpoints")
    progress = load_progress(saved[-1]) if saved else Progress()  # none where Ctrl-C came before the first step
    target = reached(recipe, read_metrics(recipe.run_dir / "metrics.jsonl"), progress.step)
    table = Table(show_header=False)
    rows = {
        "policy updates": f"{progress.step}"
        + (f" of {recipe.learner.steps}" if recipe.learner.steps < ENDLESS else ""),
        **({"target met": str(target)} if target is not None else {}),
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
    return [pass_rate_table(rates), table] if rates else [table]


def main(argv: list[str] | None = None) -> int:
    """Command line; see `--help`."""
    arguments = recipe_parser(__doc__).parse_args(argv)

    def body() -> int:
        recipe = read_words(arguments.words)
        started = time.monotonic()
        with Display(recipe.name) as display:
            rates = train(recipe, display)
        if not is_main():
            return 0
        for table in summary(recipe, rates, time.monotonic() - started):
            Console().print(table)
        return 0

    return guarded(body)


if __name__ == "__main__":
    raise SystemExit(main())
