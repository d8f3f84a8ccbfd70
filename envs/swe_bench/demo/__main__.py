"""The demo set's commands: `build` its images, make its `rows` again, write scripted `traces`.

python -m envs.swe_bench.demo build --name durations
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import time
from pathlib import Path
from typing import Any

from envs.commands import run_command
from envs.core import EnvironmentFault
from envs.making import make_core
from envs.swe_bench.demo.build import ensure_demo_image
from envs.swe_bench.demo.rows import rows_text
from envs.swe_bench.demo.source import ROWS, DemoError, demo, demos
from envs.swe_bench.demo.traces import write_traces
from sandboxes.base import SandboxFault
from sandboxes.docker.engine import DockerEngine


def _names(arguments: argparse.Namespace) -> list[str]:
    return [demo(arguments.name).name] if arguments.name else list(demos())


async def build(names: list[str], force: bool) -> None:
    """Build the images of these repositories, one after the other."""
    engine = DockerEngine()
    try:
        for name in names:
            begin = time.monotonic()
            image = await ensure_demo_image(name, engine=engine, force=force)
            print(f"{image}: ready ({time.monotonic() - begin:.1f} s)", flush=True)
    finally:
        await engine.close()


def rows(arguments: argparse.Namespace) -> None:
    """Write rows.jsonl again, or the row of one repository to standard output."""
    names = _names(arguments)
    text = rows_text(names)
    if arguments.out is None and arguments.name:
        sys.stdout.write(text)
        return
    out: Path = arguments.out or ROWS
    out.write_bytes(text.encode())
    print(f"{len(names)} rows in {out}")


async def traces(arguments: argparse.Namespace) -> None:
    """Write scripted traces as JSON lines of `messages`, `task_id` and `reward`."""
    out: Path = arguments.out
    played = write_traces(
        lambda: make_core("sao/SWEBench-v0", instances="demo", scaffold="bash"),
        arguments.count,
        seed=arguments.seed,
        error_rate=arguments.error_rate,
        concurrency=arguments.concurrency,
    )
    solved = written = 0
    # A file that is there is whole: what a run that fails has written goes with it.
    partial = out.with_name(out.name + ".partial")
    try:
        with partial.open("w", encoding="utf-8") as file:
            async for trace in played:
                line = {"task_id": trace.task_id, "reward": trace.reward, "messages": trace.messages}
                file.write(json.dumps(line, ensure_ascii=False) + "\n")
                written, solved = written + 1, solved + (trace.reward > 0)
                print(f"\r{written}/{arguments.count} traces, {solved} solved", end="", file=sys.stderr, flush=True)
        partial.replace(out)
    finally:
        print(file=sys.stderr)
        partial.unlink(missing_ok=True)
        await played.aclose()
    print(f"{written} traces, {solved} of them solved, in {out}")


def add_parsers(subparsers: Any) -> None:
    """Register the three commands' arguments."""

    def add(name: str, text: str, example: str) -> argparse.ArgumentParser:
        parser: argparse.ArgumentParser = subparsers.add_parser(
            name, help=text, description=text, epilog=f"example: python -m envs.swe_bench.demo {example}"
        )
        parser.set_defaults(run=run, command=name)
        return parser

    one = add("build", "Build the images.", "build --name durations")
    one.add_argument("--name", choices=sorted(demos()), help="only this repository")
    one.add_argument("--force", action="store_true", help="also where the image is up to date")
    one = add("rows", "Make rows.jsonl again; runs the tests with pytest.", "rows --out rows.jsonl")
    one.add_argument("--name", choices=sorted(demos()), help="only this repository")
    one.add_argument("--out", type=Path, help=f"default: {ROWS.name} of the package; with --name, standard output")
    one = add("traces", "Write scripted traces for a cold start.", "traces traces.jsonl --count 100 --error-rate 0.3")
    one.add_argument("out", type=Path, metavar="OUT.jsonl")
    one.add_argument("--count", type=int, default=50, help="number of traces (default: %(default)s)")
    one.add_argument("--seed", type=int, default=0)
    one.add_argument("--error-rate", type=float, default=0.0, help="share of traces with a mistake (default: none)")
    one.add_argument("--concurrency", type=int, default=2, help="episodes at once (default: %(default)s)")


def run(arguments: argparse.Namespace) -> int:
    """Carry out one command. Exit status: 0, or 1 if it cannot be done, with the reason on standard error."""
    try:
        if arguments.command == "build":
            asyncio.run(build(_names(arguments), arguments.force))
        elif arguments.command == "rows":
            rows(arguments)
        else:
            asyncio.run(traces(arguments))
    except (DemoError, SandboxFault, EnvironmentFault, OSError) as error:
        print(f"{arguments.command}: {error}", file=sys.stderr)
        return 1
    return 0


def main(argv: list[str] | None = None) -> int:
    """Carry out one command; returns the exit status."""
    return run_command(
        argv,
        [add_parsers],
        package="envs.swe_bench.demo",
        description="Five small repositories with a bug each, as instances in SWE-bench's row format.",
        example="build --name durations",
    )


if __name__ == "__main__":
    sys.exit(main())
