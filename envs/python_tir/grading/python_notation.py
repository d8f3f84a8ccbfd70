r"""Answers as Python and sympy print them, turned into LaTeX: `-1 + exp(16)`, `Abs(x)`, `Matrix([[1, 2], [3, 4]])`.

Read with Python's own parser and walked over a closed list of nodes and names; nothing is evaluated. What is not wholly
of that list stays as it was.
"""

from __future__ import annotations

import ast
import re
import warnings

MAX_CHARS = 2_000
_DEPTH = 40
_MODULES = frozenset({"math", "cmath", "np", "numpy", "sp", "sympy"})
_CONSTANTS = {"pi": r"\pi ", "E": "e", "I": "i", "oo": r"\infty ", "inf": r"\infty ", "zoo": r"\infty "}
_GREEK_TEXT = """
alpha beta gamma delta theta phi lambda mu rho sigma omega
"""
_GREEK = frozenset(_GREEK_TEXT.split())
_SAME_NAME = "sin cos tan cot sec csc sinh cosh tanh arcsin arccos arctan max min gcd"
_FUNCTIONS = {
    **{name: rf"\{name}" for name in _SAME_NAME.split()},
    **{short: rf"\arc{short[1:]}" for short in ("asin", "acos", "atan")},
    "ln": r"\ln", "log10": r"\log_{10}", "log2": r"\log_{2}", "Max": r"\max", "Min": r"\min",
}  # fmt: skip
_CALL = re.compile(r"(?<![\\\w])([A-Za-z]\w*)(?=[(.])")
_OTHER_TEXT = """
exp sqrt cbrt Abs abs log factorial binomial comb Rational Fraction Integer Float Matrix Eq Interval Union
FiniteSet Tuple array floor ceil ceiling root
"""
_OTHER = frozenset(_OTHER_TEXT.split())
_KNOWN = frozenset(_FUNCTIONS) | _OTHER
_OPERATORS: dict[type, str] = {
    ast.Lt: "<", ast.Gt: ">", ast.LtE: r" \le ", ast.GtE: r" \ge ", ast.Eq: "=", ast.NotEq: r" \ne ",
}  # fmt: skip


class _NotPython(ValueError):
    """The text is not wholly of the notation that is read."""


def to_latex(text: str) -> str:
    """Return `text` as LaTeX where it is Python's or sympy's notation, else as it is."""
    if len(text) > MAX_CHARS or "\\" in text or "__" in text:
        return text
    calls = set(_CALL.findall(text))
    imaginary = re.search(r"(?<![A-Za-z\d])\d*\.?\d*\*?I(?![A-Za-z\d])", text) and "*" in text
    if not (calls & _KNOWN or "**" in text or imaginary or re.search(r"(?<![\w.])\d+\.?\d*j\b", text)):
        return text
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # "'int' object is not callable" is said while parsing
            tree = ast.parse(text.strip().replace("^", "**"), mode="eval")
        return _write(tree.body, 0)
    except (SyntaxError, ValueError, MemoryError, RecursionError):
        return text


def _write(node: ast.expr, depth: int) -> str:
    if depth > _DEPTH:
        raise _NotPython
    below = depth + 1
    if isinstance(node, ast.Constant):
        return _constant(node)
    if isinstance(node, ast.Name):
        return _name(node.id)
    if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in _MODULES:
        return _name(node.attr)
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, (ast.USub, ast.UAdd)):
        return f"{'-' if isinstance(node.op, ast.USub) else ''}{_factor(node.operand, below)}"
    if isinstance(node, ast.BinOp):
        return _operation(node, below)
    if isinstance(node, (ast.Tuple, ast.List, ast.Set)):
        opening, closing = {ast.Tuple: ("(", ")"), ast.List: ("[", "]"), ast.Set: (r"\{", r"\}")}[type(node)]
        return f"{opening}{', '.join(_write(member, below) for member in node.elts)}{closing}"
    if isinstance(node, ast.Compare):
        sides = [_write(side, below) for side in (node.left, *node.comparators)]
        operators = [_OPERATORS.get(type(operator)) for operator in node.ops]
        if None in operators:
            raise _NotPython
        return sides[0] + "".join(f"{operator}{side}" for operator, side in zip(operators, sides[1:], strict=True))
    if isinstance(node, ast.Call) and not node.keywords:
        return _call(node, below)
    raise _NotPython


def _constant(node: ast.Constant) -> str:
    value = node.value
    if isinstance(value, complex):
        return f"{value.imag:g}i"
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise _NotPython
    return str(value)


def _name(name: str) -> str:
    if name in _CONSTANTS:
        return _CONSTANTS[name]
    if name in _GREEK:
        return rf"\{name} "
    match = re.fullmatch(r"([A-Za-z])_?(\d*)", name)
    if match is None:
        raise _NotPython
    return match.group(1) + (rf"_{{{match.group(2)}}}" if match.group(2) else "")


def _operation(node: ast.BinOp, depth: int) -> str:
    left, right = node.left, node.right
    if isinstance(node.op, (ast.Add, ast.Sub)):
        tail = _factor(right, depth) if _is_sum(right) else _write(right, depth)
        return f"{_write(left, depth)}{'+' if isinstance(node.op, ast.Add) else '-'}{tail}"
    if isinstance(node.op, ast.Mult):
        return rf"{_factor(left, depth)} \cdot {_factor(right, depth)}"
    if isinstance(node.op, ast.Div):
        return rf"\frac{{{_write(left, depth)}}}{{{_write(right, depth)}}}"
    if isinstance(node.op, ast.Pow):
        base = _write(left, depth)
        plain = isinstance(left, (ast.Name, ast.Constant)) and not base.startswith("-")
        return f"{base if plain else f'({base})'}^{{{_write(right, depth)}}}"
    raise _NotPython


def _is_sum(node: ast.expr) -> bool:
    return isinstance(node, ast.UnaryOp) or (isinstance(node, ast.BinOp) and isinstance(node.op, (ast.Add, ast.Sub)))


def _factor(node: ast.expr, depth: int) -> str:
    return f"({_write(node, depth)})" if _is_sum(node) else _write(node, depth)


def _call(node: ast.Call, depth: int) -> str:
    function = node.func
    if isinstance(function, ast.Attribute) and isinstance(function.value, ast.Name):
        if function.value.id == "Interval" and function.attr in ("open", "Lopen", "Ropen"):
            return _interval(node.args, function.attr, depth)
        name = function.attr if function.value.id in _MODULES else ""
    else:
        name = function.id if isinstance(function, ast.Name) else ""
    if name in ("Matrix", "array") and len(node.args) == 1:
        return _matrix(node.args[0], depth)
    if name == "Interval":
        return _interval(node.args, "", depth)
    arguments = [_write(argument, depth) for argument in node.args]
    if name == "FiniteSet":
        return rf"\{{{', '.join(arguments)}\}}"
    if name == "Union" and arguments:
        return r" \cup ".join(arguments)
    if name in _FUNCTIONS and arguments:
        return f"{_FUNCTIONS[name]}({', '.join(arguments)})"
    patterns = {
        ("exp", 1): "e^{{{0}}}", ("sqrt", 1): r"\sqrt{{{0}}}", ("cbrt", 1): r"\sqrt[3]{{{0}}}",
        ("root", 2): r"\sqrt[{1}]{{{0}}}", ("Abs", 1): "|({0})|", ("abs", 1): "|({0})|",
        ("log", 1): r"\ln({0})", ("log", 2): r"\log_{{{1}}}({0})", ("factorial", 1): "({0})!",
        ("binomial", 2): r"\binom{{{0}}}{{{1}}}", ("comb", 2): r"\binom{{{0}}}{{{1}}}",
        ("Rational", 2): r"\frac{{{0}}}{{{1}}}", ("Fraction", 2): r"\frac{{{0}}}{{{1}}}",
        ("Integer", 1): "{0}", ("Rational", 1): "{0}", ("Float", 1): "{0}", ("Eq", 2): "{0}={1}",
        ("floor", 1): r"\lfloor {0} \rfloor", ("ceil", 1): r"\lceil {0} \rceil", ("ceiling", 1): r"\lceil {0} \rceil",
        ("Tuple", 2): "({0}, {1})", ("Tuple", 3): "({0}, {1}, {2})",
    }  # fmt: skip
    pattern = patterns.get((name, len(arguments)))
    if pattern is None:
        raise _NotPython
    return pattern.format(*arguments)


def _interval(ends: list[ast.expr], kind: str, depth: int) -> str:
    open_ends = {"": (False, False), "open": (True, True), "Lopen": (True, False), "Ropen": (False, True)}[kind]
    flags = [isinstance(end, ast.Constant) and end.value is True for end in ends[2:4]]
    left, right = (*flags, *open_ends[len(flags) :])[:2] if flags else open_ends
    if len(ends) < 2:
        raise _NotPython
    low, high = _write(ends[0], depth), _write(ends[1], depth)
    return f"{'(' if left or 'infty' in low else '['}{low}, {high}{')' if right or 'infty' in high else ']'}"


def _matrix(rows: ast.expr, depth: int) -> str:
    if not isinstance(rows, ast.List):
        raise _NotPython
    lines = [row.elts if isinstance(row, ast.List) else [row] for row in rows.elts]
    cells = [" & ".join(_write(cell, depth) for cell in line) for line in lines]
    return r"\begin{pmatrix}" + r" \\ ".join(cells) + r"\end{pmatrix}"
