"""The demo set's commands: `build` its images, make its `rows` again, write scripted `traces`.

python -m envs.swe_bench.demo build --name durations
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import time
from pathlib import Path

from envs.core import EnvironmentFault
from envs.swe_bench.demo.build import ensure_demo_image
from envs.swe_bench.demo.rows import rows_text
from envs.swe_bench.demo.source import ROWS, DemoError, demo, demos
from sandboxes.base import SandboxFault
from sandboxes.docker_engine import DockerEngine


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


def parser() -> argparse.ArgumentParser:
    """The command line."""
    found = argparse.ArgumentParser(
        prog="python -m envs.swe_bench.demo",
        description="Five small repositories with a bug each, as instances in SWE-bench's row format.",
        epilog="example: python -m envs.swe_bench.demo build --name durations",
    )
    commands = found.add_subparsers(dest="command", required=True)
    for command, text in (("build", "build the images"), ("rows", "make rows.jsonl again; runs the tests with pytest")):
        one = commands.add_parser(command, help=text, epilog=f"example: python -m envs.swe_bench.demo {command}")
        one.add_argument("--name", choices=sorted(demos()), help="only this repository")
        if command == "build":
            one.add_argument("--force", action="store_true", help="also where the image is up to date")
        else:
            one.add_argument("--out", type=Path, help=f"default: {ROWS.name} of the package, or - with --name")
    return found


def main(argv: list[str] | None = None) -> int:
    """Run one command; 1 if it cannot be done, with the reason on standard error."""
    options = parser().parse_args(argv)
    names = [demo(options.name).name] if options.name else list(demos())
    try:
        if options.command == "build":
            asyncio.run(build(names, options.force))
        else:
            out = options.out or (Path("-") if options.name else ROWS)
            text = rows_text(names)
            if str(out) == "-":
                sys.stdout.write(text)
            else:
                out.write_bytes(text.encode())
                print(f"{len(names)} rows in {out}")
    except (DemoError, SandboxFault, EnvironmentFault) as error:
        print(f"{options.command}: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
