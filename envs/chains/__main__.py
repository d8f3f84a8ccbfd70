"""`python -m envs.chains COMMAND ...`."""

from __future__ import annotations

import sys

from envs.chains import known
from envs.commands import run_command


def main(argv: list[str] | None = None) -> int:
    """Carry out one command; returns the exit status."""
    return run_command(
        argv, [known.add_parser], package="envs.chains", description="Tools around Chains.", example="known"
    )


if __name__ == "__main__":
    sys.exit(main())
