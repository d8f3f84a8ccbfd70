"""`python -m envs.style_shift COMMAND ...`."""

from __future__ import annotations

import sys

from envs.commands import run_command
from envs.style_shift import agreement, traces


def main(argv: list[str] | None = None) -> int:
    """Carry out one command; returns the exit status."""
    return run_command(
        argv,
        [agreement.add_parser, traces.add_parser],
        package="envs.style_shift",
        description="Tools around StyleShift.",
        example="agreement",
    )


if __name__ == "__main__":
    sys.exit(main())
