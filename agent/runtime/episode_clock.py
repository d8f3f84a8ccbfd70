"""The runtime's own clock of one episode, `limits.episode_s`."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator


class EpisodeClock:
    """Runs down from `limit_s` seconds. It stands still while the episode waits for an engine to come back.

    "The clocks of an episode" in docs/runtime.md draws it among the others, and says what its end means.
    """

    def __init__(self, limit_s: float) -> None:
        self._ends_at = time.monotonic() + limit_s

    @property
    def left_s(self) -> float:
        """Seconds left, 0 once it is over."""
        return max(0.0, self._ends_at - time.monotonic())

    @property
    def over(self) -> bool:
        """Whether it has run down."""
        return time.monotonic() >= self._ends_at

    @contextlib.contextmanager
    def stopped(self) -> Iterator[None]:
        """What is done inside is not counted."""
        began = time.monotonic()
        yield
        self._ends_at += time.monotonic() - began
