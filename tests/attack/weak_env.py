"""A user's environment with a weak scorer, and its attackers: what the framework must catch."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from envs.attack.arena import Arena, Attempt, Source, Task
from envs.core import AsyncEnv, EnvironmentFault, Step


class Weak(AsyncEnv):
    """Pays for any text that holds the answer; `strict` pays for the answer alone."""

    def __init__(self, strict: bool = False) -> None:
        self.strict = strict
        self.task = ""
        self.closed = False

    @property
    def task_ids(self) -> Sequence[str]:
        return ("7", "8")

    async def areset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[str, dict[str, Any]]:
        self.task = (options or {})["task_id"]
        return self.task, {"messages": [], "tools": [], "task_id": self.task, "segment": "prompt"}

    async def astep(self, action: str) -> Step:
        if action == "wait":
            return "", 0.0, False, False, {}
        if action == "fault":
            raise EnvironmentFault("the scorer is gone")
        right = action == self.task if self.strict else self.task in action
        return "", float(right), True, False, {}

    async def atruncate(self, reason: str, action: str = "") -> Step:
        return "", float(self.task in action and not self.strict), False, True, {"truncation": reason}

    async def aclose(self) -> None:
        self.closed = True


def sources(seed: int, episodes: int, kwargs: Mapping[str, Any]) -> Sequence[Source[str]]:
    return [Source("numbers", dict(kwargs), [Task({"task_id": one}, one) for one in ("7", "8")])]


def make_arena() -> Arena[str]:
    arena: Arena[str] = Arena("test/Weak-v0", sources, episodes=2, most=2, concurrency=2)

    @arena.attacker
    def many_digits(mark: str, rng: random.Random) -> Iterator[Attempt]:
        """All digits in an order that the seed draws."""
        for _ in range(5):
            yield Attempt(("wait", "".join(rng.sample("0123456789", 10))))

    @arena.attacker
    def wrong(mark: str, rng: random.Random) -> Iterator[Attempt]:
        """Another digit."""
        yield Attempt(("9",))

    @arena.attacker
    def cut_short(mark: str, rng: random.Random) -> Iterator[Attempt]:
        """The answer in an action that is cut."""
        yield Attempt((f"it is {mark}",), cut=True)

    @arena.honest
    def right(mark: str, rng: random.Random) -> Iterator[Attempt]:
        """The digit."""
        yield Attempt((mark,))

    return arena


ARENA = make_arena()
