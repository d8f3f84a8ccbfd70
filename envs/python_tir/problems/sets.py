"""What a set of problems is, a list of them, and several sets as one."""

from __future__ import annotations

import bisect
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from envs.python_tir.grading.rules import TYPED, Rules


class ProblemSourceError(ValueError):
    """A problem source that cannot be used as it is described; the message says what to change."""


@dataclass(frozen=True, slots=True)
class Problem:
    """One question and its gold answer. `family` is what results are reported by (a task family, a set's name)."""

    task_id: str
    question: str
    answer: str
    family: str
    rules: Rules = TYPED


class ProblemSet(Protocol):
    """A fixed, ordered, possibly lazily made list of problems."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> Problem: ...

    def task_id(self, index: int) -> str:
        """The id of problem `index`, without making the problem."""
        ...

    def index(self, task_id: str) -> int:
        """The place of `task_id`; raises `KeyError` if it is not of this set."""
        ...


class Listed:
    """Problems held in a list, all graded by `rules`; ids are `<label>/<index>`."""

    def __init__(self, label: str, rows: Sequence[tuple[str, str]], rules: Rules = TYPED) -> None:
        if not rows:
            raise ProblemSourceError(f"the problem source {label!r} is empty: it needs at least one problem")
        self._label, self._rows, self._rules = label, rows, rules

    def __len__(self) -> int:
        return len(self._rows)

    def task_id(self, index: int) -> str:
        return f"{self._label}/{range(len(self))[index]}"

    def __getitem__(self, index: int) -> Problem:
        question, answer = self._rows[index]
        task_id, rules = self.task_id(index), self._rules
        if rules.scorer is not None:
            item = {"task_id": task_id, "question": question, "answer": answer, "family": self._label}
            rules = replace(rules, item=json.dumps(item))
        return Problem(task_id, question, answer, self._label, rules)

    def index(self, task_id: str) -> int:
        label, _, number = task_id.rpartition("/")
        if label != self._label or not number.isdecimal() or int(number) >= len(self):
            raise KeyError(task_id)
        return int(number)


class Mixed:
    """Several sets as one, each taking a share of the list in proportion to its weight.

    Every problem is there at least once; the sets that are small for their weight come round again, under ids with
    `~1`, `~2`, ... appended. Without weights it is a plain concatenation.
    """

    MAX_LENGTH = 10_000_000

    def __init__(self, sets: Sequence[ProblemSet], weights: Sequence[float] | None) -> None:
        self._sets = sets
        if weights is None:
            shares = [len(s) for s in sets]
        else:
            if not all(weight > 0 for weight in weights):
                raise ProblemSourceError(f"weights of problem sources must be positive, got {list(weights)}")
            scale = max(len(s) / weight for s, weight in zip(sets, weights, strict=True))
            shares = [max(len(s), round(scale * weight)) for s, weight in zip(sets, weights, strict=True)]
        self._ends = [sum(shares[: i + 1]) for i in range(len(shares))]
        if self._ends[-1] > self.MAX_LENGTH:
            raise ProblemSourceError(
                f"the weights {list(weights or [])} would repeat the small sources up to {self._ends[-1]} problems; "
                "make the weights less unequal"
            )

    def __len__(self) -> int:
        return self._ends[-1]

    def _locate(self, index: int) -> tuple[ProblemSet, int, int]:
        index = range(len(self))[index]
        which = bisect.bisect_right(self._ends, index)
        local = index - (self._ends[which - 1] if which else 0)
        again, local = divmod(local, len(self._sets[which]))
        return self._sets[which], local, again

    def task_id(self, index: int) -> str:
        source, local, again = self._locate(index)
        return source.task_id(local) + (f"~{again}" if again else "")

    def __getitem__(self, index: int) -> Problem:
        source, local, _ = self._locate(index)
        problem = source[local]
        return replace(problem, task_id=self.task_id(index))

    def index(self, task_id: str) -> int:
        base, _, again = task_id.partition("~")
        for which, source in enumerate(self._sets):
            try:
                local = source.index(base)
            except KeyError:
                continue
            start = self._ends[which - 1] if which else 0
            position = start + local + (int(again) if again.isdecimal() else 0) * len(source)
            if position < self._ends[which] and self.task_id(position) == task_id:
                return position
        raise KeyError(task_id)


class TaskIds(Sequence[str]):
    """The ids of a problem set as a sequence, made as they are asked for."""

    def __init__(self, problems: ProblemSet) -> None:
        self._problems = problems

    def __len__(self) -> int:
        return len(self._problems)

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return [self._problems.task_id(i) for i in range(len(self))[index]]
        return self._problems.task_id(range(len(self))[index])

    def __iter__(self) -> Iterator[str]:
        return (self._problems.task_id(i) for i in range(len(self)))


def shared_questions(first: ProblemSet, second: ProblemSet) -> set[str]:
    """The question texts that both sets hold: empty for sets that are truly held out from each other."""
    return {first[i].question for i in range(len(first))} & {second[i].question for i in range(len(second))}
