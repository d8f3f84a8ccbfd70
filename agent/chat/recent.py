"""Which part of a conversation decides what a template writes behind an action. Nothing is rendered here.

Most templates write a turn by looking at it and at its neighbours, so that what stands behind an action is the same
with or without the turns of long ago: a turn's cost need not grow with the conversation. Nothing in a template says so;
`probes` are conversations on which it can be seen, and `is_check` says when a real one is to be looked at again.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Any

from envs.core import Message

_LOOKED_BACK = 3
"""Turns in which a place to cut is looked for."""
_FIRST_CHECK = 8


def dropped_range(before: Sequence[Message]) -> tuple[int, int]:
    """The messages of `before`, from first to (excluded) last, that an action need not know of; empty: all count.

    Whole turns behind what the conversation opened with, all of them if that is an even number of messages: templates
    count messages to see whether roles alternate.
    """
    opening = next((i for i, message in enumerate(before) if message.get("role") == "assistant"), len(before))
    turns = 0
    for i in range(len(before), opening, -1):
        if i < len(before) and before[i].get("role") != "assistant":
            continue
        turns += 1
        if (i - opening) % 2 == 0:
            return opening, i
        if turns == _LOOKED_BACK:
            break
    return opening, opening


def is_check(dropped: int, turn: int) -> bool:
    """Whether to compare with a whole rendering: when the messages that are dropped, `turn` more than at the turn
    before, have doubled. So a conversation is rendered about twice in all, however long it becomes."""
    return dropped >= _FIRST_CHECK and dropped.bit_length() != max(dropped - turn, 0).bit_length()


def probes() -> Iterator[tuple[list[Message], list[Message], list[dict[str, Any]] | None]]:
    """(messages before an action, messages behind it, tools): openings, turns and endings of every kind, mixed.

    Each letter is a turn: answered by tools (one or two of them), by a user, or thought about and answered by a tool.
    """
    system = {"role": "system", "content": "Be brief."}
    openings: list[list[Message]] = [[_user("one")], [system, _user("one")]]
    endings: list[list[Message]] = [[_tool("six")], [_tool("six"), _tool("seven")], [_user("six")]]
    for opening, turns, behind in itertools.product(openings, ("tttt", "uuuu", "DTut", "uTtu"), endings):
        before = [*opening, *itertools.chain.from_iterable(map(_turn, turns))]
        yield before, behind, _TOOLS
        if len(opening) == 1:
            yield before, behind, None


_TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "probe_tool",
            "description": "A tool.",
            "parameters": {"type": "object", "properties": {"text": {"type": "string", "description": "Text."}}},
        },
    }
]


def _user(text: str) -> Message:
    return {"role": "user", "content": text}


def _tool(text: str) -> Message:
    return {"role": "tool", "content": text}


def _turn(kind: str) -> list[Message]:
    said = "<think>\nthought\n</think>\n\nsaid" if kind == "T" else "said"
    answers = {"t": [_tool("a")], "T": [_tool("a")], "D": [_tool("a"), _tool("b")], "u": [_user("b")]}
    return [{"role": "assistant", "content": said}, *answers[kind]]
