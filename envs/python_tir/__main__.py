"""`python -m envs.python_tir COMMAND ...`."""

from __future__ import annotations

import sys

from envs.commands import run_command
from envs.python_tir import check


def main(argv: list[str] | None = None) -> int:
    """Carry out one command; returns the exit status."""
    return run_command(
        argv,
        [check.add_parser],
        package="envs.python_tir",
        description="Tools around Python-TIR.",
        example="check problems.jsonl",
    )


if __name__ == "__main__":
    sys.exit(main())
