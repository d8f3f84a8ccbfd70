r"""Sets of numbers, however they are written: `x<3`, `(-\infty,3)`, `x \in (-\infty,3)`, unions, `\setminus`."""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import sympy

from envs.python_tir.grading import expressions
from envs.python_tir.grading.answers import unwrap
from envs.python_tir.grading.expressions import Unreadable
from envs.python_tir.grading.reading import Leaf, Many, Matrix, Node, Relation, Union, Without, read
from envs.python_tir.grading.symbols import symbols
from envs.python_tir.grading.units import split_unit
from envs.python_tir.grading.values import ClosedForm, Number, Quantity, value_of

FLIPPED = {"<": ">", ">": "<", r"\le": r"\ge", r"\ge": r"\le", "=": "=", r"\ne": r"\ne"}
"""The operator of a relation that is read from right to left."""
_SETS = {
    r"\mathbb{R}": sympy.S.Reals, r"\mathbb{Z}": sympy.S.Integers, r"\mathbb{N}": sympy.S.Naturals,
    r"\mathbb{Z}^+": sympy.S.Naturals, r"\mathbb{Z}^{+}": sympy.S.Naturals, r"\mathbb{Z}_{>0}": sympy.S.Naturals,
    r"\mathbb{Q}": sympy.S.Rationals, r"\emptyset": sympy.S.EmptySet,
    "all real numbers": sympy.S.Reals, "all reals": sympy.S.Reals, "all integers": sympy.S.Integers,
    "all positive integers": sympy.S.Naturals,
}  # fmt: skip


def set_like(node: Node) -> bool:
    """Whether a node can only be a set of numbers: an interval with a square bracket, a union, an inequality."""
    if isinstance(node, Many):
        mixed = len(node.members) == 2 and (node.opening, node.closing) in (("(", "]"), ("[", ")"))
        infinite = node.opening in ("(", "[") and any(isinstance(m, Leaf) and "\\infty" in m.text for m in node.members)
        return mixed or infinite or (node.opening == "" and any(set_like(member) for member in node.members))
    if isinstance(node, Relation):
        return node.operators != ("=",)
    return isinstance(node, (Union, Without)) or (isinstance(node, Leaf) and node.text in _SETS)


def sets_equal(answer: Node, gold: Node) -> bool:
    """Whether two nodes are the same set of the same variable. Raises `Unreadable` where one is no set.

    The answer has to be worked out: a variable stands alone on its side, ends are numerals where the gold's are, and
    no symbol is in them that the gold lacks.
    """
    (left_name, left), (right_name, right) = _to_set(answer), _to_set(gold)
    if left_name and right_name and left_name != right_name:
        return False
    if not _worked_out(answer, gold):
        return False
    return _same_set(left, right)


def _same_set(left: Any, right: Any) -> bool:
    if left == right:
        return True
    if isinstance(left, sympy.Interval) and isinstance(right, sympy.Interval):
        return (left.left_open, left.right_open) == (right.left_open, right.right_open) and all(
            a == b or expressions.constants_equal(a, b) for a, b in ((left.start, right.start), (left.end, right.end))
        )
    return bool(sympy.simplify(left.symmetric_difference(right)) == sympy.S.EmptySet)


def _worked_out(answer: Node, gold: Node) -> bool:
    if answer == gold:
        return True
    ends = _ends_but_names(answer)
    gold_ends = _ends_but_names(gold)
    allowed = frozenset(symbol for end in gold_ends for symbol in symbols(end))
    numerals = all(isinstance(_amount(end), Number) or "\\infty" in end for end in gold_ends)
    for end in ends:
        if not symbols(end) <= allowed:
            return False
        amount = _amount(end)
        infinite = re.fullmatch(r"[+-]?\s?\\infty", end) is not None
        numeral = isinstance(amount, Number) or (isinstance(amount, ClosedForm) and amount.plain)
        if numerals and not numeral and not infinite:
            return False
    return True


def _ends_but_names(node: Node) -> list[str]:
    names = {side for part in _relations(node) for side in part.sides if re.fullmatch(r"[A-Za-z]|\\[a-z]+", side)}
    return [end for end in _ends(node) if end not in names]


def _amount(text: str) -> Any:
    value = value_of(text)
    return value.amount if isinstance(value, Quantity) else value


def _relations(node: Node) -> Iterator[Relation]:
    if isinstance(node, Relation):
        yield node
    for part in _parts(node):
        yield from _relations(part)


def _parts(node: Node) -> tuple[Node, ...]:
    if isinstance(node, Many):
        return node.members
    if isinstance(node, Union):
        return node.parts
    return (node.whole, node.removed) if isinstance(node, Without) else ()


def _ends(node: Node) -> list[str]:
    """The texts of all ends and members, but for sets that have names."""
    if isinstance(node, Leaf):
        return [] if node.text in _SETS or unwrap(node.text).casefold() in _SETS else [node.text]
    if isinstance(node, Relation):
        if r"\in" in node.operators:
            return [node.sides[0], *_ends(read(node.sides[1]))]
        return list(node.sides)
    return [end for part in _parts(node) for end in _ends(part)]


def _to_set(node: Node) -> tuple[str, Any]:
    """Turn a node into the variable that it names ("" for none) and a sympy set. Raises `Unreadable`."""
    if isinstance(node, Leaf):
        known = _SETS.get(node.text) or _SETS.get(unwrap(node.text).casefold())
        return "", known if known is not None else sympy.FiniteSet(_constant(node.text))
    if isinstance(node, Union):
        return "", sympy.Union(*(_to_set(part)[1] for part in node.parts))
    if isinstance(node, Without):
        return "", sympy.Complement(_to_set(node.whole)[1], _to_set(node.removed)[1])
    if isinstance(node, Relation):
        return _relation_set(node)
    if isinstance(node, Matrix):
        raise Unreadable(str(node))
    if node.opening in ("(", "[") and len(node.members) == 2 and node.closing in (")", "]"):
        low, high = (_constant(m.text) if isinstance(m, Leaf) else _unreadable(m) for m in node.members)
        return "", sympy.Interval(low, high, node.opening == "(", node.closing == ")")
    if node.opening not in ("", "{"):
        raise Unreadable(str(node))
    named = [_to_set(member) for member in node.members]
    names = {name for name, _ in named if name}
    if len(names) > 1:
        raise Unreadable(str(node))
    name = names.pop() if names else ""
    parts = [part for _, part in named]
    relations = all(isinstance(member, Relation) for member in node.members)
    if relations and (
        node.word == "and" or any(r"\ne" in m.operators for m in node.members if isinstance(m, Relation))
    ):
        both = sympy.Intersection(*parts)
        if both != sympy.S.EmptySet:  # "n = 1 and n >= 3" means either
            return name, both
    return name, sympy.Union(*parts)


def _unreadable(node: Node) -> Any:
    raise Unreadable(str(node))


def _constant(text: str) -> Any:
    value = expressions.expression(split_unit(text).value)
    if value.free_symbols or value.is_extended_real is not True:
        raise Unreadable(text)
    return value


def _relation_set(relation: Relation) -> tuple[str, Any]:
    if r"\in" in relation.operators:
        if len(relation.operators) != 1:
            raise Unreadable(str(relation))
        return relation.sides[0], _to_set(read(relation.sides[1]))[1]
    sides = [expressions.expression(side) for side in relation.sides]
    found = set().union(*(side.free_symbols for side in sides))
    if len(found) != 1:
        raise Unreadable(str(relation))
    symbol = found.pop()
    result: Any = sympy.S.Reals
    for (left, right), operator in zip(pairwise(sides), relation.operators, strict=True):
        result = result.intersect(_half_line(left, right, operator, symbol))
    return str(symbol), result


def _half_line(left: Any, right: Any, operator: str, symbol: Any) -> Any:
    """The reals for which `left operator right` holds."""
    if right == symbol and not left.has(symbol):
        left, right, operator = right, left, FLIPPED[operator]
    if left == symbol and not right.has(symbol):
        simple = {
            "<": lambda: sympy.Interval.open(-sympy.oo, right), ">": lambda: sympy.Interval.open(right, sympy.oo),
            r"\le": lambda: sympy.Interval(-sympy.oo, right), r"\ge": lambda: sympy.Interval(right, sympy.oo),
            "=": lambda: sympy.FiniteSet(right), r"\ne": lambda: sympy.S.Reals - sympy.FiniteSet(right),
        }  # fmt: skip
        return simple[operator]()
    relation = {"<": sympy.Lt, ">": sympy.Gt, r"\le": sympy.Le, r"\ge": sympy.Ge, "=": sympy.Eq, r"\ne": sympy.Ne}
    return relation[operator](left, right).as_set()
