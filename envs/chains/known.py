"""`python -m envs.chains known`: how much of the return anybody can know, where, if the policy errs as the weak player.

The player's chances are known link by link, so the best value of every prefix is too. Explained variance of the return
by it is a ceiling for any critic on that mix, found in seconds and without a model.
"""

from __future__ import annotations

import argparse
import asyncio
import math
import statistics
from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from envs.chains.chain import Chain
from envs.chains.env import Chains
from envs.chains.traces import chance, write_traces

EXAMPLE = """example:
  python -m envs.chains known --error-rate 0.3 --set tail=0.5 --set sum_shares=[0,1]
"""
PLACES = {"prompt": 0.0, "quarter": 0.25, "middle": 0.5, "three quarters": 0.75, "last turn": 1.0}


def best_values(chain: Chain, right: int, turns: int, error_rate: float) -> list[float]:
    """The chance of being paid before each of `turns` turns, of an episode whose first `right` calls were right."""
    chances = [chance(chain, index, error_rate) for index in range(len(chain.links))]
    return [math.prod(chances[turn:]) if turn <= right else 0.0 for turn in range(turns)]


def explained(returns: Sequence[float], values: Sequence[float]) -> float:
    """1 - Var(return - value) / Var(return); NaN where all returns are the same."""
    spread = statistics.pvariance(returns)
    left = statistics.pvariance([r - v for r, v in zip(returns, values, strict=True)])
    return 1 - left / spread if spread else math.nan


async def known(env: Chains, episodes: int, error_rate: float, seed: int = 0) -> tuple[float, dict[str, float]]:
    """The weak player's success, and the explained variance of its returns by the best values, by place."""
    ids = [env.task_ids[i] for i in range(min(episodes, len(env.task_ids)))]
    returns: list[float] = []
    values: dict[str, list[float]] = {place: [] for place in PLACES}
    async for messages in write_traces(env, ids, seed=seed, error_rate=error_rate):
        chain = env.chain(ids[len(returns)])
        answers = [m["content"] for m in messages if m["role"] == "tool"]
        right = next((i for i, text in enumerate(answers) if text.startswith("lost")), len(answers))
        turns = len(answers) + 1
        paid = right == len(chain.links) == len(answers) and messages[-1]["content"] == str(chain.result)
        best = best_values(chain, right, turns, error_rate)
        returns.append(float(paid))
        for place, share in PLACES.items():
            values[place].append(best[min(turns - 1, math.floor(share * turns))])
    return statistics.fmean(returns), {place: explained(returns, own) for place, own in values.items()}


def add_parser(subparsers: Any) -> None:
    """Register the command's arguments."""
    parser = subparsers.add_parser(
        "known",
        help="how much of the return a critic can know, at most",
        description=__doc__,
        epilog=EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--episodes", type=int, default=4000, help="how many are played (default 4000)")
    parser.add_argument("--error-rate", type=float, default=0.3, help="of the weak player (default 0.3)")
    parser.add_argument(
        "--set", action="append", default=[], metavar="KEY=VALUE", help="an argument of the environment"
    )
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Carry out the command. Exit status: 0, or 2 for arguments that cannot be used."""
    import yaml

    console = Console()
    try:
        if arguments.episodes < 2 or not 0 < arguments.error_rate <= 1:
            raise ValueError("--episodes must be at least 2 and --error-rate above 0 and at most 1")
        pairs = [word.partition("=") for word in arguments.set]
        env = Chains(**{key: yaml.safe_load(value) for key, _, value in pairs})
    except (ValueError, TypeError, yaml.YAMLError) as error:
        Console(stderr=True).print(f"known: {error}", markup=False)
        return 2
    success, found = asyncio.run(known(env, arguments.episodes, arguments.error_rate))
    table = Table("where", "explained variance, at most", title=f"success {success:.1%}")
    for place, value in found.items():
        table.add_row(place, f"{value:.3f}")
    console.print(table)
    return 0
