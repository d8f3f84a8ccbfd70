"""Does a recipe fit the machines it is meant for? Nothing is loaded: the model is built without memory.

python -m learner.plan recipes/math_30b.yaml
python -m learner.plan recipes/math_4b.yaml --gpus 1 --memory-gib 80 learner.micro_batch_tokens=8192
"""

from __future__ import annotations

from rich.console import Console
from rich.table import Table

from learner.config import Recipe, RecipeError
from learner.plan.memory import GIB
from learner.plan.phases import Plan, make_plan, planned_layout
from learner.run.cli import guarded, read_words, recipe_parser

_COLUMNS = {
    "parameters": "parameters",
    "optimiser": "optimizer",
    "gradients": "gradients",
    "activations": "activations",
    "copies": "copies",
    "process": "process",
    "KV cache": "kv_cache",
}


def plan_table(plan: Plan) -> Table:
    """One line a phase; GiB on one device."""
    table = Table(title="GiB on each device", title_justify="left")
    for column in ("phase", "devices", *_COLUMNS, "total"):
        table.add_column(column, justify="left" if column in ("phase", "devices") else "right", no_wrap=True)
    table.add_column(f"of {plan.memory_gib:g}", justify="right")
    for row in plan.rows:
        usage = vars(row.usage)
        cells = [f"{figure / GIB:.1f}" for figure in (*(usage[name] for name in _COLUMNS.values()), row.usage.total)]
        fits = "fits" if row.needed <= plan.usable else "[red]too much[/]"
        table.add_row(row.phase, f"{row.devices} {row.kind}", *cells, fits)
    return table


def gpu_words(recipe: Recipe, gpus: int) -> list[str]:
    """Overrides that plan `recipe` for `gpus` GPUs: parts of a copy are what grows, where the recipe cuts weights."""
    hardware = recipe.hardware
    words = [f"hardware.learner_gpus={gpus}"]
    if hardware.fsdp > 1:
        others = hardware.tp * hardware.replicate * hardware.context
        if gpus % others:
            raise RecipeError(f"--gpus {gpus} is no multiple of tp x replicate x context of the recipe, {others}")
        words.append(f"hardware.fsdp={gpus // others}")
    return words


def main(argv: list[str] | None = None) -> int:
    """Command line; see `--help`. Exit code 0: the recipe fits; 1: it does not, and one paragraph says why."""
    parser = recipe_parser(__doc__)
    parser.add_argument("--gpus", type=int, metavar="N", help="GPUs of the learner (default: the recipe's)")
    parser.add_argument("--memory-gib", type=float, metavar="M", help="memory of one GPU (default: the recipe's)")
    given = parser.parse_intermixed_args(argv)

    def body() -> int:
        words = list(given.words)
        if given.gpus is not None:
            words += gpu_words(read_words(words), given.gpus)
        if given.memory_gib is not None:
            words.append(f"hardware.memory_gib={given.memory_gib}")
        recipe = read_words(words)
        plan = make_plan(recipe)
        console = Console() if Console().is_terminal else Console(width=150)
        console.print(
            f"{recipe.name}: {plan.parameters / 1e6:,.1f} million parameters, {plan.active_parameters / 1e6:,.1f} used "
            "by a token",
            highlight=False,
        )
        console.print(plan_table(plan))
        console.print(
            f"{plan.engines} engine{'s' * (plan.engines > 1)}, each with room for {plan.room} episodes of "
            f"{recipe.engine.max_context} tokens at once (runtime.concurrency is {recipe.runtime.concurrency})",
            highlight=False,
        )
        if plan.host:
            console.print(
                f"each of the learner's processes takes {plan.host / GIB:.1f} GiB of its machine's own memory while a "
                "checkpoint is written",
                highlight=False,
            )
        if (world := planned_layout(recipe).world) > 1:
            console.print(f"the learner's {world} processes: {recipe.hardware.layout}", highlight=False)
        plan.check()
        return 0

    return guarded(body)


if __name__ == "__main__":
    raise SystemExit(main())
