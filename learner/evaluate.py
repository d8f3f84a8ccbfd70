"""Held-out evaluation: `python -m learner.evaluate RECIPE` gives pass@k by set and task family, with an interval.

python -m learner.evaluate recipes/tir_tiny.yaml --model runs/tir_tiny/final --samples 4
"""

from __future__ import annotations

import asyncio
import json
import tempfile
from collections.abc import Callable
from pathlib import Path

from rich.console import Console

from agent.episode import Episode
from learner.config import Recipe, RecipeError
from learner.parallel.ranks import make_accelerator
from learner.run.cli import guarded, read_words, recipe_parser
from learner.run.display import Display
from learner.run.evaluation.running import count_held_out, run_evaluation
from learner.run.pass_rates import PassRate, pass_rate_table, rates_of_sets
from learner.services.processes import Services
from learner.services.shared_key import with_own_key
from learner.sft import starting_model


async def evaluate_model(
    recipe: Recipe, model: Path, samples: int | None, display: Display, only: str | None = None
) -> list[PassRate]:
    """Evaluate the model folder `model` with an engine, a runtime and a store of its own, on all sets or `only` one.

    `samples`: of each task; None: as the recipe says of the set. Raises `RecipeError` for a set that is not there.
    """
    tasks = await count_held_out(recipe)
    sets = [one for one in recipe.held_out_sets if only in (None, one.name)]
    if not sets:
        raise RecipeError(f"--set: there is no evaluation set {only!r}; choose one of {', '.join(tasks)}")
    if samples is not None:
        sets = [one.model_copy(update={"samples": samples}) for one in sets]
    episodes: dict[str, list[Episode]] = {}
    with tempfile.TemporaryDirectory(prefix="evaluate-") as scratch:
        async with Services.start(
            await asyncio.to_thread(with_own_key, recipe, Path(scratch)),
            model=model,
            folder=Path(scratch),
            store_config={"tasks": 0},
            version=0,
            private_store=True,
            private_engines=True,
        ) as services:
            for one in (one for one in sets if tasks[one.name]):
                with display.stage(f"Evaluation {one.name}".strip(), tasks[one.name] * one.samples) as advance:
                    episodes[one.name] = await run_evaluation(
                        services.store,
                        services.check,
                        one,
                        version=0,
                        tasks=tasks[one.name],
                        timeout_s=recipe.evaluation.timeout_s * one.samples,
                        progress=_since(advance),
                    )
    return rates_of_sets(episodes)


def _since(advance: Callable[..., None]) -> Callable[[int], None]:
    """What is told how many are finished, as a stage is told how many more are."""
    seen = 0

    def progress(finished: int) -> None:
        nonlocal seen
        advance(finished - seen)
        seen = finished

    return progress


def main(argv: list[str] | None = None) -> int:
    """Command line; see `--help`."""
    parser = recipe_parser(__doc__)
    parser.add_argument("--model", type=Path, help="model folder; without it, the policy that RL starts from")
    parser.add_argument("--samples", type=int, help="episodes a task (default: what the recipe says of the set)")
    parser.add_argument("--set", metavar="NAME", help="one of the recipe's evaluation sets (default: all)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the rates there")
    arguments = parser.parse_args(argv)

    def body() -> int:
        recipe = read_words(arguments.words)
        with Display(recipe.name) as display:
            model = arguments.model or starting_model(recipe, display, make_accelerator(recipe))
            rates = asyncio.run(evaluate_model(recipe, model, arguments.samples, display, arguments.set))
        Console().print(pass_rate_table(rates))
        if arguments.json:
            arguments.json.write_text(json.dumps([vars(rate) for rate in rates], indent=1))
        return 0

    return guarded(body)


if __name__ == "__main__":
    raise SystemExit(main())
