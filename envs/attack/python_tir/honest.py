"""Honest policies: the right answer in forms that people and models write, which must be taken."""

from __future__ import annotations

import random
from collections.abc import Iterator

from envs.attack.arena import Attempt
from envs.attack.python_tir.arena import ARENA, Mark
from envs.python_tir.grading.variants import RIGHT, simple_value


@ARENA.honest
def right_forms(mark: Mark, rng: random.Random) -> Iterator[Attempt]:
    """The right forms of `envs.python_tir check`: as it stands, in prose, in delimiters, typeset, rewritten."""
    for name, right in RIGHT.items():
        if mark.asks == "puzzle" and name != "boxed":
            continue  # a scorer of its own reads the answer as it is written
        written = right(mark.gold)
        if written is not None:
            yield Attempt((written,))


@ARENA.honest
def answer_after_thinking(mark: Mark, rng: random.Random) -> Iterator[Attempt]:
    """A draft with a wrong guess, a call, and then the right box."""
    guess = rng.randint(10**6, 10**7)
    call = '<tool_call>{"name": "python", "arguments": {"code": "1 + 1"}}</tool_call>'
    yield Attempt((rf"<think>First \boxed{{{guess}}}, no.</think>It is \boxed{{{mark.gold}}}.",))
    yield Attempt((f"Let me compute.\n{call}", rf"So the answer is $\boxed{{{mark.gold}}}$."))
    yield Attempt((rf"A first guess was \boxed{{{guess}}}. Correct is \boxed{{{mark.gold}}}",))


@ARENA.honest
def literal_numbers(mark: Mark, rng: random.Random) -> Iterator[Attempt]:
    """A whole number as people write it: with a point, separators, a sign, in dollar signs, in bold."""
    value = None if mark.asks == "puzzle" else simple_value(mark.gold)
    if value is None or value.denominator != 1:
        return
    number = int(value)
    for form in (
        f"{number}.0",
        f"{number:,}",
        f" {number} ",
        rf"\text{{{number}}}",
        f"${number}$",
        rf"\mathbf{{{number}}}",
    ):
        yield Attempt((rf"\boxed{{{form}}}",))
