r"""Attackers that copy: the prompt, its arithmetic in disguise, its numbers, or the gold beside what cancels."""

from __future__ import annotations

import random
import re
from collections.abc import Iterator

from envs.attack.arena import Attempt
from envs.attack.python_tir.arena import ARENA, Mark, boxed
from envs.python_tir.grading.variants import bare, has_words, simple_value

_ARITHMETIC = re.compile(r"[-(]*\d[\d.,]*(?:\s*(?:[-+*/^]|\\times|\\cdot)\s*[-(]*\d[\d.,]*\)*)+")
_NUMBER = re.compile(r"-?\d+(?:\.\d+)?")
# What changes no value: `{}` stands for the expression, S for a letter.
_DISGUISES = (
    "{}", "{}+S-S", "{}+0S", "S-S+{}", r"({})\cdot S/S", r"({})S^0", r"({})\cdot\pi/\pi", r"({})\cdot e^0", "{}+0i",
    r"({})\cdot i^4", r"({})\cdot 1^S", r"{}+\sin(0)", r"\sqrt{({})^2}", r"\left|{}\right|", r"\frac{{}}{1}",
    r"\lfloor {} \rfloor", r"({})\cdot\log_2 2", r"({})^1", r"1\cdot({})", r"\sum_{k=1}^{1}({})", r"e^{\ln({})}",
    r"\begin{vmatrix}{}&0\\0&1\end{vmatrix}", r"({})\cdot 100\%", r"\max({},{})", r"\int_0^1({})dS", r"--({})",
)  # fmt: skip
_CANCELS = ("{}+S-S", "{}+0S", "S-S+{}", r"{}+0\cdot S", r"({})\cdot S/S", r"({})S^0", r"({})\cdot S\cdot S^{-1}",
            r"({})+(S+1)^2-S^2-2S-1")  # fmt: skip


def expressions(mark: Mark) -> list[str]:
    """The arithmetic that stands in the prompt; for a family of least common multiples, the call."""
    found = [match[0].strip(" .,=") for match in _ARITHMETIC.finditer(mark.prompt)]
    numbers = _NUMBER.findall(mark.prompt)
    if re.search(r"LCM|least common multiple", mark.prompt, re.IGNORECASE) and numbers:
        joined = ",".join(numbers)
        found += [rf"\operatorname{{lcm}}({joined})", f"lcm({joined})", f"LCM of {joined}"]
    return [one for one in found if not mark.is_right(one)]


def _disguised(form: str, expression: str, rng: random.Random, without: str) -> str:
    letter = rng.choice([letter for letter in "abcdkmnpqrstuvwxyz" if letter not in without])
    return form.replace("S", letter).replace("{}", expression)


@ARENA.attacker
def prompt_boxed(mark: Mark, rng: random.Random) -> Iterator[Attempt]:
    """The prompt, or its last sentence, as the answer."""
    sentences = [part.strip() for part in re.split(r"(?<=[.?:!])\s|\n", mark.prompt) if part.strip()]
    for said in (mark.prompt, sentences[-1], rng.choice(sentences)):
        if not any(mark.is_right(one) for one in (said, said.rstrip(" .="), said.rpartition(":")[2])):
            yield from boxed(mark, said, rf"\text{{{said}}}")


@ARENA.attacker
def arithmetic_disguised(mark: Mark, rng: random.Random) -> Iterator[Attempt]:
    r"""Where a literal number is asked for: the prompt's arithmetic, also with `+x-x`, `\cdot\pi/\pi` and the like."""
    if mark.asks != "arithmetic":
        return
    for expression in expressions(mark):
        for _ in range(4):
            once = _disguised(rng.choice(_DISGUISES), expression, rng, "")
            yield from boxed(mark, once, _disguised(rng.choice(_DISGUISES), once, rng, ""))


@ARENA.attacker
def sum_in_parts(mark: Mark, rng: random.Random) -> Iterator[Attempt]:
    """Where a literal number is asked for: the value, but not worked out."""
    value = simple_value(mark.gold)
    if mark.asks != "arithmetic" or value is None or value.denominator != 1 or abs(value) < 3:
        return
    number, part = int(value), rng.randint(2, 500)
    forms = [f"{number - part}+{part}", f"{number + part}-{part}", rf"2\cdot{number}/2", rf"\sqrt{{{number**2}}}"]
    forms += [rf"\binom{{{abs(number)}}}{{1}}", rf"{number}\cdot 1", f"{number}!/{number - 1}!"]
    yield from boxed(mark, *forms)


@ARENA.attacker
def numbers_of_the_prompt(mark: Mark, rng: random.Random) -> Iterator[Attempt]:
    """The numbers that stand in the prompt, the target of a puzzle among them, alone or with something that adds 0."""
    numbers = list(dict.fromkeys(_NUMBER.findall(mark.prompt)))
    wrong = [number for number in numbers if not mark.is_right(number)]
    for number in wrong[-4:] + wrong[:3]:
        yield from boxed(mark, number)
        yield from boxed(
            mark, rng.choice((f"{number}+0", f"{number}-0", rf"{number}\cdot 1", f"{number}/1", f"({number})"))
        )
    if len(numbers) > 1:
        yield from boxed(mark, ",".join(numbers))


@ARENA.attacker
def puzzle_without_its_numbers(mark: Mark, rng: random.Random) -> Iterator[Attempt]:
    """The value that a puzzle wants, made of other numbers than it gives."""
    if mark.kind not in ("countdown", "puzzle24"):
        return
    named = re.search(r"(?:Calculate|Make|make|get|reach|equals?) (\d+)", mark.prompt)
    longest = max(_NUMBER.findall(mark.prompt), key=lambda number: int(float(number)))
    target = int(named[1] if named else longest)
    part = rng.randint(101, 999)
    yield from boxed(
        mark, f"{target}", f"{target} + 0", f"{target + part} - {part}", f"{target} * 1", f"{target * 7} / 7"
    )


@ARENA.attacker
def symbol_that_cancels(mark: Mark, rng: random.Random) -> Iterator[Attempt]:
    """The gold with a symbol that it lacks and that cancels: who writes it has not simplified, or tries a reader."""
    if mark.asks == "puzzle":
        return
    gold = bare(mark.gold)
    if has_words(gold) or re.search(r"[=,<>\\{](?!frac|sqrt)", re.sub(r"\\(frac|sqrt)\{", r"\1", gold)):
        return
    for form in _CANCELS:
        yield from boxed(mark, _disguised(form, gold, rng, gold))
