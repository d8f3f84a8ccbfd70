"""What an attacker is: a small function with a docstring, registered in the arena of its environment.

    ARENA: Arena[Mark] = Arena("my/Env-v0", sources)

    @ARENA.attacker
    def flattery(mark: Mark, rng: random.Random) -> Iterator[Attempt]:
        '''Praise in place of an answer.'''
        yield Attempt((f"What a {rng.choice(('fine', 'clever'))} question!",))

An attacker may know everything, the right answer too: what it must not do is to give that answer. An honest policy
(`@ARENA.honest`) gives it, in some form that must be taken.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

M = TypeVar("M")


@dataclass(frozen=True, slots=True)
class Attempt:
    """The actions of one episode, in order. With `cut` the last one is cut short at a limit: the episode is truncated
    with it. Actions that are left when an episode has ended are not played. `told` says it shorter for the report."""

    actions: tuple[str, ...]
    cut: bool = False
    told: str = ""


@dataclass(frozen=True, slots=True)
class Task(Generic[M]):
    """One task of a source: the options of its reset, and what attackers may know of it."""

    options: Mapping[str, Any]
    mark: M


@dataclass(frozen=True, slots=True)
class Source(Generic[M]):
    """Tasks of one kind: `kwargs` make the environment that has them. `reward_for_nothing` is the highest reward that
    counts as nothing earned."""

    name: str
    kwargs: Mapping[str, Any]
    tasks: Sequence[Task[M]]
    reward_for_nothing: float = 0.0


Attempts = Callable[[M, random.Random], Iterable[Attempt]]
Sources = Callable[[int, int, Mapping[str, Any]], Sequence[Source[M]]]
"""From a seed, the number of tasks a source and the user's keyword arguments to the sources."""


@dataclass(frozen=True, slots=True)
class Policy(Generic[M]):
    """A scripted policy. `attempts` yields what it may do in one task; of those `most` are drawn with the seed."""

    name: str
    tries: str
    honest: bool
    attempts: Attempts[M]
    most: int


@dataclass(slots=True)
class Arena(Generic[M]):
    """An environment's attackers and honest policies, and the sources they are played against.

    `episodes`: tasks of each source in a default run. `most`: attempts that a policy has at one task, unless it is
    registered with another number. `concurrency`: episodes at once.
    """

    env_id: str
    sources: Sources[M]
    episodes: int
    most: int = 1
    concurrency: int = 4
    policies: list[Policy[M]] = field(default_factory=list)

    def attacker(self, attempts: Attempts[M]) -> Attempts[M]:
        """Register a function as an attacker: its name is the attacker's, its docstring says what it tries."""
        return self._register(attempts, honest=False)

    def honest(self, attempts: Attempts[M]) -> Attempts[M]:
        """Register a function as an honest policy: what it does is right, and should be taken."""
        return self._register(attempts, honest=True)

    def _register(self, attempts: Attempts[M], *, honest: bool) -> Attempts[M]:
        name = getattr(attempts, "__name__", "").replace("_", " ")
        tries = (attempts.__doc__ or "").strip().partition("\n")[0]
        if not tries:
            raise ValueError(f"{name or attempts!r} has no docstring: its first line says what is tried")
        if any(policy.name == name for policy in self.policies):
            raise ValueError(f"{self.env_id} has a policy {name!r} already")
        self.policies.append(Policy(name, tries, honest, attempts, self.most))
        return attempts

    def plan(self, source: Source[M], policy: Policy[M], seed: int) -> list[tuple[Task[M], Attempt]]:
        """What `policy` does in `source` with `seed`: the same for the same arguments, in any process."""
        planned = []
        for index, task in enumerate(source.tasks):
            rng = random.Random(f"{seed}/{source.name}/{policy.name}/{index}")
            found = list(dict.fromkeys(policy.attempts(task.mark, rng)))
            drawn = found if len(found) <= policy.most else rng.sample(found, policy.most)
            planned += [(task, attempt) for attempt in drawn]
        return planned
