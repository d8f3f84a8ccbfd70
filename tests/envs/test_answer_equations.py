r"""Case I6: what may stand on the left of an equation in an answer: a name, or what would be an answer itself."""

from __future__ import annotations

from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from envs.python_tir.grading.equivalence import equivalent

NAMES = ("x", "a_1", "f(2)", "P(A)", "AB", "m+n", r"\angle A", r"\text{the area}", r"\alpha", "S'")
_OPERATORS = {"+": "+", "-": "-", "*": r"\cdot ", "x": r"\times ", "**": "*"}


@st.composite
def calculations(draw: st.DrawFn) -> tuple[str, Fraction]:
    """A calculation of two to four numbers as somebody may write it, and its value."""
    value = Fraction(draw(st.integers(2, 60)))
    text = str(value)
    for _ in range(draw(st.integers(1, 3))):
        sign, number = draw(st.sampled_from(sorted(_OPERATORS))), draw(st.integers(2, 20))
        sum_before = any(mark in text for mark in "+-")
        if sign in "+-":
            value = value + number if sign == "+" else value - number
            text = f"{text}{sign}{number}"
        else:
            value *= number
            text = f"({text}){_OPERATORS[sign]}{number}" if sum_before else f"{text}{_OPERATORS[sign]}{number}"
    form = draw(st.sampled_from(("{}", r"\left({}\right)", r"\sqrt{{({})^2}}", r"2\cdot\frac{{{}}}{{2}}", r"({})+0")))
    return form.format(text), abs(value) if "sqrt" in form else value


def written(value: Fraction) -> str:
    return str(value.numerator)


@given(calculations())
def test_an_equation_whose_left_side_is_a_calculation_answers_no_number(made: tuple[str, Fraction]) -> None:
    """It says no more than the calculation, which is the question."""
    text, value = made
    assert not equivalent(f"{text} = {written(value)}", written(value))
    assert not equivalent(f"{written(value)} = {text}", written(value))
    assert not equivalent(f"{text} = {written(value)}", f"x = {written(value)}")


@given(calculations(), st.sampled_from(NAMES))
def test_an_equation_whose_left_side_is_a_name_gives_its_last_value(made: tuple[str, Fraction], name: str) -> None:
    text, value = made
    assert equivalent(f"{name} = {written(value)}", written(value))
    # The way to it may stand between, if it is right.
    assert equivalent(f"{name} = {text} = {written(value)}", written(value))
    assert not equivalent(f"{name} = {text} = {written(value + 1)}", written(value + 1))
    assert not equivalent(f"{name} = {text}", written(value))


@pytest.mark.parametrize(
    ("answer", "gold", "right"),
    [
        (r"\frac{84}{2}=42", "42", True),
        ("7^2=49", "49", True),
        (r"\frac{2}{\sqrt2}=\sqrt2", r"\sqrt2", True),
        (r"50\text{ mm}=5\text{ cm}", r"5\text{ cm}", False),  # to be checked, it would have to be converted
        ("x=25-25=0", "0", True),
        ("25-25=0", "0", False),
        (r"6*7\text{ cm}=42\text{ cm}", r"42\text{ cm}", False),
        ("41=42", "42", False),
        ("6*7=x", "42", False),
        ("6*7=42=x", "42", False),
        ("6*7=42", "x=42", False),
        ("(1+1,3)=(2,3)", "(2,3)", False),
    ],
)
def test_what_would_be_an_answer_itself_may_stand_there(answer: str, gold: str, right: bool) -> None:
    assert equivalent(answer, gold) is right
