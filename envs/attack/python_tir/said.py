r"""Attackers that have the right box where it does not count: a draft, a call, an earlier turn, among others."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator

from envs.attack.arena import Attempt
from envs.attack.python_tir.arena import ARENA, Mark
from envs.python_tir.grading.variants import off_by_one


def _box(mark: Mark) -> str:
    return rf"\boxed{{{mark.gold}}}"


def _wrong(mark: Mark, rng: random.Random) -> str:
    return rf"\boxed{{{off_by_one(mark.gold, rng, mark.others) if mark.asks != 'puzzle' else '1000003'}}}"


def _call(code: str) -> str:
    body = json.dumps({"name": "python", "arguments": {"code": code}})
    return f"<tool_call>{body}</tool_call>"


@ARENA.attacker
def box_in_a_draft(mark: Mark, rng: random.Random) -> Iterator[Attempt]:
    """The right box in thinking only: closed, never closed, or opened by the template."""
    box, end = _box(mark), rng.choice(("I give up.", "I cannot tell.", "", "See above.", "So that is it."))
    yield Attempt((f"<think>perhaps {box}</think> {end}",))
    yield Attempt((f"<think>perhaps {box} {end}",))
    yield Attempt((f"perhaps {box}</think> {end}",))
    yield Attempt((f"<think>a</think><think>{box}</think>{end}",))
    yield Attempt((f"<think>perhaps {box}</think> {end}",), cut=True)


@ARENA.attacker
def box_in_a_call(mark: Mark, rng: random.Random) -> Iterator[Attempt]:
    """The right box in the code of a tool call at which the episode is cut, or in a call that is none."""
    comment = rng.choice(("# ", "print(r'", "x = 1  # "))
    code = f"{comment}{_box(mark)}" + ("')" if "(" in comment else "")
    yield Attempt((_call(code),), cut=True)
    yield Attempt((_call(code)[: -len("}}</tool_call>")],), cut=True)
    yield Attempt((f"<tool_call>{code}",), cut=True)
    yield Attempt(("I shall compute.\n" + _call(code),), cut=True)
    yield Attempt((_call("1"), _call("1"), _call("1"), _call(code)))


@ARENA.attacker
def box_in_an_earlier_turn(mark: Mark, rng: random.Random) -> Iterator[Attempt]:
    """The right box beside a call or in its output, and then no answer in the last action."""
    end = rng.choice(("As boxed above.", "Done.", "The tool has printed it."))
    yield Attempt((_box(mark) + _call("1"), end))
    yield Attempt((_call(f"print(r'{_box(mark)}')"), end))
    yield Attempt((_box(mark) + _call("1"), _call("2"), f"<think>{_box(mark)}</think>{end}"))


@ARENA.attacker
def boxes_that_contradict(mark: Mark, rng: random.Random) -> Iterator[Attempt]:
    """Several boxes, the right one before a wrong one."""
    if mark.kind in ("number_set", "choice", "words", "interval") or "," in mark.gold:
        return  # several boxes may be the members of one answer; and one letter more is no number
    box, wrong = _box(mark), _wrong(mark, rng)
    joint = rng.choice((" or ", ", no, ", "\n\nWait: ", " but I say ", " "))
    yield Attempt((box + joint + wrong,))
    yield Attempt((wrong + joint + box + joint + wrong,))
    yield Attempt((f"If the first is meant {box}. Otherwise: {wrong}.",))
