"""Held-out evaluation: `python -m learner.evaluate RECIPE` gives pass@1 by task family, with an interval.

python -m learner.evaluate recipes/tir_tiny.yaml --model runs/tir_tiny/final --samples 4
"""

from __future__ import annotations

import asyncio
import json
import math
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

from agent import episode as records
from agent.episode import Episode
from agent.store.client import StoreClient
from envs import make_core
from learner.cli import LearnerFault, guarded, read_words, recipe_parser
from learner.config import Recipe
from learner.display import Display
from learner.metrics import wilson_interval
from learner.pretrain_value import starting_model
from learner.ranks import make_accelerator
from learner.services import Services

_POLL_S = 0.25
EVERY_FAMILY = "all"


@dataclass(frozen=True)
class Score:
    """pass@1 of one family: the mean over tasks of the mean over samples, with a 95 % interval over tasks.

    `reused`: the share of episodes in which a later tool call used an earlier output.
    """

    family: str
    tasks: int
    episodes: int
    success: float
    low: float
    high: float
    reused: float
    turns: float


def score(episodes: Sequence[Episode]) -> list[Score]:
    """One `Score` a family, and first the one of all together (family "all").

    With one sample a task, or tasks that all fare alike, the interval is Wilson's over the tasks; else the normal one
    over their means.
    """
    families: dict[str, list[Episode]] = {EVERY_FAMILY: list(episodes)}
    for episode in episodes:
        families.setdefault(str(episode.metrics.get("family", episode.env_id)), []).append(episode)
    scores = []
    for family, members in families.items():
        tasks: dict[str, list[float]] = {}
        for episode in members:
            tasks.setdefault(episode.task_id, []).append(float(episode.reward > 0))
        means = [sum(found) / len(found) for found in tasks.values()]
        count = max(len(means), 1)
        mean = sum(means) / count
        if len(members) == len(means) or len(set(means)) == 1:
            low, high = wilson_interval(sum(means), len(means))
        else:
            half = 1.96 * math.sqrt(sum((m - mean) ** 2 for m in means) / max(count - 1, 1) / count)
            low, high = max(0.0, mean - half), min(1.0, mean + half)
        size = max(len(members), 1)
        scores.append(
            Score(
                family,
                len(means),
                len(members),
                mean,
                low,
                high,
                sum(bool(e.metrics.get("reused_output")) for e in members) / size,
                sum(len(e.actions) for e in members) / size,
            )
        )
    return scores


def score_table(scores: Sequence[Score]) -> Table:
    """Scores as a table for the terminal."""
    table = Table("family", "tasks", "episodes", "pass@1", "95 %", "reused output", "turns")
    for s in scores:
        interval = f"{s.low:.1%} - {s.high:.1%}"
        cells = (
            s.family,
            str(s.tasks),
            str(s.episodes),
            f"{s.success:.1%}",
            interval,
            f"{s.reused:.1%}",
            f"{s.turns:.1f}",
        )
        table.add_row(*cells)
    return table


async def run_evaluation(
    store: StoreClient,
    check: Callable[[], None],
    *,
    version: int,
    tasks: int,
    samples: int,
    timeout_s: float,
    name: str = "",
    stop: asyncio.Event | None = None,
    progress: Callable[[int], None] = lambda finished: None,
) -> list[Episode]:
    """Have the first `tasks` held-out tasks run `samples` times at `version`; nobody may publish meanwhile.

    Once `stop` is set the evaluation is given up and the answer is []. Every action token must come from `version`,
    or the figure would be of no policy at all. `check` raises when a process that is needed has gone.
    """
    evaluation = await store.start_evaluation(version, list(range(tasks)), samples, name)
    try:
        async with asyncio.timeout(timeout_s):
            while True:
                check()
                status = await store.evaluation(evaluation)
                progress(status.finished)
                if status.finished >= status.requested:
                    break
                if stop is not None and stop.is_set():
                    await store.cancel_evaluation(evaluation)
                    return []
                await asyncio.sleep(_POLL_S)
    except TimeoutError as error:
        await store.cancel_evaluation(evaluation)
        raise LearnerFault(
            f"the evaluation of version {version} did not finish within {timeout_s:g} s; raise evaluation.timeout_s"
        ) from error
    episodes = [records.decode(data) for data in status.episodes]
    if status.failed:
        raise LearnerFault(f"{status.failed} of {status.requested} evaluation episodes failed; see the runtime's log")
    foreign = sum(v != version for e in episodes for s in e.actions for v in s.versions)
    if foreign:
        raise LearnerFault(f"{foreign} tokens of the evaluation of version {version} come from another version")
    return episodes


async def count_held_out(recipe: Recipe) -> int:
    """How many held-out tasks an evaluation uses: `evaluation.tasks`, or all there are."""
    config = recipe.evaluation.env or recipe.env
    env = make_core(config.id, **config.kwargs)
    try:
        return min(recipe.evaluation.tasks, await asyncio.to_thread(lambda: len(env.task_ids)))
    finally:
        await env.aclose()


async def evaluate_model(recipe: Recipe, model: Path, samples: int, display: Display) -> list[Score]:
    """Evaluate the model folder `model` with an engine, a runtime and a store of its own."""
    tasks = await count_held_out(recipe)
    with tempfile.TemporaryDirectory(prefix="evaluate-") as scratch:
        async with Services.start(
            recipe,
            model=model,
            folder=Path(scratch),
            store_config={"tasks": 0},
            version=0,
            own_store=True,
            own_engines=True,
        ) as services:
            with display.stage("Evaluation", tasks * samples) as advance:
                seen = 0

                def progress(finished: int) -> None:
                    nonlocal seen
                    advance(finished - seen)
                    seen = finished

                episodes = await run_evaluation(
                    services.store,
                    services.check,
                    version=0,
                    tasks=tasks,
                    samples=samples,
                    timeout_s=recipe.evaluation.timeout_s * samples,
                    progress=progress,
                )
    return score(episodes)


def main(argv: list[str] | None = None) -> int:
    """Command line; see `--help`."""
    parser = recipe_parser(__doc__)
    parser.add_argument("--model", type=Path, help="model folder; without it, the policy that RL starts from")
    parser.add_argument("--samples", type=int, help="episodes a task (default: the recipe's evaluation.samples)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the scores there")
    arguments = parser.parse_args(argv)

    def body() -> int:
        recipe = read_words(arguments.words)
        samples = arguments.samples or recipe.evaluation.samples
        with Display(recipe.name) as display:
            model = arguments.model or starting_model(recipe, display, make_accelerator(recipe))
            scores = asyncio.run(evaluate_model(recipe, model, samples, display))
        Console().print(score_table(scores))
        if arguments.json:
            arguments.json.write_text(json.dumps([vars(s) for s in scores], indent=1))
        return 0

    return guarded(body)


if __name__ == "__main__":
    raise SystemExit(main())
