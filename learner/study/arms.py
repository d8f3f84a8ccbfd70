"""What a study is: its arms, what the paper claims, and what is drawn. The studies themselves are in `table.py`."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from importlib import resources
from pathlib import Path
from typing import Literal

from learner.algorithms import Algorithm, get_algorithm
from learner.config import Recipe, load_recipe

RECIPE = "studies/chains.yaml"
_ALGORITHM = "learner.algorithm="
_OF_THE_START = ("model.", "env.", "sft")
_OF_VALUES = (*_OF_THE_START, "value_pretraining", "runtime.", "engine.")


def shipped(name: str) -> Path:
    """The path of a recipe that ships with the package."""
    return Path(str(resources.files("recipes"))).joinpath(*name.split("/"))


@dataclass(frozen=True)
class Arm:
    """One way to train: a preset and what is changed of it, as words `key=value` that lie over the study's own.

    `name`: letters, digits, `_`, `.` and `-`; a part of file names. `label`: what a table calls it ("": its name).
    """

    name: str
    words: tuple[str, ...] = ()
    label: str = ""

    def __post_init__(self) -> None:
        if not re.fullmatch(r"[A-Za-z0-9_.-]+", self.name):
            raise ValueError(f"an arm cannot be called {self.name!r}: it is a part of file names")

    @property
    def title(self) -> str:
        return self.label or self.name


def preset(name: str, *words: str, called: str = "", label: str = "") -> Arm:
    """The arm of a preset, by its name unless `called` otherwise."""
    return Arm(called or name, (f"{_ALGORITHM}{name}", *words), label)


@dataclass(frozen=True)
class Study:
    """A table or figure of the paper in small.

    `source`: which. `claims`: what the paper says, with its figures; `asks`: what is seen here if it holds. `words`:
    for all arms, under their own. `updates`: of one run. `plots`: columns of `learner.study.record.COLUMNS` to draw.
    `runner`: "train", or "simulate" for users who judge a served policy.
    """

    name: str
    source: str
    claims: tuple[str, ...]
    asks: str
    arms: tuple[Arm, ...]
    updates: int = 200
    plots: tuple[str, ...] = ("reward", "held_out", "explained_variance", "gated")
    words: tuple[str, ...] = ()
    recipe: str = RECIPE
    runner: Literal["train", "simulate"] = "train"

    def __post_init__(self) -> None:
        names = [arm.name for arm in self.arms]
        if len(set(names)) < len(names):
            raise ValueError(f"the study {self.name}: two arms have one name among {', '.join(names)}")

    def arm(self, name: str) -> Arm:
        """The arm of that name; `ValueError` with those there are."""
        found = {arm.name: arm for arm in self.arms}
        if name not in found:
            raise ValueError(f"the study {self.name} has no arm {name!r}; it has {', '.join(found)}")
        return found[name]


@dataclass(frozen=True)
class Job:
    """One run: an arm of a study with a seed. Later words win, so those of the search lie between study and arm."""

    study: Study
    arm: Arm
    seed: int
    updates: int
    found: tuple[str, ...] = ()
    more: tuple[str, ...] = field(default=())

    @property
    def name(self) -> str:
        return f"{self.arm.name}-seed{self.seed}"

    @property
    def words(self) -> list[str]:
        """All overrides of the recipe, but for names and folders."""
        own = [f"seed={self.seed}", f"learner.steps={self.updates}"]
        algorithm = [word for word in self.arm.words if word.startswith(_ALGORITHM)]
        rest = [word for word in self.arm.words if not word.startswith(_ALGORITHM)]
        return [*own, *algorithm, *self.study.words, *self.found, *rest, *self.more]

    def recipe(self, *words: str) -> Recipe:
        """The recipe of the run; `RecipeError` where its words contradict each other."""
        return load_recipe(shipped(self.study.recipe), [*self.words, *words])

    @property
    def algorithm(self) -> str:
        """The preset's name."""
        said = [word for word in self.words if word.startswith(_ALGORITHM)]
        return said[-1].removeprefix(_ALGORITHM) if said else "sao"

    @property
    def start_words(self) -> tuple[str, ...]:
        """The words that decide on the cold start; runs that agree in them share one policy."""
        return tuple(word for word in self.words if word.startswith(_OF_THE_START))

    @property
    def value_words(self) -> tuple[str, ...]:
        """The words that decide on value pretraining; runs that agree in them share one critic."""
        return tuple(word for word in self.words if word.startswith(_OF_VALUES))


RATES = (2e-4, 4e-4, 8e-4)
"""Rates of the policy that a search tries; each with two widths, so that no method gets more tries than another."""

Widths = tuple[tuple[str, ...], tuple[str, ...]]


def _widths(algorithm: Algorithm) -> Widths | None:
    """Two settings of the trust region of a ratio rule; None: it has none, and gets more rates instead."""
    rules: dict[str, Callable[[], Widths]] = {
        "dis": lambda: (("learner.eps_low=0.3", "learner.eps_high=5"), ("learner.eps_low=0.8", "learner.eps_high=3")),
        "ppo_clip": lambda: (
            ("learner.eps_low=0.2", "learner.eps_high=0.28"),
            ("learner.eps_low=0.1", "learner.eps_high=0.1"),
        ),
        "sequence_trust": lambda: (("learner.max_divergence=0.003",), ("learner.max_divergence=0.03",)),
    }
    return rules[algorithm.ratio]() if algorithm.ratio in rules else None


def search_grid(name: str, rates: Sequence[float] = RATES) -> list[tuple[str, ...]]:
    """What a search tries for the preset `name`: rates times widths of its trust region; six settings, whichever."""
    widths = _widths(get_algorithm(name))
    if widths is None:
        between = sorted({*rates, *(rate * 2**0.5 for rate in rates)})
        return [(f"learner.policy.lr={rate:.3g}",) for rate in between]
    return [(f"learner.policy.lr={rate:.3g}", *width) for rate in rates for width in widths]
