"""CPU time of a turn of a rollout, beside TRL's asynchronous loop and verifiers: model and environment do nothing.

    python benchmarks/peers/rollouts.py --trl python                       # TRL is in the tests' environment
    make suites                                                            # makes .venv-verifiers, in some minutes
    python benchmarks/peers/rollouts.py --trl python --verifiers .venv-verifiers/bin/python    # all, in 25 minutes
    python benchmarks/peers/rollouts.py --concurrency 1000 --rounds 1 --no-long        # the project alone, 20 seconds

Short episodes have 5 turns, a prompt of 200 tokens and 100 more a turn; the long one has 300 turns and 128K tokens. All
runtimes have the same tokenizer, chat template, prompt, tool, actions and observations; nobody writes an episode
anywhere. The fake engine is a process of its own; figures are of the process that runs the episodes. As soon as one
episode ends the next begins, so this is the cost of a saturated event loop. Workers take turns (A B C A B C).
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT)]

from benchmarks.peers.fake_engine import fake_engine  # noqa: E402
from benchmarks.peers.project_rollouts import worker  # noqa: E402
from benchmarks.peers.rollout_script import prepare  # noqa: E402
from benchmarks.report import save_json, show  # noqa: E402

HERE = Path(__file__).parent
EPISODES = {10: 100, 100: 300, 1000: 1500, 5000: 5000}
SHORT_TURNS, LONG_TURNS = 5, 300
IN_PROCESS, HTTP = "project, engine in process", "project, HTTP"
COLUMNS = ["episodes at once", "who", "CPU ms a turn", "it / project HTTP", "wall ms a turn", "peak MiB"]


def ask(command: list[str], asked: dict[str, Any]) -> dict[str, Any]:
    """Run a worker with one thread; its last line. Raises `RuntimeError` with what it said."""
    one_thread = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
    words = [*command, json.dumps(asked)]
    done = subprocess.run(words, env={**os.environ, **one_thread}, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(words)} failed:\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}")
    found: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return found


def commands(given: argparse.Namespace, concurrency: int) -> dict[str, list[str]]:
    """By name: what runs a worker."""
    project = [sys.executable, __file__, "--worker"]
    found = {IN_PROCESS: project, HTTP: project}
    if concurrency > given.peers_up_to:
        return found
    if given.trl:
        found["TRL async loop, HTTP"] = [given.trl, str(HERE / "trl_rollouts.py")]
    if given.verifiers:
        found["verifiers, HTTP"] = [given.verifiers, str(HERE / "verifiers_rollouts.py")]
    return found


def rounds(given: argparse.Namespace, asked: dict[str, Any]) -> dict[str, list[dict[str, Any]]]:
    """The answers of every worker, round by round, so that drift of the machine meets all alike."""
    run = commands(given, asked["concurrency"])
    answers: dict[str, list[dict[str, Any]]] = {name: [] for name in run}
    with fake_engine(Path(asked["folder"]), asked["length"], asked["turns"]) as url:
        for _ in range(given.rounds):
            for name, command in run.items():
                profile = given.profile and str(given.profile / f"{asked['length']}-{name.split(', ')[1]}.prof")
                own = {"url": None if name == IN_PROCESS else url, "profile": profile}
                answers[name].append(ask(command, asked | own))
                print(f"{asked['concurrency']:,} at once: {name}", file=sys.stderr, flush=True)
    return answers


def rows_of(label: str, answers: dict[str, list[dict[str, Any]]]) -> list[list[str]]:
    """Lines of the table: medians, with the least and the most of the CPU time."""
    rows = []
    base = [one["cpu_s"] / one["turns"] for one in answers[HTTP]]
    for name, found in answers.items():
        cpu = [1e3 * one["cpu_s"] / one["turns"] for one in found]
        ratio = statistics.median(c / 1e3 / b for c, b in zip(cpu, base, strict=True))
        wall = statistics.median(1e3 * one["wall_s"] / one["turns"] for one in found)
        spread = f"{statistics.median(cpu):.3f} ({min(cpu):.3f}-{max(cpu):.3f})"
        rows.append([label, name, spread, f"{ratio:.2f}", f"{wall:.3f}", f"{max(o['peak_mib'] for o in found):,.0f}"])
    return rows


def main() -> int:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trl", help="the Python that has TRL (none: without it)")
    parser.add_argument("--verifiers", help="the Python that has verifiers (none: without it)")
    parser.add_argument("--concurrency", type=int, nargs="+", default=list(EPISODES))
    parser.add_argument("--episodes", type=int, help="how many (none: as many as take a few seconds)")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--peers-up-to", type=int, default=1000, help="episodes at once with which the others run too")
    parser.add_argument("--long-turns", type=int, default=LONG_TURNS)
    parser.add_argument("--no-long", action="store_true", help="without the episode of 300 turns")
    parser.add_argument("--profile", type=Path, help="folder for cProfile's statistics of the project's workers")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.worker:
        asyncio.run(worker(json.loads(given.worker)))
        return 0
    for python in filter(None, (given.trl, given.verifiers)):
        if shutil.which(python) is None:
            parser.error(f"{python} is no program")
    for name in ("trl", "verifiers"):
        if not getattr(given, name):
            print(f"without {name}: give --{name} PYTHON to have it beside the project", file=sys.stderr)
    rows, kept = [], []
    with tempfile.TemporaryDirectory() as scratch:
        prepare(Path(scratch))
        sizes = [("short", SHORT_TURNS, n, given.episodes or EPISODES.get(n, n)) for n in given.concurrency]
        if not given.no_long:
            sizes.append(("long", given.long_turns, 1, 1))
        for length, turns, concurrency, episodes in sizes:
            asked = {"length": length, "turns": turns, "concurrency": concurrency, "episodes": episodes}
            answers = rounds(given, asked | {"folder": scratch})
            label = f"{concurrency:,}" if length == "short" else f"1 of {turns} turns, {answers[HTTP][0]['tokens']:,}"
            rows += rows_of(label, answers)
            kept += [asked | {"who": who, "answers": found} for who, found in answers.items()]
    notes = [f"medians of {given.rounds} rounds (least-most), one thread each"]
    show("A turn of a rollout", COLUMNS, rows, notes)
    save_json(given.json, {"rollouts": kept})
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
