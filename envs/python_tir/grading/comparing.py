r"""Comparing the leaves of answers: a table over their types. What is not in the table is not equal.

Three rules hold for every pair, before any algebra: no symbol that the gold lacks, counted as written; what is not
finite equals nothing but the same infinity; where the gold is a number, a calculation that leads to it is no answer.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import sympy

from envs.python_tir.grading import expressions
from envs.python_tir.grading.expressions import Unreadable
from envs.python_tir.grading.symbols import adds_none, symbols
from envs.python_tir.grading.units import Unit, unit_words
from envs.python_tir.grading.values import (
    WORD,
    Choice,
    ClosedForm,
    Infinite,
    Number,
    Quantity,
    Value,
    Words,
    value_of,
    words,
)

_BASE = re.compile(r"([0-9A-Fa-f]+)_(?:\{(\d+)\}|(\d+))")
_NEGATIONS = r"not|no|never|nor|wrong|incorrect|false|if|unless|or|than|isn|cannot|neither|except"
_LEAD_IN = re.compile(
    rf"(?:\\text\{{)?\s?(?!(?:[A-Za-z]+ )*(?:{_NEGATIONS})\b)"
    r"(?:(?:the )?(?:final )?answer\s?[:=]|(?:[A-Za-z]+ ){1,6}(?:is|are|equals)(?![A-Za-z])\s?[:=]?"
    r"|(?:[A-Za-z]+ ){0,5}[A-Za-z]+:)"
    r"\s?\}?\s?(?=\S)",
    re.IGNORECASE,
)


def without_lead_in(text: str) -> str:
    r"""A leaf without the words before it: `\text{The area is }42` is `42`. Words that deny stay where they are."""
    return _LEAD_IN.sub("", text, count=1)


def leaves_equal(answer: str, gold: str) -> bool:
    """Whether one leaf says what the gold's leaf says."""
    if answer == gold:
        return True
    if not WORD.search(gold):
        answer = without_lead_in(answer)
    based = _bases(answer, gold)
    if based is not None:
        return based
    known = unit_words(gold)
    if values_equal(value_of(answer, known), value_of(gold), answer, gold):
        return True
    uncertain = any(
        isinstance(v, Quantity) and v.unit is not None and not v.unit.certain
        for v in (value_of(answer, known), value_of(gold))
    )
    return uncertain and _closed_forms(_as_closed(answer), _as_closed(gold))


def values_equal(answer: Value, gold: Value, answer_text: str, gold_text: str) -> bool:
    """Look the pair of types up and compare."""
    if WORD.search(answer_text) and WORD.search(gold_text) and words(answer_text) == words(gold_text):
        return True
    if isinstance(answer, Quantity) or isinstance(gold, Quantity):
        return _quantities(answer, gold)
    compare = _TABLE.get((type(answer), type(gold)))
    return compare is not None and compare(answer, gold)


def _as_closed(text: str) -> ClosedForm:
    value = value_of(text)
    text = value.whole if isinstance(value, Quantity) else text
    return ClosedForm(text, symbols(text), plain=False)


def _numbers(answer: Number, gold: Number) -> bool:
    if answer.value == gold.value:
        return True
    shorter, longer = sorted((answer, gold), key=lambda number: number.places)
    gap = abs(longer.value - shorter.value)
    if shorter.places < longer.places and shorter.places > 0:
        return rounded(longer.value, shorter) and 2 * gap * 10**shorter.places <= 1
    exact, decimal = (answer, gold) if answer.places == 0 else (gold, answer)
    return exact.value.denominator > 1 and rounded(exact.value, decimal)


def rounded(exact: Fraction, decimal: Number) -> bool:
    """Whether a long decimal is the exact number, rounded or cut."""
    return expressions.rounds_to(sympy.Rational(exact.numerator, exact.denominator), decimal.value, decimal.places)


def _closed_forms(answer: ClosedForm, gold: ClosedForm) -> bool:
    if answer.text == gold.text:
        return True
    if not adds_none(answer.text, gold.text):
        return False
    try:
        return expressions.equal(answer.text, gold.text)
    except Unreadable:
        return words(answer.text) == words(gold.text) != Words(())


def _form_for_number(answer: ClosedForm, gold: Number) -> bool:
    """A gold number takes numerals, one power, factorial or root of one, and no calculation: 6*7 is the question."""
    if answer.symbols or not answer.plain:
        return False
    try:
        return expressions.equal(answer.text, gold.text)
    except Unreadable:
        return False


def _number_for_form(answer: Number, gold: ClosedForm) -> bool:
    try:
        exact = expressions.expression(gold.text)
        if expressions.equal(answer.text, gold.text):
            return True
    except Unreadable:
        return False
    return not exact.free_symbols and expressions.rounds_to(exact, answer.value, answer.places)


_TABLE: dict[tuple[type, type], Callable[[Any, Any], bool]] = {
    (Number, Number): _numbers,
    (ClosedForm, ClosedForm): _closed_forms,
    (ClosedForm, Number): _form_for_number,
    (Number, ClosedForm): _number_for_form,
    (Infinite, Infinite): lambda answer, gold: answer.sign == gold.sign,
    (Choice, Choice): lambda answer, gold: answer.letter == gold.letter,
    (Words, Words): lambda answer, gold: answer == gold,
}


def _quantities(answer: Value, gold: Value) -> bool:
    """Compare where at least one side has a unit or a scale word."""
    a, g = _quantity(answer), _quantity(gold)
    if a is None or g is None:
        return False
    if a.unit is not None and g.unit is not None:
        if a.unit.dimensions != g.unit.dimensions:
            return False
        return _amounts(a, g, a.unit.factor / g.unit.factor)
    percent = [side.unit is not None and side.unit.percent for side in (a, g)]
    if percent[0] != percent[1]:  # 10\% is 0.1; and who asks "how many percent" takes 10 for it
        return _amounts(a, g, Fraction(1, 100) if percent[0] else Fraction(100)) or _amounts(a, g, Fraction(1))
    degrees = [_is_degrees(side.unit) for side in (a, g)]
    if degrees[0] != degrees[1] and _in_radians(a, g, answer_in_degrees=degrees[0]):
        return True
    return _amounts(a, g, Fraction(1))


def _quantity(value: Value) -> Quantity | None:
    if isinstance(value, Quantity):
        return value
    return Quantity(value, Fraction(1), None, value.text) if isinstance(value, Number | ClosedForm) else None


def _is_degrees(unit: Unit | None) -> bool:
    return unit is not None and unit.dimensions == (("degree", 1),)


def _in_radians(answer: Quantity, gold: Quantity, *, answer_in_degrees: bool) -> bool:
    inner, other = (answer, gold) if answer_in_degrees else (gold, answer)
    if not isinstance(inner.amount, Number) or not isinstance(other.amount, ClosedForm):
        return False
    if other.amount.symbols != {"pi"}:
        return False
    try:
        return expressions.equal(rf"({inner.amount.text})\cdot\frac{{\pi}}{{180}}", other.amount.text)
    except Unreadable:
        return False


def _amounts(answer: Quantity, gold: Quantity, ratio: Fraction) -> bool:
    """Compare what stands before the units, the answer's multiplied by `ratio` and both by their scale words."""
    ratio = ratio * answer.scale / gold.scale
    a, g = answer.amount, gold.amount
    if ratio == 1:
        return values_equal(a, g, a.text, g.text)
    if isinstance(a, Number) and isinstance(g, Number):
        return a.value * ratio == g.value
    if not adds_none(a.text, g.text) or (isinstance(g, Number) and isinstance(a, ClosedForm) and not a.plain):
        return False
    try:
        return expressions.equal(rf"({a.text})\cdot\frac{{{ratio.numerator}}}{{{ratio.denominator}}}", g.text)
    except Unreadable:
        return False


def _bases(answer: str, gold: str) -> bool | None:
    """Compare numerals with a base, `52_8`: the same digits, and the same base where both name one."""
    a, g = _BASE.fullmatch(answer), _BASE.fullmatch(gold)
    if a is None and g is None:
        return None
    if g is None:
        return False  # a base that the gold does not name is another number
    digits = [(match.group(1), match.group(2) or match.group(3)) if match else None for match in (a, g)]
    left, right = digits[0] or (answer, ""), digits[1] or (gold, "")
    return left[0].upper() == right[0].upper() and (not left[1] or not right[1] or left[1] == right[1])
