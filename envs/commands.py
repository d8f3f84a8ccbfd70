"""The frame of `python -m envs.SOMETHING COMMAND ...`: every command is a function that adds its parser."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from typing import Any

AddParser = Callable[[Any], None]
"""Adds a command's parser to the subparsers it is given, with `run` as a default: arguments in, exit status out."""


def run_command(
    argv: Sequence[str] | None, commands: Sequence[AddParser], *, package: str, description: str, example: str
) -> int:
    """Carry out the command that `argv` (None: the command line) asks for; returns its exit status.

    `package` is what stands behind `python -m`, `example` what may follow it. Arguments that no command takes end
    the process with status 2, as `argparse` does.
    """
    prog = f"python -m {package}"
    parser = argparse.ArgumentParser(prog=prog, description=description, epilog=f"example: {prog} {example}")
    subparsers = parser.add_subparsers(required=True, metavar="COMMAND")
    for add_parser in commands:
        add_parser(subparsers)
    arguments = parser.parse_args(argv)
    status: int = arguments.run(arguments)
    return status
