"""`python -m envs.attack [ID ...]`: do scripted policies earn anything without solving, and do honest ones?"""

from __future__ import annotations

import argparse
import asyncio
import importlib
import json
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.console import Console

from envs.attack.arena import Arena
from envs.attack.play import play
from envs.attack.report import Row, as_json, attackers_earned, show
from envs.core import EnvironmentFault

ARENAS: Mapping[str, str] = {
    "sao/PythonTIR-v0": "envs.attack.python_tir.attackers:ARENA",
    "sao/SWEBench-v0": "envs.attack.swe_bench.attackers:ARENA",
    "sao/StyleShift-v0": "envs.attack.style_shift.attackers:ARENA",
}
"""Environment id to the `module:name` of its arena."""

EXAMPLE = """examples:
  python -m envs.attack                                       all three, one seed
  python -m envs.attack sao/PythonTIR-v0 --seeds 0 1 2 --json attack.json
  python -m envs.attack sao/PythonTIR-v0 --kwargs '{"problems": {"source": "file", "path": "mine.jsonl"}}'
  python -m envs.attack my_package.attackers:ARENA --episodes 5

exit status: 0 nothing earned, 1 an attacker earned, 2 something could not be played
"""


def arena_of(name: str) -> Arena[Any]:
    """The arena of an environment id, or of `package.module:NAME`. Raises `ValueError` for anything else."""
    target = ARENAS.get(name.removeprefix("envs:"), name)
    module, colon, attribute = target.partition(":")
    if not colon or "/" in target:
        raise ValueError(f"there are no attackers for {name!r}; known: {', '.join(ARENAS)}, or package.module:NAME")
    try:
        arena = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        raise ValueError(f"the attackers {name!r} cannot be had: {error}") from error
    if not isinstance(arena, Arena):
        raise ValueError(f"{name!r} is no Arena but {type(arena).__name__}")
    return arena


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m envs.attack",
        description=__doc__,
        epilog=EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("environments", nargs="*", metavar="ID", help="environment ids (default: all of this project)")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0], metavar="N", help="of all draws (default: 0)")
    parser.add_argument(
        "--episodes", type=int, metavar="N", help="tasks of each source and seed (default: by environment)"
    )
    parser.add_argument(
        "--kwargs", type=json.loads, metavar="JSON", help="arguments of the one environment that is named"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the report there too; - is standard output")
    parser.add_argument("--list", action="store_true", help="say what each policy tries, and play none")
    return parser


def main(argv: list[str] | None = None) -> int:
    """Play and report. Exit status: 0 if nothing was earned, 1 if an attacker earned, 2 if something was not played."""
    parser = _parser()
    arguments = parser.parse_args(argv)
    names = arguments.environments or list(ARENAS)
    if arguments.episodes is not None and arguments.episodes < 1:
        parser.error("--episodes must be at least 1")
    if arguments.kwargs is not None and (len(names) != 1 or not isinstance(arguments.kwargs, dict)):
        parser.error("--kwargs is a JSON object, for one environment: name it")
    try:
        arenas = [arena_of(name) for name in names]
    except ValueError as error:
        parser.error(str(error))
    console = Console(stderr=str(arguments.json) == "-", width=None if sys.stdout.isatty() else 130)
    if arguments.list:
        _list(arenas, console)
        return 0
    rows: list[Row] = []
    not_played: dict[str, str] = {}
    for arena in arenas:
        begun = time.monotonic()
        try:
            played = asyncio.run(_play(arena, arguments))
        except (EnvironmentFault, ValueError, OSError, ImportError) as error:
            not_played[arena.env_id] = f"{type(error).__name__}: {error}"
            continue
        rows += played
        void = [row for row in played if row.episodes == row.faults]
        if void:
            not_played[arena.env_id] = f"all episodes of {void[0].policy!r} in {void[0].source!r} were void"
        spent = time.monotonic() - begun
        console.print(f"{arena.env_id}: {sum(row.episodes for row in played)} episodes in {spent:.1f} s")
    show(rows, console)
    for env_id, reason in not_played.items():
        print(f"attack: {env_id} was not played: {reason}", file=sys.stderr)
    if arguments.json is not None:
        text = as_json(rows, arguments.seeds, not_played) + "\n"
        if str(arguments.json) == "-":
            sys.stdout.write(text)
        else:
            arguments.json.write_text(text, encoding="utf-8")
    if attackers_earned(rows):
        return 1
    return 2 if not_played else 0


async def _play(arena: Arena[Any], arguments: argparse.Namespace) -> list[Row]:
    def progress(done: int, total: int) -> None:
        if sys.stderr.isatty() and (done % 20 == 0 or done == total):
            print(f"\r{arena.env_id}: {done}/{total} ", end="\n" if done == total else "", file=sys.stderr, flush=True)

    return await play(arena, arguments.seeds, episodes=arguments.episodes, kwargs=arguments.kwargs, progress=progress)


def _list(arenas: list[Arena[Any]], console: Console) -> None:
    for arena in arenas:
        console.print(arena.env_id, style="bold")
        for policy in arena.policies:
            kind = "honest  " if policy.honest else "attacker"
            console.print(f"  {kind} {policy.name}: {policy.tries}", markup=False, highlight=False)


if __name__ == "__main__":
    sys.exit(main())
