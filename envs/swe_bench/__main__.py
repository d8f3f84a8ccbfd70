"""`python -m envs.swe_bench COMMAND ...`."""

from __future__ import annotations

import sys

from envs.commands import run_command
from envs.swe_bench import validate


def main(argv: list[str] | None = None) -> int:
    """Carry out one command; returns the exit status."""
    return run_command(
        argv,
        [validate.add_parser],
        package="envs.swe_bench",
        description="Tools around SWE-Bench.",
        example="validate demo",
    )


if __name__ == "__main__":
    sys.exit(main())
