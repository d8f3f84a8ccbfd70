"""Problems made by the `reasoning-gym` package: seeded, graded by configuration, as many as one wants.

reasoning-gym seeds item `i` of a data set with `seed + i`, so sets of nearby seeds hold the same items. And small
task families (a product of three digits) run out of questions whatever the seed. Hence `exclude`: an item whose
question stands in the excluded set is drawn again, from another stretch of seeds.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate
from typing import Any

from envs.python_tir.grading.rules import REASONING_GYM, TYPED, Rules
from envs.python_tir.problems.sets import Problem, ProblemSet, ProblemSourceError

_DRAWS = 64
"""How often an excluded item is drawn again before the family counts as exhausted."""

_NUMBER = re.compile(r"[+-]?\d+(?:\.\d+)?(?:/\d+)?")

Families = Mapping[str, Mapping[str, Any] | Sequence[Mapping[str, Any]]]


@dataclass(frozen=True, slots=True)
class _Member:
    """One configuration of one family."""

    family: str
    dataset: Any
    configuration: str
    question: str | None
    skip_answers: frozenset[str]
    scored: bool
    """Whether the family's own `score_answer` decides."""


class ReasoningGym:
    """`size` items drawn from weighted families; item `i` depends on `seed`, `i` and the configuration only.

    `families` maps a reasoning-gym task name to its configuration, or to a list of configurations; each may have a
    `weight` (default 1), a `question` (a format string over the item's `question` and metadata, replacing the
    package's wording) and `skip_answers` (a list: items with such an answer are drawn again).
    An item is scored by its family's own `score_answer`; where the family has none, its answers have to be plain
    numbers, or it is refused. `typed` compares all answers by their types, and a scorer in `rules` goes before either.
    Ids are `<family>/<seed>-<index>`. Give training and held-out sets seeds that are millions apart, and `exclude`
    the held-out set from the training set.
    """

    def __init__(
        self,
        families: Families,
        *,
        size: int,
        seed: int,
        exclude: ProblemSet | None = None,
        question: str | None = None,
        rules: Rules = TYPED,
        typed: bool = False,
    ) -> None:
        if size < 1:
            raise ProblemSourceError(f"source reasoning_gym: size must be at least 1, got {size}")
        self._size, self._seed, self._exclude, self._question = size, seed, exclude, question
        self._rules, self._typed = rules, typed or rules.scorer is not None
        self._members: list[_Member] = []
        weights: list[float] = []
        for name, configurations in families.items():
            for configuration in [configurations] if isinstance(configurations, Mapping) else configurations:
                options = dict(configuration)
                weights.append(float(options.pop("weight", 1.0)))
                template = options.pop("question", question)
                skip = frozenset(map(str, options.pop("skip_answers", ())))
                dataset = self._dataset(name, options)
                scored = not self._typed and _has_own_scorer(dataset)
                self._members.append(_Member(name, dataset, json.dumps(options), template, skip, scored))
                if not scored:
                    self._checked(name, str(dataset[0]["answer"]))
        if not self._members or not all(weight > 0 for weight in weights):
            raise ProblemSourceError("source reasoning_gym: families must be there, with positive weights")
        self._cumulative = list(accumulate(weights))

    def _dataset(self, name: str, configuration: dict[str, Any]) -> Any:
        import reasoning_gym

        reserved = [key for key in ("seed", "size") if key in configuration]
        if reserved:
            raise ProblemSourceError(
                f"reasoning-gym family {name}: {reserved[0]} belongs to the source, not the family"
            )
        try:
            return reasoning_gym.create_dataset(name, seed=self._seed, size=self._size * _DRAWS, **configuration)
        except (TypeError, ValueError, AssertionError) as error:
            raise ProblemSourceError(f"reasoning-gym family {name} with {configuration}: {error}") from error

    def _checked(self, family: str, answer: str) -> None:
        """Refuse a family that cannot be graded: no scorer of its own, and answers that are no plain numbers."""
        if not self._typed and _NUMBER.fullmatch(answer) is None:
            raise ProblemSourceError(
                f"reasoning-gym family {family} has no score_answer of its own, and its answer {answer[:40]!r} is no "
                "plain number: it can't be graded. Leave it out, or name a scorer or an answer_form for it."
            )

    def _rules_of(self, member: _Member, place: int, task_id: str, question: str, answer: str) -> Rules:
        if self._rules.scorer is not None:
            item = {"task_id": task_id, "question": question, "answer": answer, "family": member.family}
            return replace(self._rules, item=json.dumps(item))
        if self._typed:
            return self._rules
        if not member.scored:
            self._checked(member.family, answer)
            return replace(self._rules, answer_form="number")
        described = {
            "family": member.family,
            "configuration": json.loads(member.configuration),
            "size": self._size * _DRAWS,
            "seed": self._seed,
            "index": place,
        }
        return replace(self._rules, scorer=REASONING_GYM, item=json.dumps(described))

    @cached_property
    def _excluded(self) -> frozenset[str]:
        if self._exclude is None:
            return frozenset()
        return frozenset(self._exclude[i].question for i in range(len(self._exclude)))

    def __len__(self) -> int:
        return self._size

    def _member(self, index: int) -> _Member:
        # The choice of family must not come from the generator that makes the item: the two would be correlated.
        generator = random.Random(f"family {self._seed} {index}")
        return generator.choices(self._members, cum_weights=self._cumulative)[0]

    def task_id(self, index: int) -> str:
        index = range(self._size)[index]
        return f"{self._member(index).family}/{self._seed}-{index}"

    def __getitem__(self, index: int) -> Problem:
        index = range(self._size)[index]
        member = self._member(index)
        for draw in range(_DRAWS):
            item = member.dataset[index + draw * self._size]
            question, answer = str(item["question"]), str(item["answer"])
            if member.question is not None:
                question = member.question.format(**{**item["metadata"], "question": question})
            if question not in self._excluded and answer not in member.skip_answers:
                task_id = f"{member.family}/{self._seed}-{index}"
                rules = self._rules_of(member, index + draw * self._size, task_id, question, answer)
                return Problem(task_id, question, answer, member.family, rules)
        raise ProblemSourceError(
            f"reasoning-gym family {member.family}: {_DRAWS} draws in a row gave an excluded item; the family "
            "has too few questions to hold that many out. Make its configuration wider or the excluded set smaller."
        )

    def index(self, task_id: str) -> int:
        index = task_id.rpartition("-")[2]
        if not index.isdecimal() or int(index) >= self._size or self.task_id(int(index)) != task_id:
            raise KeyError(task_id)
        return int(index)


def _has_own_scorer(dataset: Any) -> bool:
    from reasoning_gym.dataset import ProceduralDataset

    return type(dataset).score_answer is not ProceduralDataset.score_answer


def tiny_fold_families() -> Families:
    """Folds of one operation, left to right, over three to six operands: the tiny recipe's mixture.

    Equal parts of sums (two-digit), products (one-digit) and least common multiples (2 to 20), each with 3, 4, 5 or
    6 operands in the proportion .6, .25, .1, .05. A model that carries out one binary operation a tool call needs
    two to five calls, each but the first on an earlier output. Products of 0 can be seen without multiplying, and
    are left out.
    """
    operands = {3: 0.6, 4: 0.25, 5: 0.1, 6: 0.05}
    digits = {"chain_sum": 2, "products": 1}
    families: dict[str, list[dict[str, Any]]] = {
        name: [
            {"min_terms": n, "max_terms": n, "min_digits": d, "max_digits": d, "weight": weight}
            for n, weight in operands.items()
        ]
        for name, d in digits.items()
    }
    for configuration in families["products"]:
        configuration["skip_answers"] = ["0"]
    families["lcm"] = [
        {"min_numbers": n, "max_numbers": n, "min_value": 2, "max_value": 20, "weight": weight}
        for n, weight in operands.items()
    ]
    return families
