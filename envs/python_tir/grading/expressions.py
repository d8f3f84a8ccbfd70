r"""Whether two mathematical expressions are equal, decided exactly or by sampling at high precision.

math-verify's parser turns LaTeX into sympy. Its own comparison is not used: it calls 1/2004! and 1/2006! equal (their
difference vanishes at 15 digits), and simplification is slow and may fail. Here two constants are equal if they are
the same rational, or if they agree to 50 digits and their difference cannot be told from 0 by 1,000; two expressions
in variables if they agree at random points to 30 digits. Unbounded on hostile input: worker only.
"""

from __future__ import annotations

import itertools
import random
import re
from collections.abc import Iterator
from fractions import Fraction
from functools import lru_cache
from typing import Any

import sympy
from latex2sympy2_extended.latex2sympy2 import ConversionConfig, latex2sympy
from sympy.core.function import AppliedUndef

_CONFIG = ConversionConfig(lowercase_symbols=False, interpret_as_mixed_fractions=False)
_NUMBER = re.compile(
    r"([+-]?)(\d+(?:\.\d*)?|\.\d+)(?:[eE]([+-]?\d{1,4})|(?:\\times|\\cdot)\s?10\^(?:\{([+-]?\d{1,4})\}|(\d)))?"
)
_DECIMAL = re.compile(r"(?<![\d.])(\d*)\.(\d+)(?![\d.])")
_MIXED = re.compile(r"(?<![\d.}A-Za-z^_])(\d+)\s?\\frac\{(\d+)\}\{(\d+)\}(?!\s*[\d.])")
_MIXED_SLASH = re.compile(r"(-?)(\d+) (\d+)/(\d+)")
_SAMPLES = 6
_FEWEST = 3
"""Fewer points than this at which both sides are defined decide nothing: the answer is refused."""
_DIGITS = 60


class Unreadable(ValueError):
    """The text is no expression."""


@lru_cache(maxsize=256)
def number(text: str) -> tuple[Fraction, int] | None:
    """Read a numeral: its exact value and its decimal places (0 for integers); None for anything else."""
    match = _NUMBER.fullmatch(text.strip())
    if match is None:
        return None
    sign, digits, *exponents = match.groups()
    exponent = int(next((e for e in exponents if e), 0))
    value = Fraction(digits.rstrip(".") if digits[-1] == "." else digits) * Fraction(10) ** exponent
    places = len(digits.partition(".")[2]) - exponent
    return (-value if sign == "-" else value), max(0, places)


def _decimal(match: re.Match[str]) -> str:
    whole, places = match.groups()
    return rf"{{\frac{{{(whole + places).lstrip('0') or '0'}}}{{1{'0' * len(places)}}}}}"


@lru_cache(maxsize=256)
def expression(text: str) -> Any:
    """Parse normalised LaTeX (or plain `2*x^2`) to sympy, decimals as exact rationals, `i` as the imaginary unit.

    Raises `Unreadable`.
    """
    literal = number(text)
    if literal is not None:
        return sympy.Rational(literal[0].numerator, literal[0].denominator)
    return _parse(text)


def _parse(text: str) -> Any:
    mixed = _MIXED_SLASH.fullmatch(text)
    if mixed is not None:
        sign, whole, top, bottom = mixed.groups()
        text = rf"{sign}({whole}+\frac{{{top}}}{{{bottom}}})"
    text = _MIXED.sub(r"(\1+\\frac{\2}{\3})", text)
    text = _DECIMAL.sub(_decimal, text)
    if "\\ldots" in text or "\\text" in text or '"' in text:
        raise Unreadable(text)
    try:
        parsed = latex2sympy(
            text, is_real=True, convert_degrees=False, normalization_config=None, conversion_config=_CONFIG
        )
    except RecursionError:
        raise
    except Exception as failure:  # the parser raises bare Exception on text that is no LaTeX
        raise Unreadable(text) from failure
    if not isinstance(parsed, sympy.Basic) or isinstance(parsed, (sympy.Tuple, sympy.Set)):
        raise Unreadable(text)
    applied = {call: sympy.Symbol(f"<{call}>", real=True) for call in parsed.atoms(AppliedUndef)}
    parsed = parsed.xreplace(applied).replace(sympy.UnevaluatedExpr, lambda inner: inner)
    imaginary = {s: sympy.I for s in parsed.free_symbols if isinstance(s, sympy.Symbol) and s.name == "i"}
    return parsed.xreplace(imaginary)


def _evaluated(parsed: Any) -> Any:
    """Carry out sums, products, integrals and limits."""
    return parsed.doit() if parsed.has(sympy.Sum, sympy.Product, sympy.Integral, sympy.Limit) else parsed


def _close(left: Any, right: Any, digits: int) -> bool:
    """Whether two sympy numbers agree to `digits` significant digits. Undefined values agree with nothing."""
    if not (left.is_number and right.is_number and _finite(left) and _finite(right)):
        return False
    return bool(abs(left - right) <= sympy.Float(10, 30) ** (-digits) * max(abs(left), abs(right)))


def constants_equal(left: Any, right: Any) -> bool:
    """Whether two sympy expressions without variables are the same number."""
    if not (_finite(left) and _finite(right)):
        return False
    if left == right:
        return True
    if left.is_Rational and right.is_Rational:
        return False
    # Digits that agree are counted by size, and zero has none: 25 - 25 stays a sum of two as it was written.
    if 0 in (left, right) and (left - right).doit() == 0:
        return True
    if not _close(left.evalf(_DIGITS), right.evalf(_DIGITS), _DIGITS - 10):
        return False
    difference = left - right
    if difference == 0:
        return True
    # Equal to fifty digits, and still perhaps not equal: \sqrt{10^{200}+1} against 10^{100}.
    value = difference.evalf(2, maxn=1000)
    return bool(value == 0 or getattr(value, "_prec", 1) == 1 or abs(value) < sympy.Float(10, 15) ** -900)


def equal(left_text: str, right_text: str) -> bool:
    """Whether two expressions in normalised LaTeX are equal wherever the right one (the gold) is defined.

    What is not finite is equal to nothing. May raise `Unreadable`.
    """
    left, right = _evaluated(expression(left_text)), _evaluated(expression(right_text))
    if not (_finite(left) and _finite(right)):
        return False
    symbols = sorted(left.free_symbols | right.free_symbols, key=str)
    if not symbols:
        return constants_equal(left, right)
    written = (_guards(left_text), _guards(right_text))
    if left == right and not any(written):
        return True
    return _agree(left, right, symbols, written)


def _finite(value: Any) -> bool:
    """Whether no infinity stands in `value`, but in the bounds of what could not be carried out."""
    bounded = (sympy.Sum, sympy.Product, sympy.Integral, sympy.Limit)
    inside = value.replace(lambda part: isinstance(part, bounded), lambda part: sympy.Symbol("bounded"))
    return not inside.has(sympy.oo, -sympy.oo, sympy.zoo, sympy.nan)


_PARTIAL = re.compile(
    r"\\(?:sqrt|ln|log|arc(?:sin|cos))(?![A-Za-z])|\^\{?\(?(?:\\frac|-?\d+/|-?\d*\.)|\^\{[^{}]*[A-Za-z]"
)
"""Notation that is defined for some real numbers only. Anything else need not be read a second time."""


@lru_cache(maxsize=256)
def _guards(text: str) -> tuple[tuple[str, Any, Any], ...]:
    """What has to hold for `text` to be a real number: (kind, expression, exponent), before anything cancels.

    e^{\\ln x} is x for positive x only, which the evaluated expression no longer tells.
    """
    if not _PARTIAL.search(text):
        return ()
    try:
        with sympy.evaluate(False):
            tree = _parse(text)
    except Unreadable:
        return ()
    found: dict[tuple[str, Any, Any], None] = {}
    for node in sympy.preorder_traversal(tree):
        if isinstance(node, sympy.log):
            found["positive", _rebuilt(node.args[0]), None] = None
        elif isinstance(node, (sympy.asin, sympy.acos)):
            found["unit", _rebuilt(node.args[0]), None] = None
        elif isinstance(node, sympy.Pow) and not node.exp.is_Integer:
            found["power", _rebuilt(node.base), _rebuilt(node.exp)] = None
    return tuple(guard for guard in found if guard[1].free_symbols)


def _rebuilt(node: Any) -> Any:
    """An unevaluated tree, evaluated."""
    return node.func(*(_rebuilt(part) for part in node.args)) if node.args else node


def _defined(guards: tuple[tuple[str, Any, Any], ...], point: dict[Any, Any]) -> bool:
    """Whether every guard holds at `point`, in the real numbers."""
    for kind, inner, exponent in guards:
        value = inner.subs(point, simultaneous=True).evalf(20)
        if not value.is_real:
            return False
        if (kind == "positive" and not value > 0) or (kind == "unit" and abs(value) > 1):
            return False
        if kind == "power" and value < 0 and not exponent.subs(point, simultaneous=True).is_Integer:
            return False
    return True


def _points(symbols: list[Any], steps: bool) -> Iterator[dict[Any, Any]]:
    """Points to compare at: of both signs, near and far, and integers, which floors, binomials and (-1)^n are about."""
    rng = random.Random(20)  # the same answer gets the same verdict, always
    for attempt in itertools.count():
        if attempt % 4 == 3:
            yield {symbol: sympy.Integer(rng.randint(2, 900 if steps else 9)) for symbol in symbols}
            continue
        low, high = (1, 40) if attempt % 2 else (41, 40_000 if steps else 400)
        signs = [1] * len(symbols) if attempt % 3 == 0 else [rng.choice((-1, 1)) for _ in symbols]
        if attempt % 3 == 1:
            signs = [-1] * len(symbols)
        yield {
            symbol: sign * sympy.Rational(rng.randint(low, high), 37 + attempt)
            for symbol, sign in zip(symbols, signs, strict=True)
        }


def _agree(left: Any, right: Any, symbols: list[Any], guards: tuple[Any, Any]) -> bool:
    """Compare at points of both signs, in the real numbers.

    The left (the answer) has to be defined wherever the right is, unless the right is itself defined in parts only:
    then its variables are meant to be such that it is, and the points where both are defined decide.
    """
    # A step is seen from far away only; towers of powers must not be looked at from there.
    steps = any(side.has(sympy.floor, sympy.ceiling, sympy.Mod, sympy.Min, sympy.Max) for side in (left, right))
    wanted = 4 * _SAMPLES if steps else _SAMPLES
    defined, narrower, partial = 0, False, False
    for point in itertools.islice(_points(symbols, steps), 6 * wanted):
        there = _defined(guards[0], point), _defined(guards[1], point)
        if not there[1]:
            partial = True
            continue
        if not there[0]:
            narrower = True
            continue
        a, b = left.subs(point, simultaneous=True).evalf(40), right.subs(point, simultaneous=True).evalf(40)
        if not b.is_number or not _finite(b):
            continue
        if not a.is_number or not _finite(a):
            if not a.is_number:
                return False
            continue
        defined += 1
        if not _close(a, b, 30) and not (abs(a) < sympy.Float(10, 30) ** -30 and abs(b) < sympy.Float(10, 30) ** -30):
            return False
        if defined >= wanted and (partial or not narrower):
            return True
    return defined >= _FEWEST and (partial or not narrower)


def rounds_to(exact: Any, decimal: Fraction, places: int) -> bool:
    """Whether a decimal of at least six significant digits is `exact` cut or rounded to its `places`.

    A value that could have been written out in that many places must be written out.
    """
    if places == 0 or len(str(abs(decimal.numerator * 10**places // decimal.denominator))) < 6 or not exact.is_real:
        return False
    if exact.is_Rational and (exact * 10**places).is_Integer:
        return False
    gap = abs(exact - sympy.Rational(decimal.numerator, decimal.denominator)).evalf(30)
    return bool(gap < sympy.Rational(1, 10**places))


def proportional(left: tuple[str, str], right: tuple[str, str], *, positive: bool) -> bool:
    """Whether `a = b` and `c = d` say the same: (a-b)/(c-d) is one non-zero (or positive) constant.

    May raise `Unreadable`.
    """
    first = expression(left[0]) - expression(left[1])
    second = expression(right[0]) - expression(right[1])
    symbols = sorted(first.free_symbols | second.free_symbols, key=str)
    if not symbols:
        return False
    rng = random.Random(21)
    ratio: Any = None
    for _ in range(_SAMPLES):
        point = {symbol: sympy.Rational(rng.choice((-1, 1)) * rng.randint(1, 400), 41) for symbol in symbols}
        a, b = (side.subs(point, simultaneous=True).evalf(40) for side in (first, second))
        if not (a.is_number and b.is_number) or not (_finite(a) and _finite(b)):
            return False
        if a == 0 or b == 0:
            return False
        if ratio is not None and not _close(a / b, ratio, 25):
            return False
        ratio = a / b
    return not positive or bool(ratio.is_real and ratio > 0)
