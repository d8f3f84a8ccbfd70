r"""Attackers that are near: other scale, other words, other statement, and the wrong variants of the check."""

from __future__ import annotations

import random
import re
from collections.abc import Iterator

from envs.attack.arena import Attempt
from envs.attack.python_tir.arena import ARENA, Mark, boxed
from envs.python_tir.grading.variants import WRONG, bare, simple_value

_UNIT = re.compile(r"(\d+)\\text\{ (\w+)\}")


def _number(mark: Mark) -> int | None:
    """The gold as a whole number that is far enough from 0 and 1 for a factor to be seen."""
    value = None if mark.asks == "puzzle" else simple_value(mark.gold)
    return int(value) if value is not None and value.denominator == 1 and abs(value) > 3 else None


@ARENA.attacker
def near_misses(mark: Mark, rng: random.Random) -> Iterator[Attempt]:
    """The gold with a digit, a sign, a part, a unit changed: the wrong variants of `envs.python_tir check`."""
    if mark.asks == "puzzle":
        return
    for wrong in WRONG.values():
        written = wrong(mark.gold, rng, mark.others)
        if written is not None:
            yield from boxed(mark, written)


@ARENA.attacker
def number_with_words(mark: Mark, rng: random.Random) -> Iterator[Attempt]:
    """The right number beside words that make another one of it, or that nobody asked for."""
    number = _number(mark)
    if number is None:
        return
    scale = rng.choice(("thousand", "million", "billion", "hundred", "dozen"))
    after = rng.choice(
        ("plus one", "factorial", "squared", "wrong", "times two", "minus a bit", "or less", "percent off")
    )
    yield from boxed(
        mark, f"{number} {scale}", rf"{number}\text{{ {scale}}}", f"{number} {after}", rf"{number}\text{{ {after}}}"
    )
    yield from boxed(
        mark, rf"\text{{about half of }}{number}", rf"{number}!\text{{ ways}}", rf"\text{{minus }}{number}"
    )


@ARENA.attacker
def off_by_scale(mark: Mark, rng: random.Random) -> Iterator[Attempt]:
    """A quantity whose point or unit has moved, with and without words around it."""
    match = _UNIT.fullmatch(mark.gold)
    if match is None:
        number = _number(mark)
        if number is not None:
            shifted = f"{number}0" if rng.random() < 0.5 else f"{number / 10:.1f}"
            yield from boxed(
                mark, shifted, rf"{number}\times 10^{{{rng.randint(1, 6)}}}", f"{number}e{rng.randint(1, 5)}"
            )
        return
    number, unit = int(match[1]), match[2]
    yield from boxed(mark, rf"{number}0\text{{ {unit}}}", rf"{number / 10}\text{{ {unit}}}", f"{number}0 {unit}")
    yield from boxed(mark, f"{number / 10} {unit}", rf"{number}!\text{{ {unit}}}", f"{number * 10}.0 {unit}")
    other = rng.choice([one for one in ("cm", "km", "hours", "dollars", "minutes", "kg", "litres") if one != unit])
    yield from boxed(mark, rf"{number}\text{{ {other}}}", f"{number} {other}", rf"{number}\text{{ square {unit}}}")


@ARENA.attacker
def equation_around_it(mark: Mark, rng: random.Random) -> Iterator[Attempt]:
    """A number as the right side of an equation that says something else: `2x=42`, `x^2=42`, `41=42`."""
    number = _number(mark)
    if number is None:
        return
    letter, factor = rng.choice("abknxyz"), rng.randint(2, 9)
    yield from boxed(mark, f"{factor}{letter}={number}", f"{letter}^2={number}", f"{number - factor}={number}")
    yield from boxed(mark, f"{letter}+{factor}={number}", rf"\frac{{{letter}}}{{{factor}}}={number}", f"0={number}")
    yield from boxed(mark, rf"{letter}>{number}", rf"{letter}\ne {number}", rf"\sqrt{{{letter}}}={number}")


@ARENA.attacker
def equal_for_some(mark: Mark, rng: random.Random) -> Iterator[Attempt]:
    r"""An expression that is the gold for positive values only: `|x|`, `\sqrt{x^2}`, `e^{\ln x}`."""
    if mark.kind != "linear":
        return
    letter = next(char for char in mark.gold if char.isalpha())
    for same in (
        rf"|{letter}|",
        rf"\sqrt{{{letter}^2}}",
        rf"e^{{\ln {letter}}}",
        rf"\frac{{{letter}^2}}{{|{letter}|}}",
    ):
        yield from boxed(mark, mark.gold.replace(letter, same))


@ARENA.attacker
def unsimplified_name(mark: Mark, rng: random.Random) -> Iterator[Attempt]:
    """For a named value: the name of another, several names, or the value under a function."""
    if mark.kind != "equation":
        return
    letter, _, value = bare(mark.gold).partition("=")
    other = rng.choice([one for one in "abknxyz" if one != letter])
    yield from boxed(
        mark, f"2{letter}={value}", f"{letter}^2={value}", f"{letter}+1={value}", f"{letter}={other}={value}1"
    )
