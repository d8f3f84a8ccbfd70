"""`python -m envs.style_shift COMMAND ...`. Each command is a module with `add_parser` and `run`."""

from __future__ import annotations

import argparse
import sys

import envs.style_shift.agreement
import envs.style_shift.tiny

COMMANDS = (envs.style_shift.agreement, envs.style_shift.tiny)


def main(argv: list[str] | None = None) -> int:
    """Dispatch to a command; returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m envs.style_shift",
        description="Tools around StyleShift.",
        epilog="example: python -m envs.style_shift agreement",
    )
    subparsers = parser.add_subparsers(required=True, metavar="COMMAND")
    for command in COMMANDS:
        command.add_parser(subparsers)
    arguments = parser.parse_args(argv)
    status: int = arguments.run(arguments)
    return status


if __name__ == "__main__":
    sys.exit(main())
