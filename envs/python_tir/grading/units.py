r"""Units at the end (or, for money, at the front) of a normalised answer: `5\text{cm}^2`, `90^\circ`, `\$36`, `10\%`.

A unit is a factor to base units and a product of dimensions; what may be one stands in a closed list (`unit_names`). A
word that is not on it counts only where the gold has it: `42 wrong` is not 42. Scale words multiply: `3 million`.
No unit at all is comparable with any: a question that names the unit is often answered bare.
"""

from __future__ import annotations

import re
from collections.abc import Set
from dataclasses import dataclass
from fractions import Fraction

from envs.python_tir.grading.unit_names import COUNTERS, NOTHING, SCALES, UNITS, unit_named

_HEDGES_TEXT = """
or and not if but than maybe where for when is isn't never no wrong false plus minus times over divided
factorial squared cubed half zero one two three four five six seven eight nine ten eleven twelve
"""
_HEDGES = frozenset(_HEDGES_TEXT.split())
"""Words that make a second statement of what stands behind a number, or another number, and no unit."""
_HAN = "\u4e00-\u9fff"
# `l` and `L` and the like could be variables: bare single letters are units only after a number and a space.
_BARE = "|".join(
    sorted((re.escape(n) + "s?" for n in UNITS if n.isascii() and n.isalpha() and len(n) > 1), key=len, reverse=True)
)
_POWER = r"(?:\^(?:\{(?P<b>[234])\}|(?P<p>[234])))?"
_TAIL = re.compile(
    rf"(?:\\text\{{(?P<text>[A-Za-z{_HAN} ./-]+(?:\^[23])?)\}}"
    rf"|(?:(?<=[\d}})!])|(?<=[\d}})!]\s))(?P<bare>(?:(?:square|cubic|sq|cu)\s)?(?:{_BARE}))"
    rf"|(?<=\d\s)(?P<letter>[mgshLl]|k?m/[sh])|(?<=[\d}})!]\s)(?P<words>[A-Za-z]{{2,}}(?:[\s/]+[A-Za-z]+)*)"
    rf"|(?<=\d)(?P<glued>[A-Za-z]{{4,}})|(?P<han>[{_HAN}]+)|(?P<sign>\^\\circ(?:\s?[CF])?|\\%)){_POWER}$"
)
_HEAD = re.compile(r"(-?)(\\\$|\\euro|\\pounds|\\yen)\s?")
_COMPOUND = re.compile(
    rf"(\d+(?:\.\d+)?)\s?(?:\\text\{{([A-Za-z{_HAN} ]+)\}}|([A-Za-z{_HAN}]+))(?:\s?,\s?|\s?\\and\s|\s)?"
)


@dataclass(frozen=True)
class Unit:
    """`factor` base units of the dimensions `dimensions`, each with its power; `certain` is false for bare letters."""

    dimensions: tuple[tuple[str, int], ...]
    factor: Fraction
    certain: bool = True

    @property
    def percent(self) -> bool:
        return self.dimensions == (("percent", 1),)


@dataclass(frozen=True)
class Measured:
    """What stands before a unit, as text, what to multiply it with (scale words), and the unit, None for none."""

    value: str
    scale: Fraction = Fraction(1)
    unit: Unit | None = None


def unit_words(normal: str) -> frozenset[str]:
    """The words of a gold answer, which its answers may use beside the closed list."""
    return frozenset(_singular(word) for word in re.findall(rf"[A-Za-z]{{2,}}|[{_HAN}]+", normal))


def split_unit(normal: str, known: Set[str] | None = None) -> Measured:
    """Split a normalised answer into what is measured, its scale and its unit.

    `known` are the words that count beside the closed list; None takes any word, for reading a gold answer.
    """
    head = _HEAD.match(normal)
    if head is not None and head.end() < len(normal):
        rest = split_unit(head.group(1) + normal[head.end() :], known)
        if rest.unit is not None and not rest.unit.percent and _is_money(rest.unit):
            return rest
        money = _read(head.group(2), 1, known)
        return Measured(rest.value, rest.scale, money[0] if money is not None else None)
    tail = _TAIL.search(normal)
    if tail is None:
        return Measured(normal)
    value = normal[: tail.start()].strip()
    if not re.search(r"\d|\\pi|\\sqrt", value) or value[-1:] in "+-*/^_=(":
        return Measured(normal)
    power = int(tail.group("b") or tail.group("p") or 1)
    if tail.group("sign"):
        read = _read(tail.group("sign").replace(" ", ""), 1, known) if power == 1 else None
        return Measured(normal) if read is None else Measured(value, *_swapped(read))
    text = next(tail[name] for name in ("text", "bare", "letter", "words", "glued", "han") if tail[name])
    if _HEDGES & set(text.lower().split()):
        return Measured(normal)
    read = _read_han(text, known) if re.match(rf"\s*[{_HAN}]", text) else _read(text, power, known)
    if read is None:
        return Measured(normal)
    unit, scale = read
    if unit is not None and tail.group("letter"):
        unit = Unit(unit.dimensions, unit.factor, certain=False)
    return Measured(value, scale, unit)


def _swapped(read: tuple[Unit | None, Fraction]) -> tuple[Fraction, Unit | None]:
    return read[1], read[0]


def _singular(word: str) -> str:
    return word.lower().removesuffix("s") if len(word) > 2 else word


def _read(text: str, power: int, known: Set[str] | None) -> tuple[Unit | None, Fraction] | None:
    """Read `square cm`, `m/s`, `km per hour`, `million dollars`: unit and scale; None for what is no unit."""
    dimensions: dict[str, int] = {}
    factor, scale = Fraction(1), Fraction(1)
    for index, part in enumerate(re.split(r"\s*(?:/|\bper\b)\s*", text.replace(".", " ").strip())):
        exponent = -1 if index else 1
        words = part.replace("^", " ^").split()
        while index == 0 and words and words[0].lower() in SCALES:
            scale *= SCALES[words.pop(0).lower()]
        if index == 0:
            exponent *= power
        if len(words) > 1 and words[0].lower() in ("square", "sq", "cubic", "cu"):
            exponent *= 2 if words[0].lower() in ("square", "sq") else 3
            words = words[1:]
        elif len(words) > 1 and words[-1].lower() in ("squared", "cubed", "^2", "^3"):
            exponent *= 2 if words[-1].lower() in ("squared", "^2") else 3
            words = words[:-1]
        words = [word for word in words if word.lower() not in NOTHING]
        if not words:
            continue
        named = unit_named(words[0]) if len(words) == 1 else None
        if named is None:
            phrase = [_singular(word) for word in words]
            if known is not None and not set(phrase) <= known:
                return None
            named = " ".join(phrase), Fraction(1)
        dimension, size = named
        if dimension == "volume":  # litres are cubic metres
            dimension, exponent = "length", 3 * exponent
            factor *= size ** (exponent // 3)
        else:
            factor *= size**exponent
        dimensions[dimension] = dimensions.get(dimension, 0) + exponent
    kept = tuple(sorted((name, count) for name, count in dimensions.items() if count))
    return (Unit(kept, factor) if kept else None), scale


def _read_han(text: str, known: Set[str] | None) -> tuple[Unit | None, Fraction] | None:
    """Read Chinese units and counters: scale characters, 平方 or 立方, then a unit or a counter."""
    rest, scale, exponent = text.strip(), Fraction(1), 1
    while rest and rest not in UNITS and (name := next((n for n in (rest[:2], rest[:1]) if n in SCALES), "")):
        scale *= SCALES[name]
        rest = rest[len(name) :]
    if rest[:2] in ("平方", "立方"):
        exponent = 2 if rest[:2] == "平方" else 3
        rest = rest[2:]
    if rest in UNITS:
        dimension, size = UNITS[rest]
        if dimension == "volume":
            return Unit((("length", 3),), size), scale
        return Unit(((dimension, exponent),), size**exponent), scale
    if not rest or rest in COUNTERS:
        return None if exponent > 1 else (None, scale)
    if known is None or rest in known or (rest[0] in COUNTERS and rest[1:] in known):
        return Unit(((rest, 1),), Fraction(1)), scale
    return None


def _is_money(unit: Unit) -> bool:
    return all(name in ("dollar", "euro", "pound", "yen") for name, _ in unit.dimensions)


def join_compound(normal: str) -> str:
    r"""Write `2 hours 30 minutes` in its smallest unit, `150\text{minutes}`; any other text comes back as it is."""
    pieces: list[tuple[Fraction, str, str, Fraction]] = []
    position = 0
    while position < len(normal):
        match = _COMPOUND.match(normal, position)
        word = (match.group(2) or match.group(3)).strip() if match is not None else ""
        named = unit_named(word) if word else None
        if match is None or named is None or word.lower() in ("in", "and"):
            return normal
        pieces.append((Fraction(match.group(1)), word, *named))
        position = match.end()
    factors = [piece[3] for piece in pieces]
    if len(pieces) < 2 or len({piece[2] for piece in pieces}) > 1 or factors != sorted(set(factors), reverse=True):
        return normal
    total = sum((piece[0] * piece[3] for piece in pieces), Fraction(0)) / factors[-1]
    amount = str(total.numerator) if total.denominator == 1 else rf"\frac{{{total.numerator}}}{{{total.denominator}}}"
    return rf"{amount}\text{{{pieces[-1][1]}}}"
