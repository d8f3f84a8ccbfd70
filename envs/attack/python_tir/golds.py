r"""Problems with golds of every type, generated: what a set of mathematics asks for, without any set.

The questions are about nothing; only their answers are graded.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping

Gold = Callable[[random.Random], str]

_UNITS = ("cm", "km", "hours", "dollars", "inches", "minutes")
_LETTERS = "abckmnpqtuvxyz"


def integer(rng: random.Random) -> str:
    """A whole number, neither 0 nor near it."""
    return str(rng.choice((1, -1)) * rng.randint(12, 9999))


def fraction(rng: random.Random) -> str:
    r"""`\frac{a}{b}` in lowest terms."""
    return rf"\frac{{{rng.choice((3, 5, 7, 11, 13, 29))}}}{{{rng.choice((4, 8, 9, 17, 31))}}}"


def root(rng: random.Random) -> str:
    r"""A number with a root: `a\sqrt{b}`."""
    return rf"{rng.randint(2, 9)}\sqrt{{{rng.choice((2, 3, 5, 7, 11))}}}"


def complex_number(rng: random.Random) -> str:
    """`a+bi`."""
    return f"{rng.randint(2, 20)}+{rng.randint(2, 20)}i"


def quantity(rng: random.Random) -> str:
    r"""A number with a unit: `5\text{ cm}`."""
    return rf"{rng.randint(3, 500)}\text{{ {rng.choice(_UNITS)}}}"


def angle(rng: random.Random) -> str:
    r"""`90^\circ`."""
    return rf"{rng.randint(5, 179)}^\circ"


def equation(rng: random.Random) -> str:
    """A name and its value: `x=42`."""
    return f"{rng.choice(_LETTERS)}={rng.randint(3, 99)}"


def choice(rng: random.Random) -> str:
    """One of the letters of a multiple choice."""
    return rng.choice("ABCDE")


def words(rng: random.Random) -> str:
    r"""An answer in words."""
    return rf"\text{{{rng.choice(('Thursday', 'the third card', 'Alice', 'hyperbola', 'impossible'))}}}"


def pair(rng: random.Random) -> str:
    """A tuple of two."""
    return f"({rng.randint(2, 40)},{rng.randint(41, 90)})"


def number_set(rng: random.Random) -> str:
    r"""A set of three numbers."""
    return rf"\{{{', '.join(map(str, sorted(rng.sample(range(2, 60), 3))))}\}}"


def interval(rng: random.Random) -> str:
    """A bounded interval."""
    return f"{rng.choice('([')}{rng.randint(-9, 3)},{rng.randint(4, 20)}{rng.choice(')]')}"


def matrix(rng: random.Random) -> str:
    r"""A matrix of two rows."""
    a, b, c, d = (rng.randint(2, 30) for _ in range(4))
    return rf"\begin{{pmatrix}}{a}&{b}\\{c}&{d}\end{{pmatrix}}"


def linear(rng: random.Random) -> str:
    """An expression that is linear in one letter, so that no absolute value of it is the same."""
    return f"{rng.randint(2, 9)}{rng.choice('xyt')}+{rng.randint(2, 30)}"


GOLDS: Mapping[str, Gold] = {
    gold.__name__: gold
    for gold in (
        integer, fraction, root, complex_number, quantity, angle, equation, choice, words, pair, number_set, interval,
        matrix, linear,
    )
}  # fmt: skip
"""Kind to its generator."""
