"""Waiting for what is away: how long between two tries, and the error once patience has run out."""

from __future__ import annotations

import random


class Unreachable(RuntimeError):
    """The store, or every engine, stayed away longer than configured; the message says which, and what to do."""


def backoff_s(tries: int, *, first_s: float = 0.1, most_s: float = 10.0) -> float:
    """Seconds to wait after the `tries`-th failure in a row: exponential, with full jitter so that slots spread."""
    return random.uniform(0.5, 1.0) * doubled_s(tries, first_s=first_s, most_s=most_s)


def doubled_s(tries: int, *, first_s: float, most_s: float) -> float:
    """The same without jitter, for what is alone."""
    return min(most_s, first_s * 2.0 ** min(tries - 1, 20))
