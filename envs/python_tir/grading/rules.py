"""How a problem's answer is graded: by type, or by a scorer of somebody else's."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any, Literal

AnswerForm = Literal["number", "expression"]
"""`number`: only a literal number is an answer, for sources that ask for arithmetic. `expression`: mathematics."""

ANSWER_FORMS: tuple[AnswerForm, ...] = ("number", "expression")
REASONING_GYM = "reasoning_gym"
"""The name that stands for the scorer of an item's own reasoning-gym family."""

_SCORER = re.compile(r"[A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*:[A-Za-z_]\w*")


@dataclass(frozen=True, slots=True)
class Rules:
    """What decides about an answer.

    Without a `scorer` answers are compared as typed values, of the form `answer_form`. A scorer
    (`package.module:function`, or the family's own of reasoning-gym) gives a number from 0 to 1: the answer is right
    from `solved_at` up, and with `partial` the number itself is handed on. `item` describes the item to the scorer, as
    JSON.
    """

    answer_form: AnswerForm = "expression"
    scorer: str | None = None
    solved_at: float = 1.0
    partial: bool = False
    item: str = ""

    def __post_init__(self) -> None:
        if self.answer_form not in ANSWER_FORMS:
            raise ValueError(f"answer_form must be one of {', '.join(ANSWER_FORMS)}, not {self.answer_form!r}")
        if self.scorer is not None and self.scorer != REASONING_GYM and not _is_path(self.scorer):
            raise ValueError(f"scorer must be written as package.module:function, not {self.scorer!r}")
        if not _is_share(self.solved_at):
            raise ValueError(f"solved_at must be a number above 0 and at most 1, not {self.solved_at!r}")
        if not isinstance(self.partial, bool):
            raise ValueError(f"partial must be true or false, not {self.partial!r}")


def _is_path(value: Any) -> bool:
    return isinstance(value, str) and _SCORER.fullmatch(value) is not None


def _is_share(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value <= 1


TYPED = Rules()
"""Compared as typed values, any mathematics."""
