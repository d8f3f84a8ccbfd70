"""`python -m envs.swe_bench COMMAND ...`. Each command is a module with `add_parser` and `main`."""

from __future__ import annotations

import argparse
import sys

import envs.swe_bench.validate

COMMANDS = (envs.swe_bench.validate,)


def main(argv: list[str] | None = None) -> int:
    """Dispatch to a command; returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m envs.swe_bench",
        description="Tools around SWE-Bench.",
        epilog="example: python -m envs.swe_bench validate demo",
    )
    subparsers = parser.add_subparsers(required=True, metavar="COMMAND")
    for command in COMMANDS:
        command.add_parser(subparsers)
    arguments = parser.parse_args(argv)
    status: int = arguments.run(arguments)
    return status


if __name__ == "__main__":
    sys.exit(main())
