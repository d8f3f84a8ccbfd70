"""How docstrings of this project become Markdown: drawings and commands keep their lines, `<` can be read."""

from __future__ import annotations

import re
from typing import Any

import griffe

# Arrows and box drawing. A paragraph with two lines of these is a drawing, one with an indented line is code.
_DRAWN = re.compile("[\u2190-\u21ff\u2500-\u257f\u25b2-\u25c4]|-->|<--|->")
_CODE = re.compile(r"(`[^`]*`)")


class Drawings(griffe.Extension):
    """Fence drawings, code and commands; escape `<` elsewhere, which Markdown would take for HTML."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        """Called for every module, class, function and attribute that was read."""
        if obj.docstring is not None:
            obj.docstring.value = "\n\n".join(_shown(text) for text in obj.docstring.value.split("\n\n"))


def _shown(paragraph: str) -> str:
    lines = paragraph.splitlines()
    if not lines or all(line.startswith("    ") for line in lines if line):  # code already
        return paragraph
    if all(line.startswith("python -m ") for line in lines):
        return _fenced("sh", paragraph)
    if any(line.startswith("    ") for line in lines):
        return _fenced("python" if lines[0].startswith(("with ", "async with ")) else "text", paragraph)
    if sum(bool(_DRAWN.search(line)) for line in lines) > 1:
        return _fenced("text", paragraph)
    pieces = _CODE.split(paragraph.removesuffix(":") if paragraph.endswith("::") else paragraph)
    pieces[::2] = [piece.replace("<", "&lt;") for piece in pieces[::2]]
    return "".join(pieces)


def _fenced(language: str, paragraph: str) -> str:
    return f"```{language}\n{paragraph}\n```"
