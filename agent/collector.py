"""The garbage collector of a process that holds thousands of episodes at once."""

from __future__ import annotations

import gc

YOUNG, MIDDLE, OLD = 5_000, 5, 1_000
"""A collection of what is new for every so many new containers, one of the middle generation for so many of those, and
one of everything for so many of these.

With Python's own 700, 10 and 10 a runtime spends a quarter of its CPU time and more on walking through what is alive,
and stands still for half a second each time, at 10,000 episodes: each of them is some 60 containers (coroutines,
tasks, messages), while tokens are packed and not looked at. Nearly all of it is freed by reference counts: an episode
leaves no cycle behind (`tests/runtime/test_collector.py`). So everything is walked through once in hours; what is new,
often enough that it takes milliseconds.
"""


def calm() -> None:
    """Collect seldom, and never again what is there now: modules, and whatever was loaded.

    To be called once, at the end of a process's start.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(YOUNG, MIDDLE, OLD)
