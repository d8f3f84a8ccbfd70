r"""Whether an answer says what the gold answer says. Slow and unbounded on hostile input: call it in a worker only.

The outer structure decides first (`reading`): every member of a list, set or tuple has to be there, in order where the
gold is a tuple; sets of numbers are compared as sets (`sets_of_numbers`); equations by name and value, or as
proportional where no side is a value. Leaves are typed values (`values`) and compared by a table (`comparing`).
"""

from __future__ import annotations

import re

from envs.python_tir.grading import expressions
from envs.python_tir.grading.answers import normalize
from envs.python_tir.grading.comparing import leaves_equal, without_lead_in
from envs.python_tir.grading.expressions import Unreadable
from envs.python_tir.grading.names import is_letter, is_name
from envs.python_tir.grading.python_notation import to_latex
from envs.python_tir.grading.reading import Leaf, Many, Matrix, Node, Relation, read
from envs.python_tir.grading.rules import AnswerForm
from envs.python_tir.grading.sets_of_numbers import FLIPPED, set_like, sets_equal
from envs.python_tir.grading.symbols import adds_none, symbols
from envs.python_tir.grading.units import join_compound, split_unit
from envs.python_tir.grading.values import WORD, labelled_choice, literal_number, words

_PADDED = re.compile(r",0\d")
_CALL = re.compile(r"([A-Za-z]+)\(([a-z])\)")


def equivalent(answer: str, gold: str, form: AnswerForm = "expression") -> bool:
    """Return whether `answer` (the content of a box) says what `gold` says. Any two strings are accepted."""
    answer, gold = to_latex(answer), to_latex(gold)
    joined, apart = ((_spelled(answer, t), _spelled(gold, t)) for t in (True, False))
    # "100,200" may be one number or two; "14,000" is one.
    readings = [joined] if joined == apart or any(_PADDED.search(text) for text in apart) else [joined, apart]
    return any(_says(a, g, form) for a, g in readings if a and g)


def _spelled(text: str, thousands: bool) -> str:
    return join_compound(normalize(text, thousands=thousands))


def _says(answer: str, gold: str, form: AnswerForm) -> bool:
    tree = read(answer)
    if form == "number" and not _literal(tree, gold):
        return False
    return _plainly_equal(answer, gold) or _same(tree, read(gold))


def _literal(node: Node, gold: str) -> bool:
    """Whether every leaf of an answer is a literal number, with or without a name and a unit.

    A fraction that could be shortened is none where the gold is an integer: 84/2 is the question, not 42.
    """
    if isinstance(node, Relation):
        named = [side for side in node.sides if is_name(side)]
        values = [side for side in node.sides if not is_name(side)]
        return node.operators == ("=",) and len(named) == 1 and _literal(read(values[0]), gold)
    if isinstance(node, Many):
        return all(_literal(member, gold) for member in node.members)
    if not isinstance(node, Leaf):
        return False
    amount = literal_number(split_unit(without_lead_in(node.text), frozenset()).value)
    return amount is not None and (amount.lowest or amount.value.denominator > 1)


def _plainly_equal(answer: str, gold: str) -> bool:
    if answer == gold or (WORD.search(answer + gold) and words(answer) == words(gold)):
        return "\\infty" not in answer or answer == gold
    chosen = labelled_choice(answer)  # "(C) 42" where the gold is the letter
    return chosen is not None and re.sub(r"\\text\{([^{}]*)\}", r"\1", gold).strip("() ") == chosen


def _same(answer: Node, gold: Node) -> bool:
    """Compare two trees."""
    if isinstance(gold, Relation) or isinstance(answer, Relation):
        verdict = _relations(answer, gold)
        if verdict is not None:
            return verdict
    if isinstance(answer, Many) and isinstance(gold, Many):
        families = _families(answer, gold)
        if families is not None:
            return families
    if set_like(answer) or set_like(gold):
        try:
            return sets_equal(answer, gold)
        except (Unreadable, NotImplementedError):
            return isinstance(answer, Many) and isinstance(gold, Many) and _lists(answer, gold)
    if isinstance(gold, Matrix) or isinstance(answer, Matrix):
        return _matrices(answer, gold)
    answer, gold = _plus_minus(answer), _plus_minus(gold)
    if isinstance(gold, Many) or isinstance(answer, Many):
        return _lists(answer, gold)
    if isinstance(answer, Leaf) and isinstance(gold, Leaf):
        return leaves_equal(answer.text, gold.text)
    return False


# ------------------------------------------------------------------------------------------------ relations


def _relations(answer: Node, gold: Node) -> bool | None:
    """Compare where at least one side is a relation; None when it is about sets of numbers."""
    a = answer if isinstance(answer, Relation) else None
    g = gold if isinstance(gold, Relation) else None
    for relation in (a, g):
        if relation is not None and set(relation.operators) != {"="} and relation.operators != (r"\in",):
            return _inequalities(a, g) if a is not None and g is not None else None
    if g is None:
        assert a is not None
        value = _value_of_equation(a)
        if value is None or not _same(read(value), gold):
            return False
        # Not a name, but what would be an answer itself: \frac{84}{2}=42. A calculation is none: 6*7=42.
        first = _turned(a).sides[0]
        return is_name(first) or _same(read(first), gold)
    if a is None:
        return is_name(g.sides[0]) and _same(answer, read(g.sides[-1]))
    if r"\in" in a.operators + g.operators:
        return a.operators == g.operators and a.sides[0] == g.sides[0] and _same(read(a.sides[1]), read(g.sides[1]))
    left, right = _renamed(_turned(a)), _renamed(_turned(g))
    if _same_name(left.sides[0], right.sides[0]):
        value = _value_of_equation(left)
        if value is not None and _same(read(value), read(right.sides[-1])):
            return True
    # Solved for a name, with nothing left to solve: only the same name and value say the same.
    if is_name(right.sides[0]) and not symbols(right.sides[-1]):
        return False
    if not adds_none("".join(left.sides), "".join(right.sides)):
        return False
    try:
        return expressions.proportional(_ends(left), _ends(right), positive=False)
    except Unreadable:
        return False


def _value_of_equation(relation: Relation) -> str | None:
    r"""What an equation gives as the answer: `x = 5`, `5 = x`, `m+n = 25+16 = 41`; None for one still to be solved."""
    if set(relation.operators) != {"="} and relation.operators != (r"\in",):
        return None
    sides = _turned(relation).sides
    constants = [side for side in sides[:-1] if not is_name(side)]
    if not is_name(sides[0]) and (symbols(sides[0]) or not symbols(sides[-1]) <= symbols(sides[0])):
        return None
    checked = [side for side in constants if not symbols(side)]
    return sides[-1] if all(_equal_values(side, sides[-1]) for side in checked) else None


def _equal_values(left: str, right: str) -> bool:
    try:
        return left == right or expressions.equal(split_unit(left).value, split_unit(right).value)
    except Unreadable:
        return False


def _turned(relation: Relation) -> Relation:
    """Write `21 = x` as `x = 21`."""
    sides = relation.sides
    if relation.operators == ("=",) and is_letter(sides[1]) and not is_name(sides[0]):
        return Relation(sides[::-1], relation.operators)
    return relation


def _ends(relation: Relation) -> tuple[str, str]:
    return relation.sides[0], relation.sides[-1]


def _same_name(answer: str, gold: str) -> bool:
    if "\\text" in answer or "\\text" in gold:
        return is_name(answer) and is_name(gold)
    return is_name(answer) and is_name(gold) and answer.replace(" ", "") == gold.replace(" ", "")


def _renamed(relation: Relation) -> Relation:
    """Write `f(t) = t + 1` with a bound variable that every such equation shares."""
    call = _CALL.fullmatch(relation.sides[0])
    if call is None or call.group(2) == "x":
        return relation
    if any(re.search(r"(?<![\\A-Za-z])x", side) for side in relation.sides):
        return relation
    return Relation(tuple(_with_letter(side, call.group(2), "x") for side in relation.sides), relation.operators)


def _with_letter(text: str, old: str, new: str) -> str:
    """Write one variable with another letter; letters of commands and words stay."""
    return re.sub(rf"\\[A-Za-z]+(?:\{{[a-z]+\}})?|{old}", lambda m: new if m.group() == old else m.group(), text)


def _inequalities(answer: Relation, gold: Relation) -> bool | None:
    """Compare two relations with inequalities side by side; None to let the sets decide."""
    if len(answer.operators) != len(gold.operators):
        return None
    for flip in (False, True):
        sides = answer.sides[::-1] if flip else answer.sides
        operators = tuple(FLIPPED.get(o, o) for o in answer.operators[::-1]) if flip else answer.operators
        if operators == gold.operators and all(leaves_equal(a, g) for a, g in zip(sides, gold.sides, strict=True)):
            return True
        solved = any(is_letter(side) and not symbols(other) for side, other in (gold.sides[:2], gold.sides[1::-1]))
        if operators == gold.operators and len(operators) == 1 and operators[0] in FLIPPED and not solved:
            if not adds_none("".join(sides), "".join(gold.sides)):
                return False
            try:
                if expressions.proportional((sides[0], sides[1]), (gold.sides[0], gold.sides[1]), positive=True):
                    return True
            except Unreadable:
                return False
    return None


# --------------------------------------------------------------------------------------- lists and matrices


def _families(answer: Many, gold: Many) -> bool | None:
    r"""Compare families with a parameter, `2n\pi, n \in \mathbb{Z}`, whatever its letter; None where one is none."""
    rewritten: list[Many] = []
    for node in (answer, gold):
        last = node.members[-1] if node.members and node.opening == "" else None
        if not isinstance(last, Relation) or last.operators != (r"\in",) or len(node.members) < 2:
            return None
        if not re.fullmatch(r"[a-z]", last.sides[0]):
            return None
        rewritten.append(_relettered(node, last.sides[0]))
    (*shapes, domain), (*gold_shapes, gold_domain) = (node.members for node in rewritten)
    return domain == gold_domain and _lists(Many("", "", tuple(shapes)), Many("", "", tuple(gold_shapes)))


def _relettered(node: Many, letter: str) -> Many:
    members: list[Node] = []
    for member in node.members:
        if isinstance(member, Leaf):
            members.append(Leaf(_with_letter(member.text, letter, "k")))
        elif isinstance(member, Relation):
            members.append(Relation(tuple(_with_letter(s, letter, "k") for s in member.sides), member.operators))
        else:
            members.append(member)
    return Many(node.opening, node.closing, tuple(members), node.word)


def _plus_minus(node: Node) -> Node:
    r"""Write `1 \pm \sqrt{5}` as a list of two, alone or inside a list or set."""
    if isinstance(node, Leaf) and re.search(r"\\(?:pm|mp)(?![A-Za-z])", node.text):
        up = re.sub(r"\\pm(?![A-Za-z])\s?", "+", re.sub(r"\\mp(?![A-Za-z])\s?", "-", node.text))
        down = re.sub(r"\\pm(?![A-Za-z])\s?", "-", re.sub(r"\\mp(?![A-Za-z])\s?", "+", node.text))
        return Many("", "", (Leaf(up.lstrip("+")), Leaf(down.lstrip("+"))))
    if isinstance(node, Many) and node.opening in ("", "{"):
        members: list[Node] = []
        for member in node.members:
            signs = _plus_minus(member) if isinstance(member, Leaf) else member
            members += signs.members if isinstance(signs, Many) and signs is not member else (signs,)
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
    if a is None or g is None or [len(row) for row in a] != [len(row) for row in g]:
        return False
    scaled = any(isinstance(node, Matrix) and node.factor for node in (answer, gold))
    return all(
        _scaled_cells(answer, x, gold, y) if scaled else _same(x, y)
        for left, right in zip(a, g, strict=True)
        for x, y in zip(left, right, strict=True)
    )


def _scaled_cells(answer: Node, cell: Node, gold: Node, gold_cell: Node) -> bool:
    """Compare entries of which at least one has a factor in front of its matrix."""
    texts = []
    for matrix, entry in ((answer, cell), (gold, gold_cell)):
        if not isinstance(entry, Leaf):
            return False
        factor = matrix.factor if isinstance(matrix, Matrix) else ""
        factor += "1" if factor in ("+", "-") else ""
        texts.append(rf"({factor})\cdot({entry.text})" if factor else entry.text)
    try:
        return adds_none(*texts) and expressions.equal(*texts)
    except Unreadable:
        return False


def _rows(node: Node) -> tuple[tuple[Node, ...], ...] | None:
    """The rows of a matrix; a tuple counts as a column, which is how vectors are written in lines."""
    if isinstance(node, Matrix):
        return node.rows
    if isinstance(node, Many) and node.opening in ("(", "<", "["):
        if all(isinstance(member, Many) for member in node.members):
            return tuple(member.members for member in node.members if isinstance(member, Many))
        return tuple((member,) for member in node.members)
    return None
