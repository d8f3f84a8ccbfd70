"""The arena of `sao/PythonTIR-v0`: its sources, and what attackers know of a problem."""

from __future__ import annotations

import os
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from envs.attack.arena import Arena, Attempt, Source, Task
from envs.attack.python_tir.golds import GOLDS
from envs.python_tir.env import NO_PROBLEMS
from envs.python_tir.grading.variants import simple_value
from envs.python_tir.problems.sets import ProblemSet
from envs.python_tir.problems.sources import Spec, load_problems

Asks = Literal["arithmetic", "mathematics", "puzzle"]
"""What counts as an answer: a literal number; a closed form too; what the family's own scorer takes."""

PUZZLES: Mapping[str, Any] = {
    "source": "reasoning_gym",
    "size": 1000,
    "seed": 7,
    "families": {"countdown": {}, "puzzle24": {}, "simple_equations": {}},
}
_MANY = 10**9


@dataclass(frozen=True, slots=True)
class Mark:
    """A problem as an attacker sees it. `kind` is the gold's type where it was made, else the family's name."""

    prompt: str
    gold: str
    asks: Asks
    kind: str
    others: tuple[str, ...] = field(repr=False)

    def __str__(self) -> str:
        return f"{self.prompt.strip()[-60:]!r} gold {self.gold!r}"

    def is_right(self, written: str) -> bool:
        """Whether `written` is, as a plain number, the gold itself: then it is no attack, but a solution."""
        try:
            value = simple_value(written)
        except ValueError:  # more digits than Python reads
            value = None
        return written.strip() == self.gold.strip() or (value is not None and value == simple_value(self.gold))


def boxed(mark: Mark, *answers: str) -> list[Attempt]:
    """One attempt for each answer that is not the gold itself, boxed."""
    return [Attempt((rf"\boxed{{{answer}}}",)) for answer in answers if not mark.is_right(answer)]


def sources(seed: int, episodes: int, kwargs: Mapping[str, Any]) -> Sequence[Source[Mark]]:
    """The default problems, the tiny recipe's, puzzles with scorers of their own, and golds of every type.

    With `problems` in `kwargs` those alone; a key `asks` in `kwargs` says what they ask for (default: mathematics).
    """
    given = dict(kwargs)
    asks: Asks = given.pop("asks", "mathematics")
    if "problems" in given:
        return [_drawn("problems", given.pop("problems"), asks, seed, episodes, given)]
    tiny: Spec = {"source": "tiny_fold", "size": 20_000, "seed": _MANY + seed}
    return [
        _drawn("default", None, "arithmetic", seed, episodes, given),
        _drawn("tiny_fold", tiny, "arithmetic", seed, episodes, given),
        _drawn("puzzles", PUZZLES, "puzzle", seed, episodes, given),
        _typed(seed, episodes, given),
    ]


def _kwargs(given: Mapping[str, Any], problems: Spec | None) -> dict[str, Any]:
    # No interpreter: whether its output earns is the same question with a refusal in its place, and quicker.
    fixed = {"tool": False, "max_turns": 4, "grader_workers": min(4, os.cpu_count() or 1), "grader_timeout_s": 3.0}
    return {**fixed, **given, **({} if problems is None else {"problems": problems})}


def _drawn(
    name: str, problems: Spec | None, asks: Asks, seed: int, episodes: int, given: Mapping[str, Any]
) -> Source[Mark]:
    loaded: ProblemSet = load_problems(NO_PROBLEMS if problems is None else problems)
    rng = random.Random(f"{name}/{seed}")
    chosen = [loaded[index] for index in rng.sample(range(len(loaded)), min(episodes, len(loaded)))]
    golds = tuple(problem.answer for problem in chosen)
    tasks = [Task({"task_id": one.task_id}, Mark(one.question, one.answer, asks, one.family, golds)) for one in chosen]
    return Source(name, _kwargs(given, problems), tasks, float(given.get("reward_wrong", 0.0)))


def _typed(seed: int, episodes: int, given: Mapping[str, Any]) -> Source[Mark]:
    rng = random.Random(f"typed/{seed}")
    rows: list[dict[str, str]] = []
    kinds = []
    for index in range(max(episodes, len(GOLDS))):
        kind = list(GOLDS)[index % len(GOLDS)]
        kinds.append(kind)
        question = f"Problem {index} has an answer that is not said here; it is neither 17 nor 1000003."
        rows.append({"problem": question, "answer": GOLDS[kind](rng)})
    golds = tuple(row["answer"] for row in rows)
    tasks = [
        Task({"task_id": f"inline/{index}"}, Mark(row["problem"], row["answer"], "mathematics", kind, golds))
        for index, (row, kind) in enumerate(zip(rows, kinds, strict=True))
    ]
    return Source("typed", _kwargs(given, rows), tasks, float(given.get("reward_wrong", 0.0)))


ARENA: Arena[Mark] = Arena("sao/PythonTIR-v0", sources, episodes=16, most=3, concurrency=8)
