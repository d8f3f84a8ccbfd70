"""Open files: the limit is raised, or what needs more is refused with the number."""

from __future__ import annotations

import subprocess
import sys

import pytest

RAISE = """
import resource, sys
soft, hard, connections = map(int, sys.argv[1:])
resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
from agent.descriptors import TooFewDescriptors, raise_limit
try:
    print(raise_limit(connections, "concurrency=1200"))
except TooFewDescriptors as error:
    print(error)
"""


@pytest.mark.parametrize(
    ("soft", "hard", "connections", "said"),
    [(256, 900, 700, "900"), (900, 900, 10, "900"), (256, 900, 2400, "concurrency=1200 needs 2528 open files")],
)
def test_a_process_of_many_connections_raises_its_limit_or_says_the_number(
    soft: int, hard: int, connections: int, said: str
) -> None:
    """Case M9: under `ulimit -n 1024` the engine was asked "is it running?"."""
    command = [sys.executable, "-c", RAISE, *map(str, (soft, hard, connections))]
    ended = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
    assert ended.stdout.startswith(said)
