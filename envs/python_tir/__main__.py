"""`python -m envs.python_tir COMMAND ...`. Each command is a module with `add_parser` and `main`."""

from __future__ import annotations

import argparse
import sys

import envs.python_tir.check

COMMANDS = (envs.python_tir.check,)


def main(argv: list[str] | None = None) -> int:
    """Dispatch to a command; returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m envs.python_tir",
        description="Tools around Python-TIR.",
        epilog="example: python -m envs.python_tir check problems.jsonl",
    )
    subparsers = parser.add_subparsers(required=True, metavar="COMMAND")
    for command in COMMANDS:
        command.add_parser(subparsers)
    arguments = parser.parse_args(argv)
    status: int = arguments.run(arguments)
    return status


if __name__ == "__main__":
    sys.exit(main())
