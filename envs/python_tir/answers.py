"""Finding the final answer in a model's text, and writing answers in one way. Pure functions, linear in the text."""

from __future__ import annotations

import re

_BOX = re.compile(r"\\(?:boxed|fbox)(?![A-Za-z])\s*")
_BARE = re.compile(r"[^\s${}]+")


def _brace_pairs(text: str) -> dict[int, int]:
    """Map the index of every balanced `{` to its `}`. Escaped braces (`\\{`) are text."""
    pairs: dict[int, int] = {}
    stack: list[int] = []
    for match in re.finditer(r"\\.|[{}]", text, re.DOTALL):
        token = match.group()
        if token == "{":
            stack.append(match.start())
        elif token == "}" and stack:
            pairs[stack.pop()] = match.start()
    return pairs


def extract_answer(text: str) -> str | None:
    """Return the content of the last balanced `\\boxed{...}` or `\\fbox{...}`, or None when there is none.

    Of nested boxes the outermost counts; empty boxes do not. Without a braced box, the token after a bare
    `\\boxed 42` is taken.
    """
    pairs = _brace_pairs(text)
    best: tuple[int, str] | None = None
    bare: str | None = None
    for match in _BOX.finditer(text):
        start = match.end()
        if text[start : start + 1] == "{":
            end = pairs.get(start)
            if end is not None and (best is None or end > best[0]):
                content = text[start + 1 : end].strip()
                if content:
                    best = (end, content)
        elif token := _BARE.match(text, start):
            bare = token.group().rstrip(".,;:!?") or bare
    return best[1] if best is not None else bare


def normalize(answer: str) -> str:
    """Return `answer` in the one spelling that comparisons start from."""
    return answer.strip().strip("$").strip().rstrip(".").strip()
