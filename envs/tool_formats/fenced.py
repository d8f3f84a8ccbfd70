"""Calls of models that know no tools: a block of ```python in the text is the code to run."""

from __future__ import annotations

import re
import textwrap

from envs.tool_formats.reading import Malformed

_FENCE = re.compile(r"^([ \t]*)(`{3,}|~{3,})[ \t]*([^\s`]*)[^\n`]*$")
_PYTHON = frozenset(("python", "python3", "py", "py3", "ipython", "ipython3"))
_CLOSING_DEPTH = 3
"""How much deeper than the opening fence the closing one may stand; deeper ones are in the code."""


def _is_python(info: str) -> bool:
    """Whether the first word behind a fence says Python, as models spell it: `py`, `{.python}`, `python:a.py`."""
    words = re.findall(r"\w+", info.lower())
    return bool(words) and words[0] in _PYTHON


def _code(lines: list[str], indent: int) -> str:
    """A block's code. What stands before its fence stands before each line too, and may be more there."""
    if not indent:
        return "\n".join(lines)
    code = "\n".join(line[min(indent, len(line) - len(line.lstrip(" \t"))) :] for line in lines)
    return textwrap.dedent(code) if code.lstrip("\n").startswith((" ", "\t")) else code


def fenced_code(text: str) -> list[str]:
    """The code of every block of Python in `text`. Raises `Malformed` if the last one is cut off."""
    blocks: list[str] = []
    fence, indent, python, lines = "", 0, False, list[str]()
    for line in text.split("\n"):
        mark = _FENCE.match(line.rstrip("\r"))
        if not fence:
            if mark:
                fence, indent, python, lines = mark[2], len(mark[1]), _is_python(mark[3]), []
        elif mark and mark[2].startswith(fence) and not mark[3] and len(mark[1]) <= indent + _CLOSING_DEPTH:
            if python:
                blocks.append(_code(lines, indent))
            fence = ""
        else:
            lines.append(line)
    if fence and python:
        raise Malformed("the ```python block is cut off: its closing ``` is missing")
    return blocks
