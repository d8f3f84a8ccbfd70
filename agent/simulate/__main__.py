"""Simulated users, for SAO and a running-mean baseline or for any server: `python -m agent.simulate [RECIPE | URL]`.

python -m agent.simulate recipes/style_shift_tiny.yaml --seeds 0,1,2 --grid 2e-4,3e-4 --out runs/style_shift
python -m agent.simulate http://127.0.0.1:8000 --recipe recipes/style_shift_tiny.yaml
"""

from __future__ import annotations

import argparse
import asyncio
import sys
from importlib import resources
from pathlib import Path

import aiohttp

from agent.doors.door import DoorFault
from agent.serve.config import ServeError, load_recipe
from agent.serve.doors.own_key import client_key
from agent.simulate.audience import StyleAudience
from agent.simulate.clock import Stalled
from agent.simulate.compare import Comparison, Settings, Teller, audience_of, use_server
from agent.simulate.processes import ProcessFault
from agent.simulate.report import draw, rewards_table, table
from agent.simulate.runs import write_csv
from agent.simulate.users import UserFault
from envs import EnvironmentFault

EXPECTED = (
    ServeError,
    DoorFault,
    Stalled,
    ProcessFault,
    UserFault,
    EnvironmentFault,
    ValueError,
    OSError,
    aiohttp.ClientError,
)


def _parser() -> argparse.ArgumentParser:
    description, _, example = (__doc__ or "").partition("\n\n")
    parser = argparse.ArgumentParser(
        prog="python -m agent.simulate",
        description=description,
        epilog=f"Runs that are finished are found again, so seeds can come in parts.\n\nexample:\n{example}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    default = resources.files("recipes") / "style_shift_tiny.yaml"
    target = "a recipe: servers and learners are started here; a URL: a server that runs (default: the tiny recipe)"
    parser.add_argument("target", nargs="?", default=str(default), metavar="RECIPE|URL", help=target)
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="keys of the recipe")
    parser.add_argument(
        "--recipe", type=Path, default=Path(str(default)), help="with a URL: whose environment's users, steps and batch"
    )
    key = "with a URL: file with the key to show (default: $SAO_API_KEY, or what the server of --recipe has made here)"
    parser.add_argument("--key-file", type=Path, help=key)
    parser.add_argument(
        "--methods", default="sao,sao_running_mean", help="algorithms to compare (default: %(default)s)"
    )
    parser.add_argument("--seeds", default="0", help="e.g. 0,1,2 (default: 0)")
    grid = "learning rates to try for every method; the best by mean reward is used (default: the recipe's only)"
    parser.add_argument("--grid", default="", help=grid)
    parser.add_argument("--tuning-seed", type=int, default=1000, help="the seed of the search (default: 1000)")
    parser.add_argument("--users", type=int, default=16, help="how many at once (default: 16)")
    parser.add_argument(
        "--ahead", type=int, default=1, help="batches that users may be ahead of the policy (default: 1)"
    )
    parser.add_argument(
        "--patience", type=float, default=600.0, help="seconds that the policy may stand still (default: 600)"
    )
    parser.add_argument(
        "--pace", type=float, default=0.0, help="with a URL: seconds between two questions of a user (default: 0)"
    )
    parser.add_argument(
        "--out", type=Path, default=Path("runs/simulate"), help="CSVs, figure, table (default: %(default)s)"
    )
    return parser


def main(argv: list[str] | None = None) -> int:
    """Command line; see `--help`. 0, or 1 with a message where something is not as it should be."""
    arguments = _parser().parse_intermixed_args(argv)
    try:
        if arguments.target.startswith(("http://", "https://")):
            print(asyncio.run(_served(arguments)))
        else:
            print(asyncio.run(_compared(arguments)))
    except EXPECTED as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except BaseExceptionGroup as group:
        known, other = group.split(EXPECTED)
        if other is not None or known is None:
            raise
        print(f"error: {_first(known)}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("stopped; the same command goes on with what is not finished", file=sys.stderr)
        return 130
    return 0


def _first(group: BaseExceptionGroup[BaseException]) -> BaseException:
    error = group.exceptions[0]
    return _first(error) if isinstance(error, BaseExceptionGroup) else error


async def _compared(arguments: argparse.Namespace) -> str:
    settings = Settings(
        recipe=Path(arguments.target),
        overrides=tuple(arguments.overrides),
        methods=tuple(arguments.methods.split(",")),
        seeds=tuple(int(word) for word in arguments.seeds.split(",")),
        grid=tuple(float(word) for word in arguments.grid.split(",") if word),
        tuning_seed=arguments.tuning_seed,
        folder=arguments.out,
        concurrency=arguments.users,
        ahead=arguments.ahead,
        patience_s=arguments.patience,
    )
    return await Comparison(settings, _say).run()


async def _served(arguments: argparse.Namespace) -> str:
    audience = audience_of(arguments.recipe, arguments.overrides)
    recipe = load_recipe(arguments.recipe, arguments.overrides)
    seed = int(arguments.seeds.split(",")[0])
    interactions = await use_server(
        arguments.target.rstrip("/"),
        audience,
        batch=recipe.learner.batch_size,
        seed=seed,
        concurrency=arguments.users,
        ahead=arguments.ahead,
        patience_s=arguments.patience,
        pace_s=arguments.pace,
        key=client_key(recipe.folder, arguments.key_file),
        on_interaction=Teller("served", audience.steps, 1, _say),
    )
    arguments.out.mkdir(parents=True, exist_ok=True)
    write_csv(arguments.out / f"served-seed{seed}.csv", interactions)
    if not isinstance(audience, StyleAudience):
        return rewards_table(interactions, audience.steps)
    results, schedule = {"served": {seed: interactions}}, audience.env.schedule
    draw(results, schedule, arguments.out / "served.png")
    return table(results, schedule, {})


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


if __name__ == "__main__":
    raise SystemExit(main())
