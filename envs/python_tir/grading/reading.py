r"""Reading a normalised answer as a small tree: lists, tuples, intervals, unions, relations, matrices, leaves.

Only the outer structure is read here, by one pass over brackets; what stands between is left as LaTeX. That keeps the
meaning that a computer algebra system throws away (order, brackets, which side was asked for).
"""

from __future__ import annotations

import re
from dataclasses import dataclass


@dataclass(frozen=True)
class Leaf:
    """Mathematics or words without outer structure, as normalised LaTeX."""

    text: str


@dataclass(frozen=True)
class Many:
    """Members between brackets; `opening` is one of ( [ { <, or "" for a bare list (`word`: "and", "or" or "")."""

    opening: str
    closing: str
    members: tuple[Node, ...]
    word: str = ""


@dataclass(frozen=True)
class Union:
    r"""`parts` joined by `\cup`."""

    parts: tuple[Node, ...]


@dataclass(frozen=True)
class Without:
    r"""`whole \setminus removed`."""

    whole: Node
    removed: Node


@dataclass(frozen=True)
class Relation:
    r"""A chain such as `0 < c \le 1`: n+1 sides as LaTeX, n operators of = < > \le \ge \ne \in."""

    sides: tuple[str, ...]
    operators: tuple[str, ...]


@dataclass(frozen=True)
class Matrix:
    r"""Rows of entries, each multiplied by `factor` (LaTeX, "" for none): `\frac{1}{2}\begin{pmatrix}...`."""

    rows: tuple[tuple[Node, ...], ...]
    factor: str = ""


Node = Leaf | Many | Union | Without | Relation | Matrix

_TOKEN = re.compile(
    r"\\begin\{[a-zA-Z*]+\}|\\end\{[a-zA-Z*]+\}|\\(?:lfloor|lceil|langle)(?![A-Za-z])"
    r"|\\(?:rfloor|rceil|rangle)(?![A-Za-z])|\\(?:and|or|cup|setminus|in|le|ge|ne|approx|equiv)(?![A-Za-z])"
    r"|\\[A-Za-z]+|\\.|[()\[\]{},;=<>&]|[^\\()\[\]{},;=<>&]+",
    re.DOTALL,
)
_OPEN = {"(": ")", "[": "]", "{": "}", r"\{": r"\}", r"\langle": r"\rangle", r"\lfloor": "", r"\lceil": ""}
_CLOSE = {")", "]", "}", r"\}", r"\rangle", r"\rfloor", r"\rceil"}
_RELATIONS = {"=", "<", ">", r"\le", r"\ge", r"\ne", r"\in"}
_MATRIX = re.compile(
    r"(?P<factor>(?:[^\\&]|\\(?!begin|\\))*?)(?:\\cdot|\\times|\*)?\s*[\[(]?\s*"
    r"\\begin\{(?P<kind>[pb]?matrix|array)\}(?:\{[lcr| ]*\})?(?P<body>(?:(?!\\begin\{).)*)\\end\{(?P=kind)\}\s*[\])]?",
    re.DOTALL,
)
_BUILDER = re.compile(
    r"\s*([a-z])(?:\s*\\in\s*\\mathbb\{R\})?\s*(?:\\mid(?![A-Za-z])|\||:)\s*((?=.*?(?<![\\A-Za-z])\1(?![A-Za-z])).*)",
    re.DOTALL,
)
_FAMILY = re.compile(r"([^|:,]*[a-z][^|:,]*?)(?:\\mid(?![A-Za-z])|\||:)\s*([a-z]\s?\\in\s?\\mathbb\{[ZN]\}\S*)")
CONDITION = re.compile(r"(?<![\\A-Za-z])(?:if|when|where|otherwise|unless|for)(?![A-Za-z])")
"""What follows is a condition: the whole is a sentence, and its equals signs are part of it."""
MAX_DEPTH = 12
"""Brackets nested deeper than this are left to the leaves: no answer needs them, and recursion ends."""


def _split(text: str, separators: set[str]) -> tuple[list[str], list[str]]:
    """Split at the separators that stand outside all brackets; return the pieces and the separators between them."""
    pieces: list[str] = []
    between: list[str] = []
    current: list[str] = []
    depth = 0
    for match in _TOKEN.finditer(text):
        token = match.group()
        if token in _OPEN or token.startswith(r"\begin"):
            depth += 1
        elif token in _CLOSE or token.startswith(r"\end"):
            depth = max(0, depth - 1)
        elif depth == 0 and token in separators:
            pieces.append("".join(current).strip())
            between.append(token)
            current = []
            continue
        current.append(token)
    pieces.append("".join(current).strip())
    return pieces, between


def _enclosed(text: str) -> tuple[str, str, str] | None:
    """Return (opening, inside, closing) when one pair of brackets encloses all of `text`."""
    tokens = list(_TOKEN.finditer(text))
    if len(tokens) < 2 or tokens[0].group() not in ("(", "[", "{", r"\{", r"\langle"):
        return None
    depth = 0
    for match in tokens:
        token = match.group()
        if token in _OPEN or token.startswith(r"\begin"):
            depth += 1
        elif token in _CLOSE or token.startswith(r"\end"):
            depth -= 1
        if depth == 0 and match is not tokens[-1]:
            return None
    last = tokens[-1].group()
    if last not in (")", "]", "}", r"\}", r"\rangle") or depth != 0:
        return None
    return tokens[0].group(), text[tokens[0].end() : tokens[-1].start()].strip(), last


def read(text: str, depth: int = 0) -> Node:
    """Read a normalised answer."""
    text = _inward(text.strip()) if depth == 0 else text.strip()
    if depth > MAX_DEPTH:
        return Leaf(text)
    for separators in ({";"}, {",", r"\and", r"\or"}):
        pieces, between = _split(text, separators)
        if between:
            members = tuple(read(piece, depth + 1) for piece in pieces if piece)
            words = {separator[1:] for separator in between if separator.startswith("\\")}
            if not members:
                return Leaf(text)
            return members[0] if len(members) == 1 else Many("", "", members, words.pop() if len(words) == 1 else "")
    if CONDITION.search(text):
        return Leaf(text)
    pieces, between = _split(text, _RELATIONS | {r"\approx", r"\equiv"})
    if r"\equiv" in between:
        return Leaf(text)
    if r"\approx" in between:  # "\sqrt2 \approx 1.41": the exact side is the answer, unless it is only a name
        at = between.index(r"\approx")
        if at == 0 and not re.search(r"\d|\\pi", pieces[0]):
            return read(pieces[1], depth + 1)
        pieces, between = pieces[: at + 1], between[:at]
    if between and all(pieces):
        return Relation(tuple(pieces), tuple(between))
    pieces, between = _split(text, {r"\cup"})
    if between:
        return Union(tuple(read(piece, depth + 1) for piece in pieces if piece))
    pieces, between = _split(text, {r"\setminus"})
    if len(pieces) == 2 and all(pieces):
        return Without(read(pieces[0], depth + 1), read(pieces[1], depth + 1))
    matrix = _MATRIX.fullmatch(text)
    if matrix is not None:
        return _read_matrix(matrix["body"], matrix["factor"].strip(), depth)
    enclosed = _enclosed(text)
    if enclosed is None:
        return Leaf(text)
    opening, inside, closing = enclosed
    members = _members(inside, depth)
    if opening == r"\{" and closing == r"\}":
        family = _FAMILY.fullmatch(inside)
        if family is not None:  # "{2n pi | n in Z}" is a family with a parameter
            return Many("", "", tuple(read(part, depth + 1) for part in family.groups()))
        built = _BUILDER.fullmatch(inside)
        if built is not None:  # "{x | x > 3}" is what stands behind the bar
            return read(built.group(2), depth + 1)
        return Many("{", "}", members)
    if len(members) >= 2 and opening != "{" and closing not in ("}", r"\}"):
        return Many(opening.replace(r"\langle", "<"), closing.replace(r"\rangle", ">"), members)
    if (opening, closing) in (("(", ")"), ("{", "}")):
        return read(inside, depth + 1)
    return Many(opening, closing, members) if (opening, closing) == ("[", "]") else Leaf(text)


def _inward(text: str) -> str:
    """Write the open ends of `]1,2[` with round brackets."""
    if "[" not in text and "]" not in text:
        return text
    text = re.sub(r"(^|\\cup)\s*\](?=[^\[\](){}]+,[^\[\](){}]+[\[\])])", r"\1(", text)
    return re.sub(r"(?<=[^\[\],])\[(?=\s*(?:$|\\cup))", ")", text)


def _members(inside: str, depth: int) -> tuple[Node, ...]:
    pieces, _ = _split(inside, {",", ";"})
    return tuple(read(piece, depth + 1) for piece in pieces if piece)


def _read_matrix(body: str, factor: str, depth: int) -> Node:
    rows, _ = _split(re.sub(r"\\\\(?:\[[^\[\]]*\])?|\\cr(?![A-Za-z])", r"\\newline ", body), set())
    lines = [line for line in re.split(r"\\newline(?![A-Za-z])", rows[0]) if line.strip()]
    return Matrix(tuple(tuple(read(cell, depth + 1) for cell in _split(line, {"&"})[0]) for line in lines), factor)
