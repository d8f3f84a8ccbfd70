r"""What a leaf of an answer is: a number, a closed form, a quantity, an infinity, a choice or words.

The type is the first thing decided, and comparing is a table over types (`comparing`). Structure around leaves (tuples,
sets, intervals, matrices, equations) has types of its own in `reading`.

value_of("3/4")                  # Number("3/4", Fraction(3, 4), 0, exact fraction)
value_of(r"5\text{ cm}")         # Quantity(Number("5", ...), scale 1, unit length/100)
value_of(r"e^{16}-1").symbols    # {"e"}: as written, before anything cancels
"""

from __future__ import annotations

import re
from collections.abc import Set
from dataclasses import dataclass
from fractions import Fraction

from envs.python_tir.grading import expressions
from envs.python_tir.grading.answers import unwrap
from envs.python_tir.grading.reading import CONDITION
from envs.python_tir.grading.symbols import symbols
from envs.python_tir.grading.units import Unit, split_unit

WORD = re.compile(rf"(?<![\\A-Za-z{{])[A-Za-z]{{4,}}|\\text\{{|[\u4e00-\u9fff]|{CONDITION.pattern}")
"""What makes a leaf one of words, once its unit is taken off."""
NO_ANSWER = frozenset(
    ("no solution", "no solutions", "none", "there are no solutions", "does not exist", "dne", "\\emptyset", "\\{\\}")
)
_CHOICE = re.compile(r"\(?([A-J])\)?")
# What follows a label is its text, no calculation with the letter.
_LABELLED = re.compile(
    r"(?:\(([A-J])\)(?![A-Za-z])|([A-J])[).:])(?!\s*(?:[*/^_+]|\\(?:cdot|times|div|circ)(?![A-Za-z])))(.*)", re.DOTALL
)
_SECOND_CHOICE = re.compile(
    r"\([A-J]\)|\\(?:or|and)(?![A-Za-z])|(?<![A-Za-z\\])[A-J](?![A-Za-z])|\b(?:not|wrong|incorrect|false|no|nor)\b"
)
_INFINITY = re.compile(r"([+-]?)\s?\\infty")
_FRACTION = re.compile(r"([+-]?)(?:(\d+)\s?)?(?:(\d+)/(\d+)|\\frac\{([+-]?)(\d+)\}\{(\d+)\})")
_PLAIN = re.compile(
    r"[+-]?(?:\d+/\d+|\\frac\{-?[\d.]+\}\{[\d.]+\})|[+-]?\d+(?:!|\^\{?-?\d+\}?)|[+-]?\\sqrt(?:\[\d\])?\{\d+\}"
)


@dataclass(frozen=True)
class Number:
    """A literal: integer, decimal, fraction, mixed number, scientific. `places`: decimal places, 0 for exact forms."""

    text: str
    value: Fraction
    places: int
    lowest: bool = True
    """False for a fraction that could be shortened."""


@dataclass(frozen=True)
class ClosedForm:
    """Any other mathematics, with the symbols that stand in it. `plain`: one root, power, factorial of a numeral."""

    text: str
    symbols: frozenset[str]
    plain: bool


@dataclass(frozen=True)
class Quantity:
    """A number or closed form times `scale`, with a unit or none; `whole` is the text with its unit."""

    amount: Number | ClosedForm
    scale: Fraction
    unit: Unit | None
    whole: str


@dataclass(frozen=True)
class Infinite:
    """Plus or minus infinity, and nothing else."""

    sign: int


@dataclass(frozen=True)
class Choice:
    """A letter of a multiple choice, alone or in front of its text."""

    letter: str


@dataclass(frozen=True)
class Words:
    """Prose, as a list of words, symbols and numbers; order counts in sentences only."""

    tokens: tuple[str | Fraction, ...]


Value = Number | ClosedForm | Quantity | Infinite | Choice | Words


def value_of(text: str, known: Set[str] | None = None) -> Value:
    """Read a leaf. `known`: the words that may stand beside a number; None reads a gold answer, whose words count."""
    choice = _CHOICE.fullmatch(unwrap(text).replace(" ", ""))
    if choice is not None:
        return Choice(choice.group(1))
    infinity = _INFINITY.fullmatch(text.strip("{}() "))
    if infinity is not None:
        return Infinite(-1 if infinity.group(1) == "-" else 1)
    measured = split_unit(text, known)
    if measured.unit is None and measured.scale == 1:
        return _amount(measured.value)
    amount = _amount(measured.value)
    return Quantity(amount, measured.scale, measured.unit, text) if isinstance(amount, Number | ClosedForm) else amount


def _amount(text: str) -> Number | ClosedForm | Words:
    literal = literal_number(text)
    if literal is not None:
        return literal
    if WORD.search(text):
        return words(text)
    squeezed = text if "/" in text else text.replace(" ", "")
    return ClosedForm(text, symbols(text), _PLAIN.fullmatch(squeezed) is not None)


def literal_number(text: str) -> Number | None:
    """Read a literal number; None for anything else, a calculation above all."""
    numeral = expressions.number(text)
    if numeral is not None:
        return Number(text, *numeral)
    match = _FRACTION.fullmatch(text.strip())
    if match is None:
        return None
    sign, whole, *parts = match.groups()
    top, bottom = (parts[0], parts[1]) if parts[0] is not None else (parts[3], parts[4])
    if int(bottom) == 0 or (whole is not None and (parts[2] or (parts[0] and f"{whole} " not in text))):
        return None
    value = Fraction(int(top), int(bottom))
    lowest = value.denominator == int(bottom) and value.denominator > 1
    value = (value + int(whole or 0)) * (-1 if (sign == "-") != (parts[2] == "-") else 1)
    return Number(text, value, 0, lowest)


def words(text: str) -> Words:
    """Read prose. Case matters only to single letters; a numeral is the number that it is, with a factorial's `!`."""
    bare = re.sub(r"[\"'?]|(?<!\d)[!.:]|[.:](?!\d)", "", unwrap(text)).strip()
    if bare.casefold() in NO_ANSWER:
        return Words(("none",))
    tokens: list[str | Fraction] = []
    for token in re.findall(r"[A-Za-z]+|\d+(?:\.\d+)?|\S", bare):
        numeral = expressions.number(token) if token[0].isdigit() else None
        tokens.append(numeral[0] if numeral is not None else token.casefold() if len(token) > 1 else token)
    kept = [token for token in tokens if token not in ("the", "a", "an", "all", "every", "(", ")")] or tokens
    return Words(tuple(sorted(kept, key=str) if len(kept) <= 2 else kept))


def labelled_choice(text: str) -> str | None:
    r"""The letter in `(C) 42` or `C. 42`; None where none stands in front."""
    match = _LABELLED.fullmatch(re.sub(r"\\text\{([^{}]*)\}", r"\1", text))
    if match is None or _SECOND_CHOICE.search(match.group(3)):
        return None
    return match.group(1) or match.group(2)
