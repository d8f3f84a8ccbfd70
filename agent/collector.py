"""The garbage collector of a process that holds thousands of episodes at once."""

from __future__ import annotations

import gc

GROWTH = 1_000_000
"""A collection when there are so many more containers than at the last one (as many as 17,000 episodes in flight).

Python's own number is 700, and it walks through all that is alive again and again: at 10,000 episodes some 60
containers each (coroutines, tasks, messages; tokens are packed and not looked at), for half a second each time. Nearly
all of it is freed by reference counts: an episode leaves no cycle behind (`tests/runtime/test_collector.py`). What
cycles there are come of faults, and grow the number that is counted here, so that they are freed before they take much.
"""


def calm() -> None:
    """Collect when something has grown, and never again what is there now: modules, and whatever was loaded.

    To be called once, at the end of a process's start.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(GROWTH, 1, 1)
