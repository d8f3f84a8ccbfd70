r"""Whether an answer says what the gold answer says. Slow and unbounded on hostile input: call it in a worker only.

The outer structure decides first (`reading`): every member of a list, set or tuple has to be there, in order where the
gold is a tuple; sets of numbers are compared as sets, however they are written; equations by their solutions, not by
their look. Leaves are words, compared as words, or mathematics (`expressions`) with units (`units`).
"""

from __future__ import annotations

import re
from itertools import pairwise
from typing import Any

import sympy

from envs.python_tir import expressions
from envs.python_tir.answers import normalize, unwrap
from envs.python_tir.expressions import Unreadable
from envs.python_tir.reading import CONDITION, Leaf, Many, Matrix, Node, Relation, Union, Without, read
from envs.python_tir.units import Unit, split_unit

_FLIPPED = {"<": ">", ">": "<", r"\le": r"\ge", r"\ge": r"\le", "=": "=", r"\ne": r"\ne"}
_NONE = {
    "no solution",
    "no solutions",
    "none",
    "there are no solutions",
    "does not exist",
    "dne",
    "\\emptyset",
    "\\{\\}",
}
_SETS = {
    r"\mathbb{R}": sympy.S.Reals, r"\mathbb{Z}": sympy.S.Integers, r"\mathbb{N}": sympy.S.Naturals,
    r"\mathbb{Z}^+": sympy.S.Naturals, r"\mathbb{Z}^{+}": sympy.S.Naturals, r"\mathbb{Z}_{>0}": sympy.S.Naturals,
    r"\mathbb{Q}": sympy.S.Rationals, r"\emptyset": sympy.S.EmptySet,
    "all real numbers": sympy.S.Reals, "all reals": sympy.S.Reals, "all integers": sympy.S.Integers,
    "all positive integers": sympy.S.Naturals,
}  # fmt: skip
_WORD = re.compile(rf"(?<![\\A-Za-z{{])[A-Za-z]{{4,}}|\\text\{{|{CONDITION.pattern}")
_BASE = re.compile(r"([0-9A-Fa-f]+)_(?:\{(\d+)\}|(\d+))")
_LETTER = re.compile(r"\(([A-J])\)(?![A-Za-z]).*|([A-J])[).:].*", re.DOTALL)
_PREFIX = re.compile(r"(?:\\text\{)?(?:the )?(?:final )?answer(?: is)?\s?[:=]?\s?\}?\s?", re.IGNORECASE)
_DONE = re.compile(
    r"[+-]?(?:\d+\s?)?(?:\d*\.?\d+|\d+/\d+|\\frac\{-?[\d.]+\}\{[\d.]+\})|[+-]?\d+(?:!|\^\{?-?\d+\}?)|\\sqrt(?:\[\d\])?\{\d+\}"
)
_PADDED = re.compile(r",0\d")
_CALL = re.compile(r"([A-Za-z]+)\(([a-z])\)")


def equivalent(answer: str, gold: str) -> bool:
    """Return whether `answer` (the content of a box) says what `gold` says. Any two strings are accepted."""
    joined, apart = ((normalize(answer, thousands=t), normalize(gold, thousands=t)) for t in (True, False))
    # "100,200" may be one number or two; "14,000" is one.
    readings = [joined] if joined == apart or any(_PADDED.search(text) for text in apart) else [joined, apart]
    return any(_plainly_equal(a, g) or _same(read(a), read(g)) for a, g in readings if a and g)


def _plainly_equal(answer: str, gold: str) -> bool:
    if answer == gold or (_WORD.search(answer + gold) and _words(answer) == _words(gold)):
        return True
    chosen = _LETTER.fullmatch(re.sub(r"\\text\{([^{}]*)\}", r"\1", answer))  # "(C) 42" where the gold is the letter
    return chosen is not None and gold.strip("()") == (chosen.group(1) or chosen.group(2))


def _words(text: str) -> list[str]:
    """The words and symbols of a text in prose; case matters only to single letters, order only in sentences."""
    bare = re.sub(r"[\"'.!?:]", "", unwrap(text)).strip()
    if bare.casefold() in _NONE:
        return ["none"]
    tokens = [token.casefold() if len(token) > 1 else token for token in re.findall(r"[A-Za-z]+|\d+|\S", bare)]
    kept = [token for token in tokens if token not in ("the", "a", "an", "all", "every", "(", ")")] or tokens
    return sorted(kept) if len(kept) <= 2 else kept


def _same(answer: Node, gold: Node) -> bool:
    """Compare two trees."""
    if isinstance(gold, Relation) or isinstance(answer, Relation):
        verdict = _relations(answer, gold)
        if verdict is not None:
            return verdict
    if _set_like(answer) or _set_like(gold):
        return _as_sets(answer, gold)
    if isinstance(gold, Matrix) or isinstance(answer, Matrix):
        return _matrices(answer, gold)
    answer, gold = _plus_minus(answer), _plus_minus(gold)
    if isinstance(gold, Many) or isinstance(answer, Many):
        return _lists(answer, gold)
    if isinstance(answer, Leaf) and isinstance(gold, Leaf):
        return _leaves(answer.text, gold.text)
    return False


# ------------------------------------------------------------------------------------------------ relations


def _name(side: str) -> bool:
    r"""Whether the left of an equation only names what was asked: `x`, `f(x)`, `AB`, `m\angle A`, `\text{area}`."""
    return re.search(r"[+*/^<>-]|\\frac|\\cdot|\\times|(?<![_{(\d])\d(?!\d*[)}])", side) is None


def _relations(answer: Node, gold: Node) -> bool | None:
    """Compare where at least one side is a relation; None when it is about sets of numbers."""
    a = answer if isinstance(answer, Relation) else None
    g = gold if isinstance(gold, Relation) else None
    for relation in (a, g):
        if relation is not None and set(relation.operators) != {"="} and relation.operators != (r"\in",):
            return _inequalities(a, g) if a is not None and g is not None else None
    if g is None:
        assert a is not None
        if a.sides[-1] == "0" and not _name(a.sides[0]):
            return False
        return _same(read(a.sides[-1]), gold)
    if a is None:
        return _name(g.sides[0]) and _same(answer, read(g.sides[-1]))
    left, right = _renamed(a), _renamed(g)
    if _same_name(left.sides[0], right.sides[0]) and _same(read(left.sides[-1]), read(right.sides[-1])):
        return True
    if r"\in" in a.operators + g.operators:
        return False
    try:
        return expressions.proportional(_ends(left), _ends(right), positive=False)
    except Unreadable:
        return False


def _ends(relation: Relation) -> tuple[str, str]:
    return relation.sides[0], relation.sides[-1]


def _same_name(answer: str, gold: str) -> bool:
    if "\\text" in answer or "\\text" in gold:
        return True
    return _name(answer) and _name(gold) and answer.replace(" ", "") == gold.replace(" ", "")


def _renamed(relation: Relation) -> Relation:
    """Write `f(t) = t + 1` with a bound variable that every such equation shares."""
    call = _CALL.fullmatch(relation.sides[0])
    if call is None or call.group(2) == "x":
        return relation
    bound = re.compile(rf"(?<![\\A-Za-z]){call.group(2)}(?![A-Za-z])|(?<=[\d)}}]){call.group(2)}(?![A-Za-z])")
    if any(re.search(r"(?<![\\A-Za-z])x", side) for side in relation.sides):
        return relation
    return Relation(tuple(bound.sub("x", side) for side in relation.sides), relation.operators)


def _inequalities(answer: Relation, gold: Relation) -> bool | None:
    """Compare two relations with inequalities side by side; None to let the sets decide."""
    if len(answer.operators) != len(gold.operators):
        return None
    for flip in (False, True):
        sides = answer.sides[::-1] if flip else answer.sides
        operators = tuple(_FLIPPED.get(o, o) for o in answer.operators[::-1]) if flip else answer.operators
        if operators == gold.operators and all(_leaves(a, g) for a, g in zip(sides, gold.sides, strict=True)):
            return True
        if operators == gold.operators and len(operators) == 1 and operators[0] in _FLIPPED:
            try:
                if expressions.proportional((sides[0], sides[1]), (gold.sides[0], gold.sides[1]), positive=True):
                    return True
            except Unreadable:
                return False
    return None


# ------------------------------------------------------------------------------------------- sets of numbers


def _set_like(node: Node) -> bool:
    """Whether a node can only be a set of numbers: an interval with a square bracket, a union, an inequality."""
    if isinstance(node, Many):
        mixed = len(node.members) == 2 and (node.opening, node.closing) in (("(", "]"), ("[", ")"))
        infinite = node.opening == "(" and any(isinstance(m, Leaf) and "\\infty" in m.text for m in node.members)
        return mixed or infinite or (node.opening == "" and any(_set_like(member) for member in node.members))
    if isinstance(node, Relation):
        return node.operators != ("=",)
    return isinstance(node, (Union, Without)) or (isinstance(node, Leaf) and node.text in _SETS)


def _as_sets(answer: Node, gold: Node) -> bool:
    try:
        (left_name, left), (right_name, right) = _to_set(answer), _to_set(gold)
    except (Unreadable, NotImplementedError):
        return isinstance(answer, Many) and isinstance(gold, Many) and _lists(answer, gold)
    if left_name and right_name and left_name != right_name:
        return False
    return _sets_equal(left, right)


def _sets_equal(left: Any, right: Any) -> bool:
    if left == right:
        return True
    if isinstance(left, sympy.Interval) and isinstance(right, sympy.Interval):
        return (left.left_open, left.right_open) == (right.left_open, right.right_open) and all(
            a == b or expressions.constants_equal(a, b) for a, b in ((left.start, right.start), (left.end, right.end))
        )
    return bool(sympy.simplify(left.symmetric_difference(right)) == sympy.S.EmptySet)


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
    if not isinstance(node, Many):
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
    value = expressions.expression(split_unit(text)[0])
    if value.free_symbols or value.is_extended_real is False:
        raise Unreadable(text)
    return value


def _relation_set(relation: Relation) -> tuple[str, Any]:
    if r"\in" in relation.operators:
        if len(relation.operators) != 1:
            raise Unreadable(str(relation))
        return relation.sides[0], _to_set(read(relation.sides[1]))[1]
    sides = [expressions.expression(side) for side in relation.sides]
    symbols = set().union(*(side.free_symbols for side in sides))
    if len(symbols) != 1:
        raise Unreadable(str(relation))
    symbol = symbols.pop()
    result: Any = sympy.S.Reals
    for (left, right), operator in zip(pairwise(sides), relation.operators, strict=True):
        result = result.intersect(_half_line(left, right, operator, symbol))
    return str(symbol), result


def _half_line(left: Any, right: Any, operator: str, symbol: Any) -> Any:
    """The reals for which `left operator right` holds."""
    if right == symbol and not left.has(symbol):
        left, right, operator = right, left, _FLIPPED[operator]
    if left == symbol and not right.has(symbol):
        simple = {
            "<": lambda: sympy.Interval.open(-sympy.oo, right), ">": lambda: sympy.Interval.open(right, sympy.oo),
            r"\le": lambda: sympy.Interval(-sympy.oo, right), r"\ge": lambda: sympy.Interval(right, sympy.oo),
            "=": lambda: sympy.FiniteSet(right), r"\ne": lambda: sympy.S.Reals - sympy.FiniteSet(right),
        }  # fmt: skip
        return simple[operator]()
    relation = {"<": sympy.Lt, ">": sympy.Gt, r"\le": sympy.Le, r"\ge": sympy.Ge, "=": sympy.Eq, r"\ne": sympy.Ne}
    return relation[operator](left, right).as_set()


# --------------------------------------------------------------------------------------- lists and matrices


def _plus_minus(node: Node) -> Node:
    r"""Write `1 \pm \sqrt{5}` as a list of two, alone or inside a list or set."""
    if isinstance(node, Leaf) and re.search(r"\\(?:pm|mp)(?![A-Za-z])", node.text):
        up = re.sub(r"\\pm(?![A-Za-z])", "+", re.sub(r"\\mp(?![A-Za-z])", "-", node.text))
        down = re.sub(r"\\pm(?![A-Za-z])", "-", re.sub(r"\\mp(?![A-Za-z])", "+", node.text))
        return Many("", "", (Leaf(up.lstrip("+")), Leaf(down.lstrip("+"))))
    if isinstance(node, Many) and node.opening in ("", "{"):
        members: list[Node] = []
        for member in node.members:
            spread = _plus_minus(member) if isinstance(member, Leaf) else member
            members += spread.members if isinstance(spread, Many) and spread is not member else (spread,)
        return Many(node.opening, node.closing, tuple(members), node.word)
    return node


def _lists(answer: Node, gold: Node) -> bool:
    """All members, in order where the gold is a tuple."""
    a = answer if isinstance(answer, Many) else Many("", "", (answer,))
    g = gold if isinstance(gold, Many) else Many("", "", (gold,))
    if len(a.members) != len(g.members):
        return False
    ordered = g.opening in ("(", "[", "<")
    if ordered and a.opening == "{":
        return False
    if len(g.members) == 2 and (a.opening == "[") != (g.opening == "["):
        return False  # an interval, or a pair?
    if a.opening in ("(", "[", "<") and g.opening == "{":
        return False
    if ordered:
        return all(_same(x, y) for x, y in zip(a.members, g.members, strict=True))
    return _match(list(a.members), list(g.members))


def _match(answers: list[Node], golds: list[Node]) -> bool:
    """Pair every gold member with an answer of its own; equality is transitive, so the first match will do."""
    if not golds:
        return not answers
    for index, candidate in enumerate(answers):
        if _same(candidate, golds[0]):
            return _match(answers[:index] + answers[index + 1 :], golds[1:])
    return False


def _matrices(answer: Node, gold: Node) -> bool:
    a, g = _rows(answer), _rows(gold)
    return (
        a is not None
        and g is not None
        and [len(row) for row in a] == [len(row) for row in g]
        and all(_same(x, y) for left, right in zip(a, g, strict=True) for x, y in zip(left, right, strict=True))
    )


def _rows(node: Node) -> tuple[tuple[Node, ...], ...] | None:
    """The rows of a matrix; a tuple counts as a column, which is how vectors are written in lines."""
    if isinstance(node, Matrix):
        return node.rows
    if isinstance(node, Many) and node.opening in ("(", "<", "["):
        if all(isinstance(member, Many) for member in node.members):
            return tuple(member.members for member in node.members if isinstance(member, Many))
        return tuple((member,) for member in node.members)
    return None


# --------------------------------------------------------------------------------------------------- leaves


def _leaves(answer: str, gold: str) -> bool:
    if answer == gold:
        return True
    if not _WORD.search(gold):
        answer = _PREFIX.sub("", answer, count=1)
    (value, unit), (gold_value, gold_unit) = split_unit(answer), split_unit(gold)
    if _undone(value, gold_value) and not (gold_unit is not None and gold_unit.percent):
        return False
    if _measured(value, unit, gold_value, gold_unit):
        return True
    uncertain = (unit is not None and not unit.certain) or (gold_unit is not None and not gold_unit.certain)
    return uncertain and _values(answer, gold)


def _undone(answer: str, gold: str) -> bool:
    """Whether the gold is a number and the answer a calculation that leads to it: 6*7 is the question, not 42.

    Numerals, fractions, one power, factorial or root of a numeral are answers.
    """
    value = expressions.number(gold)
    if value is None and not re.fullmatch(r"-?(?:\d+/\d+|\\frac\{-?\d+\}\{\d+\})", gold):
        return False
    if re.search(r"\\(?:sum|prod|int|lim)(?![A-Za-z])", answer):
        return True
    if (
        expressions.number(answer) is not None
        or "\\pi" in answer
        or re.search(r"[A-Za-z]", re.sub(r"\\[A-Za-z]+", "", answer))
    ):
        return False
    return _DONE.fullmatch(answer.replace(" ", "") if "/" not in answer else answer) is None


def _measured(value: str, unit: Unit | None, gold_value: str, gold_unit: Unit | None) -> bool:
    if unit is not None and gold_unit is not None:
        if unit.dimensions != gold_unit.dimensions:
            return False
        if unit.factor != gold_unit.factor:
            ratio = unit.factor / gold_unit.factor
            value = rf"({value})\cdot\frac{{{ratio.numerator}}}{{{ratio.denominator}}}"
    elif (unit is not None and unit.percent) != (gold_unit is not None and gold_unit.percent):
        # 10\% is 0.1; and who asks "how many percent" takes 10 for it.
        hundredth = rf"({value if unit is not None and unit.percent else gold_value})\cdot\frac{{1}}{{100}}"
        pair = (hundredth, gold_value) if unit is not None and unit.percent else (value, hundredth)
        if _values(*pair):
            return True
    elif (unit is None) != (gold_unit is None) and "\\pi" in (value if unit is None else gold_value):
        named = unit if unit is not None else gold_unit
        if named is not None and named.dimensions == (("degree", 1),):
            inner = value if unit is not None else gold_value
            other = gold_value if unit is not None else value
            if _values(rf"({inner})\cdot\frac{{\pi}}{{180}}", other):
                return True
    return _values(value, gold_value)


def _values(answer: str, gold: str) -> bool:
    """Compare two leaves without units."""
    if answer == gold:
        return True
    if _WORD.search(answer) or _WORD.search(gold):
        return _words(answer) == _words(gold)
    based = _bases(answer, gold)
    if based is not None:
        return based
    a, g = expressions.number(answer), expressions.number(gold)
    if a is not None and g is not None:
        if a[0] == g[0]:
            return True
        shorter, longer = sorted((a, g), key=lambda pair: pair[1])
        exact = sympy.Rational(longer[0].numerator, longer[0].denominator)
        gap = abs(longer[0] - shorter[0])
        return shorter[1] < longer[1] and expressions.rounds_to(exact, *shorter) and 2 * gap * 10 ** shorter[1] <= 1
    try:
        if expressions.equal(answer, gold):
            return True
        for literal, other in ((a, gold), (g, answer)):
            if literal is not None:
                exact = expressions.expression(other)
                return not exact.free_symbols and expressions.rounds_to(exact, *literal)
    except Unreadable:
        return _words(answer) == _words(gold) != []
    return False


def _bases(answer: str, gold: str) -> bool | None:
    """Compare numerals with a base, `52_8`: the same digits, and the same base where both name one."""
    a, g = _BASE.fullmatch(answer), _BASE.fullmatch(gold)
    if a is None and g is None:
        return None
    digits = [(match.group(1), match.group(2) or match.group(3)) if match else None for match in (a, g)]
    left, right = digits[0] or (answer, ""), digits[1] or (gold, "")
    return left[0].upper() == right[0].upper() and (not left[1] or not right[1] or left[1] == right[1])
