r"""Extraction of the final answer and its spelling (case E7)."""

# ruff: noqa: RUF001 (characters that look alike are the point)

from __future__ import annotations

import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from envs.python_tir.grading.answers import extract_answer, normalize, unwrap


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        (r"so \boxed{42}.", "42"),
        (r"\boxed{41} then \boxed{42}", "42"),
        (r"\boxed{\frac{1}{\sqrt{2}}} done", r"\frac{1}{\sqrt{2}}"),
        (r"\boxed{\{1, 2\}}", r"\{1, 2\}"),
        (r"\boxed{41} and then \boxed{42", "41"),
        (r"\boxed{41 and \boxed{42}", "42"),
        (r"\fbox{7}", "7"),
        (r"\boxed {7}", "7"),
        (r"\boxed 42 is it", "42"),
        (r"$\boxed42$", "42"),
        (r"\boxed{1 + \fbox{2}}", r"1 + \fbox{2}"),
        (r"\boxed{42} as I put it in \boxed{}", "42"),
        (r"{ \boxed{x_{1}} }} }", "x_{1}"),
        (r"\boxedfoo{3}", None),
        ("the answer is 42", None),
        (r"\boxed{42", None),
        (r"The solutions are $\boxed{3}$, $\boxed{5}$ and $\boxed{7}$.", "3, 5, 7"),
        (r"\boxed{3}, \boxed{5}, \boxed{7}", "3, 5, 7"),
        (r"$x=\boxed{3}$ and $y=\boxed{5}$", "3, 5"),
        (r"\boxed{1}. So \boxed{3}, \text{ and } \boxed{5}", "3, 5"),
        (r"\boxed{42}, \boxed{42}", "42"),
        (r"\boxed{41}. \boxed{42}", "42"),
        (r"\boxed{41}, no, \boxed{42}", "42"),
        (r"\boxed{41} \boxed{42}", "42"),
        (r"\boxed{}", None),
        ("", None),
    ],
)
def test_last_balanced_box_is_the_answer(text: str, answer: str | None) -> None:
    """Case E7: nested braces, the last of several, none at all is None and no crash."""
    assert extract_answer(text) == answer


@pytest.mark.parametrize(
    ("written", "normal"),
    [
        (r"\dfrac12", r"\frac{1}{2}"),
        (r"\frac 59", r"\frac{5}{9}"),
        (r"\frac{270}7", r"\frac{270}{7}"),
        (r"\frac1{72}", r"\frac{1}{72}"),
        (r"11\sqrt2", r"11\sqrt{2}"),
        (r"$\left( 3,\, \frac{\pi}{2} \right)$.", r"(3,\frac{\pi}{2})"),
        (r"11,\! 111,\! 111,\! 100", "11111111100"),
        ("1{,}234", "1234"),
        ("(2,251,252)", "(2,251,252)"),
        (r"\text{(C)}", "(C)"),
        ("90°", r"90^\circ"),
        ("50%", r"50\%"),
        ("−½", r"-\frac{1}{2}"),
        (r"\begin{pmatrix} 1 \\ 2 \end{pmatrix}", r"\begin{pmatrix}1\\2\end{pmatrix}"),
        (r"x^(n+1)", "x^{n+1}"),
    ],
)
def test_one_spelling_for_many(written: str, normal: str) -> None:
    assert normalize(written) == normal


@pytest.mark.parametrize(("left", "right"), [("1 1", "11"), ("1 1/2", "11/2"), ("1,2", "12"), ("1, 234", "1 234")])
def test_spelling_never_joins_numbers(left: str, right: str) -> None:
    assert normalize(left) != normalize(right)


_balanced = st.recursive(
    st.text(alphabet="ab1+ ,\\(\u00e9\n", max_size=8).map(lambda s: s.replace("\\", r"\alpha ")),
    lambda inner: st.tuples(inner, inner).map(lambda pair: f"{{{pair[0]}}}{pair[1]}"),
    max_leaves=12,
)


@given(
    before=st.text(alphabet="xy $\n.", max_size=20), content=_balanced, after=st.text(alphabet="xy $\n.", max_size=20)
)
def test_any_balanced_content_comes_back_whole(before: str, content: str, after: str) -> None:
    expected = content.strip() or None
    assert extract_answer(f"{before}\\boxed{{0{{}}}}{before}") == "0{}"
    assert extract_answer(f"{before}\\boxed{{{content}}}{after}") == expected


@given(st.text(max_size=200))
def test_any_text_is_survived(text: str) -> None:
    answer = extract_answer(text)
    assert answer is None or answer
    assert isinstance(unwrap(normalize(text)), str)


@given(st.integers(-(10**12), 10**12))
def test_thousands_separators_do_not_matter(value: int) -> None:
    assert normalize(f"{value:,}") == normalize(str(value))


HOSTILE = [
    "{",
    "}",
    "\\boxed{",
    "\\boxed",
    "\\text{",
    "\\frac",
    "\\sqrt[",
    "^(",
    "\\",
    "1,",
    "$",
    " ",
    ".",
    "^ ",
    "\\{",
]


@pytest.mark.parametrize("piece", HOSTILE)
def test_hostile_text_costs_linear_time(piece: str) -> None:
    """Quadratic work on 400,000 characters would take minutes."""
    text = piece * (400_000 // len(piece))
    started = time.process_time()
    extract_answer(text)
    unwrap(normalize(text))
    assert time.process_time() - started < 5


@pytest.mark.parametrize(
    "piece", [*HOSTILE, "1 ", "is ", "the ", "*", "`", "_", r"\,", "1 hour ", "]", "[1,", "|", "sin(", "\u2009"]
)
@pytest.mark.parametrize("before", ["", r"\text{", r"\text{ a"])
def test_the_longest_answer_costs_the_event_loop_little(before: str, piece: str) -> None:
    """Case I12: ten thousand characters, read before a worker sees them."""
    text = (before + piece * 10_000)[:10_000]
    started = time.process_time()
    normalize(text)
    assert time.process_time() - started < 0.25


@settings(deadline=None)
@given(st.lists(st.sampled_from(["\\boxed", "\\fbox", "{", "}", " ", "a", "\\", "1"]), max_size=30))
def test_extraction_returns_a_balanced_box_of_the_text(pieces: list[str]) -> None:
    text = "".join(pieces)
    answer = extract_answer(text)
    assert answer is None or all(part in text for part in answer.split(", "))
