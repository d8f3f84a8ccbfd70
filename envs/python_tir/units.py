r"""Units at the end (or, for money, at the front) of a normalised answer: `5\text{cm}^2`, `90^\circ`, `\$36`, `10\%`.

A unit is a factor to base units and a product of dimensions. A word that is in no table is its own dimension, so that
5 apples are not 5 pears. No unit at all is comparable with any: a question that names the unit is often answered bare.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from fractions import Fraction

_TABLE: dict[str, tuple[str, str]] = {
    "length": ("m metre meter", "1"),
    "length/100": ("cm centimetre centimeter", "1/100"),
    "length/1000": ("mm millimetre millimeter", "1/1000"),
    "length*1000": ("km kilometre kilometer", "1000"),
    "length/in": ("in inch inches", "0.0254"),
    "length/ft": ("ft foot feet", "0.3048"),
    "length/yd": ("yd yard", "0.9144"),
    "length/mi": ("mi mile", "1609.344"),
    "mass": ("kg kilogram", "1"),
    "mass/g": ("g gram", "1/1000"),
    "mass/mg": ("mg milligram", "1/1000000"),
    "mass/lb": ("lb lbs pound-mass", "0.45359237"),
    "mass/oz": ("oz ounce", "0.028349523125"),
    "time": ("s sec second", "1"),
    "time/min": ("min minute", "60"),
    "time/h": ("h hr hour", "3600"),
    "time/d": ("day", "86400"),
    "time/w": ("week", "604800"),
    "month": ("month", "1"),
    "year": ("yr year", "1"),
    "volume": ("L l litre liter", "1/1000"),
    "volume/ml": ("mL ml millilitre milliliter", "1/1000000"),
    "dollar": (r"\$ dollar usd", "1"),
    "dollar/100": ("cent", "1/100"),
    "euro": (r"\euro euro eur", "1"),
    "pound": (r"\pounds gbp", "1"),
    "yen": (r"\yen yen jpy", "1"),
    "percent": (r"\% percent pct", "1/100"),
    "degree": (r"^\circ degree deg", "1"),
    "radian": ("rad radian", "1"),
}
_UNITS: dict[str, tuple[str, Fraction]] = {
    name: (row.split("/")[0].split("*")[0], Fraction(factor))
    for row, (names, factor) in _TABLE.items()
    for name in names.split()
}
_HEDGES = {"or", "and", "not", "if", "but", "than", "maybe", "where", "for", "when", "is", "isn't"}
"""Words that make a second statement of what stands behind a number, and no unit."""
_NOTHING = {"unit", "units"}
# `l` and `L` and the like could be variables: bare single letters are units only after a number and a space.
_BARE = "|".join(sorted((re.escape(n) + "s?" for n in _UNITS if n.isalpha() and len(n) > 1), key=len, reverse=True))
_POWER = r"(?:\^(?:\{(?P<b>[234])\}|(?P<p>[234])))?"
_TAIL = re.compile(
    rf"(?:\\text\{{(?P<text>[A-Za-z ./-]+(?:\^[23])?)\}}"
    rf"|(?:(?<=[\d}})])|(?<=[\d}})]\s))(?P<bare>(?:(?:square|cubic|sq|cu)\s)?(?:{_BARE}))"
    rf"|(?<=\d\s)(?P<letter>[mgshLl])|(?<=[\d}}]\s)(?P<words>[A-Za-z]{{3,}}(?:\s[A-Za-z]+)*)"
    rf"|(?<=\d)(?P<glued>[A-Za-z]{{4,}})|(?P<sign>\^\\circ|\\%)){_POWER}$"
)
_HEAD = re.compile(r"(-?)(\\\$|\\euro|\\pounds|\\yen)\s?")


@dataclass(frozen=True)
class Unit:
    """`factor` base units of the dimensions `dimensions`, each with its power; `certain` is false for bare letters."""

    dimensions: tuple[tuple[str, int], ...]
    factor: Fraction
    certain: bool = True

    @property
    def percent(self) -> bool:
        return self.dimensions == (("percent", 1),)


def _one(word: str) -> tuple[str, Fraction] | None:
    """Look one unit word up; None for words that name no unit of their own."""
    for name in (word, word.lower(), word.rstrip("s"), word.lower().rstrip("s")):
        if name in _UNITS:
            return _UNITS[name]
        if name in _NOTHING:
            return None
    return word.lower().rstrip("s"), Fraction(1)


def _read(text: str, power: int) -> Unit | None:
    """Read `square cm`, `m/s`, `km per hour`, `apples`."""
    dimensions: dict[str, int] = {}
    factor = Fraction(1)
    for index, part in enumerate(re.split(r"\s*(?:/|\bper\b)\s*", text.replace(".", " ").strip())):
        exponent = -1 if index else 1
        words = part.replace("^", " ^").split()
        if index == 0:
            exponent *= power
        if words and words[0].lower() in ("square", "sq", "cubic", "cu"):
            exponent *= 2 if words[0].lower() in ("square", "sq") else 3
            words = words[1:]
        elif len(words) > 1 and words[-1].lower() in ("squared", "cubed", "^2", "^3"):
            exponent *= 2 if words[-1].lower() in ("squared", "^2") else 3
            words = words[:-1]
        found = _one(words[0]) if len(words) == 1 else (" ".join(words).lower(), Fraction(1)) if words else None
        if found is None:
            continue
        dimension, scale = found
        if dimension == "volume":  # litres are cubic metres
            dimension, exponent = "length", 3 * exponent
            factor *= scale ** (exponent // 3)
        else:
            factor *= scale**exponent
        dimensions[dimension] = dimensions.get(dimension, 0) + exponent
    kept = tuple(sorted((name, count) for name, count in dimensions.items() if count))
    return Unit(kept, factor) if kept else None


def split_unit(normal: str) -> tuple[str, Unit | None]:
    """Split a normalised answer into what is measured and its unit, None where it names none."""
    head = _HEAD.match(normal)
    if head is not None and head.end() < len(normal):
        rest, inner = split_unit(head.group(1) + normal[head.end() :])
        return rest, inner if inner is not None and not inner.percent and _is_money(inner) else _read(head.group(2), 1)
    tail = _TAIL.search(normal)
    if tail is None:
        return normal, None
    value = normal[: tail.start()].strip()
    if not re.search(r"\d|\\pi|\\sqrt", value) or value[-1:] in "+-*/^_=(":
        return normal, None
    power = int(tail.group("b") or tail.group("p") or 1)
    if tail.group("sign"):
        return (value, _read(tail.group("sign"), 1)) if power == 1 else (normal, None)
    text = next(tail.group(name) for name in ("text", "bare", "letter", "words", "glued") if tail.group(name))
    if _HEDGES & set(text.lower().split()):
        return normal, None
    unit = _read(text, power)
    if unit is not None and tail.group("letter"):
        unit = Unit(unit.dimensions, unit.factor, certain=False)
    return value, unit


def _is_money(unit: Unit) -> bool:
    return all(name in ("dollar", "euro", "pound", "yen") for name, _ in unit.dimensions)
