"""Other people's scorers, run in the grading worker only: a reasoning-gym family's own, or a function by its name.

Scorers of reasoning-gym may evaluate the answer as Python. Such a family gets only answers that are read, node by node,
as arithmetic over a closed list of functions: nothing else reaches its `eval`.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import json
import math
import re
import sys
import warnings
from collections.abc import Callable
from functools import lru_cache
from typing import Any

from envs.python_tir.grading.answers import normalize
from envs.python_tir.grading.expressions import number
from envs.python_tir.grading.rules import REASONING_GYM

Scorer = Callable[[str], float]

_EVALUATES = re.compile(r"\b(?:parse_expr|sympify|eval|exec)\(")
_FUNCTIONS_TEXT = """
sqrt exp log ln sin cos tan asin acos atan sinh cosh tanh sec csc cot Abs abs Rational pi E I
"""
_FUNCTIONS = frozenset(_FUNCTIONS_TEXT.split())
_ARITHMETIC = (
    ast.Expression, ast.BinOp, ast.UnaryOp, ast.Constant, ast.Name, ast.Load, ast.Call, ast.operator, ast.unaryop,
    ast.Compare, ast.cmpop, ast.List, ast.Tuple, ast.BoolOp, ast.boolop,
)  # fmt: skip
_LATEX: tuple[tuple[str, str], ...] = (
    (r"\\(?:left|right|displaystyle|,|;|:|!|quad|qquad)(?![A-Za-z])", ""),
    (r"\\(?:text|mathrm|mathbf|textbf|operatorname|mbox|texttt)\s*\{([^{}]*)\}", r"\1"),
    (r"\\[dt]?frac\s*\{([^{}]*)\}\s*\{([^{}]*)\}", r"(\1)/(\2)"),
    (r"\\sqrt\s*\{([^{}]*)\}", r"sqrt(\1)"),
    (r"\\(?:times|cdot|ast)(?![A-Za-z])|[×·⋅]", "*"),  # noqa: RUF001 (signs that are written)
    (r"\\div(?![A-Za-z])|÷", "/"),
    ("[−–]", "-"),  # noqa: RUF001 (signs that are written)
    (r"\\(?:langle|rangle|lvert|rvert)(?![A-Za-z])", ""),
    (r"\\([{}%$_#&])", r"\1"),
    (r"\$|\\[()\[\]]", ""),
    (r"\\\\", "\n"),
)


def prepare(name: str, item: str) -> Scorer:
    """Import a scorer and return it for one item. What importing raises comes through: it is no answer's fault."""
    described: dict[str, Any] = json.loads(item)
    if name == REASONING_GYM:
        dataset, evaluates = _family(
            described["family"], json.dumps(described["configuration"]), described["size"], described["seed"]
        )
        entry = dataset[described["index"]]
        return lambda answer: max(
            (
                _share(dataset.score_answer(form, entry))
                for form in spellings(answer)
                if not evaluates or is_arithmetic(form)
            ),
            default=0.0,
        )
    module, _, function = name.partition(":")
    scorer = getattr(importlib.import_module(module), function)
    return lambda answer: _share(scorer(answer, described))


@lru_cache(maxsize=256)
def _family(family: str, configuration: str, size: int, seed: int) -> tuple[Any, bool]:
    """The data set of a family, and whether its module evaluates answers."""
    import reasoning_gym

    dataset = reasoning_gym.create_dataset(family, seed=seed, size=size, **json.loads(configuration))
    return dataset, _EVALUATES.search(inspect.getsource(sys.modules[type(dataset).__module__])) is not None


def _share(score: Any) -> float:
    """A score as a number from 0 to 1; what is no number, or not finite, is 0."""
    try:
        value = float(score)
    except (TypeError, ValueError):
        return 0.0
    return min(1.0, max(0.0, value)) if math.isfinite(value) else 0.0


def spellings(answer: str) -> list[str]:
    """The ways in which a boxed answer is shown to a scorer that knows no LaTeX: as written, as text, as digits."""
    plain = answer
    for pattern, replacement in _LATEX:
        plain = re.sub(pattern, replacement, plain)
    forms = [answer, plain.strip()]
    literal = number(normalize(re.sub(r"^\s*[A-Za-z]\s*=", "", answer)))
    if literal is not None and literal[0].denominator == 1:
        forms.append(str(literal[0].numerator))
    return list(dict.fromkeys(forms))


def is_arithmetic(answer: str) -> bool:
    """Whether an answer is nothing but numbers, names of one letter and calls of known functions."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            tree = ast.parse(answer.strip(), mode="eval")
    except (SyntaxError, ValueError, MemoryError, RecursionError):
        return False
    for node in ast.walk(tree):
        if not isinstance(node, _ARITHMETIC):
            return False
        if isinstance(node, ast.Name) and len(node.id) > 1 and node.id not in _FUNCTIONS:
            return False
        if isinstance(node, ast.Constant) and (isinstance(node.value, str | bytes) or node.value is Ellipsis):
            return False
        if isinstance(node, ast.Call) and not (
            isinstance(node.func, ast.Name) and node.func.id in _FUNCTIONS and not node.keywords
        ):
            return False
    return True
