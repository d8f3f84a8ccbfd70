"""What counts as the same answer (cases E7 and E9, and their siblings)."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from envs.python_tir.grading import equivalent

SAME = [
    # Case E7
    ("0.5", "1/2"), (r"\frac12", "0.5"), ("1/2", r"\frac{1}{2}"), (r"10\%", "10"), (r"10\%", "0.1"), ("0.1", r"10\%"),
    ("10%", r"\frac{1}{10}"), ("10,080", "10080"), (r"10,\!080", "10080"), ("1{,}234.5", "1234.5"), ("42.", "42"),
    (r"\text{42}", "42"), (r"5\text{ cm}", "5"), ("5", r"5 \text{ cm}"), ("5 cm", r"5\text{ cm}"), ("$36", r"\$36"),
    ("36 dollars", r"\$36"), (r"90^\circ", "90"), ("90 degrees", r"90^{\circ}"), ("18 apples", "18"),
    (r"x = 42", "42"), (r"m+n = 42", "42"), (r"\frac{84}{2} = 42", "42"), (r"\dfrac{3}{4}", "0.75"), ("-3/4", r"-\tfrac34"),
    (r"1\frac45", r"\frac95"), ("1 4/5", "1.8"), (r"137 \frac{1}{2}", "137.5"), ("500 cm", "5 m"),
    # Case E9
    (r"(-\infty,3)", "x<3"), ("x<3", r"(-\infty,3)"), ("3>x", "x<3"), (r"x \in (-\infty, 3)", "x<3"), ("1e-3", "0.001"),
    ("0.001", "1e-3"), (r"10^{-3}", "1e-3"), (r"1\times 10^{-3}", "1e-3"), (r"\sqrt{17}", r"\sqrt{17}"), (r"\sqrt{68}/2", r"\sqrt{17}"),
    ("B", "B"), (r"\text{B}", "B"), ("(B)", "B"), (r"\textbf{(B)}", "B"), ("1331, 1728", "1331 and 1728"),
    (r"1728 \text{ and } 1331", "1331 and 1728"), (r"\{1331, 1728\}", "1331 and 1728"),
    (r"6x-2y+26=0", "3x-y+13=0"), ("y=3x+13", "3x-y+13=0"), (r"\frac{1}{2005! \cdot 2006}", r"\frac{1}{2006!}"),
    # siblings
    ("0<c<1", "(0,1)"), (r"0<k\le\frac49", r"(0,\frac{4}{9}]"), (r"x<-1 \text{ or } x>2", r"(-\infty,-1)\cup(2,\infty)"),
    (r"(2,\infty)\cup(-\infty,-1)", r"(-\infty,-1)\cup(2,\infty)"), (r"x\ge -1.2", r"x\geq-\frac{6}{5}"),
    (r"\mathbb{R}\setminus\{3\}", r"(-\infty,3)\cup(3,\infty)"), (r"x \neq 3", r"(-\infty,3)\cup(3,\infty)"),
    (r"1\pm\sqrt5,-2", r"\{1+\sqrt{5}, 1-\sqrt{5}, -2\}"), (r"x=\pm 2", "2, -2"), ("x=1 or x=2", "1,2"),
    (r"\left( 3, \frac{\pi}{2} \right)", r"(3,\pi/2)"), ("3, 5", "(3,5)"), ("(3, 5)", "(3,5)"), ("[3,5,7]", "3, 5, 7"),
    (r"(1,2),(3,4)", "(3,4), (1,2)"), ("f(t)=t^2-t", "f(x) = x^2 - x"), ("x^2-x", "f(x) = x^2 - x"),
    (r"P(x)=x+1 \text{ or } P(x)=-1", "P(x)=-1, P(x)=x+1"), (r"\begin{bmatrix} 1 \\ 0.5 \end{bmatrix}", r"\begin{pmatrix} 1 \\ 1/2 \end{pmatrix}"),
    ("(1, 0.5)", r"\begin{pmatrix} 1 \\ 1/2 \end{pmatrix}"), ("52", "52_8"), (r"52_{8}", "52_8"), (r"(1+i)^2", "2i"), ("(n+1)(n+2)", "n^2+3n+2"),
    (r"\frac{\sqrt3}{3}", r"\frac{1}{\sqrt{3}}"), (r"\sin^2 x + \cos^2 x", "1"), ("2*x**2", "2x^2"), ("sqrt(2)/2", r"\frac{\sqrt{2}}{2}"),
    ("0.333333", r"\frac13"), ("2^{2024}+1", "1+2^{2024}"), (r"\text{evelyn}", r"\text{Evelyn}"), ("east", r"\text{east}"),
    ("All positive integers", r"all positive integers."), ("no solution", r"\text{No solutions}"), (r"\emptyset", "no solutions"),
    (r"\frac{\pi}{2}", r"90^\circ"), (r"\sqrt{51}", r"$\sqrt 51$"), ("R+r", "r+R"), ("100, 200", "200,100"), ("½", "0.5"), (r"n \ge 3 \text{ and } n=1", r"n=1, n \ge 3"), (r"x>1 \text{ and } x<2", "(1,2)"), ("3√2", r"3\sqrt{2}"),
]  # fmt: skip

DIFFERENT = [
    # Case E9
    ("5 m", "5 cm"), (r"5\text{ m}", r"5\text{ cm}"), (r"\frac{1}{2004!}", r"\frac{1}{2006!}"), ("1/2004!", "1/2006!"),
    ("3x+4y+14=0", "3x-y+13=0"), ("3x-y+13=0", "3x+4y+14=0"), ("1728", "1331 and 1728"), ("1331", "1331 and 1728"),
    ("1331 and 1728", "1728"),
    # siblings
    ("5 cm", r"5\text{ cm}^2"), ("5 apples", "5 pears"), ("5 hours", "5 minutes"), (r"\$5", "5 euros"), (r"1\%", "0.1"), (r"0.1\%", "0.1\\%\\cdot 10"),
    (r"(-\infty,3]", "x<3"), ("x>3", "x<3"), ("y<3", "x<3"), (r"(3,\infty)", "x<3"), ("3", "x<3"), ("x=3", "x<3"), ("1e-3", "0.01"), ("1e3", "e-3"),
    ("A", "B"), ("b", "B"), (r"\sqrt{71}", r"\sqrt{17}"), ("3x-y=0", "3x-y+13=0"), ("0", "3x-y+13=0"), ("x^2-4=0", "0"),
    ("x=5", "y=5"), ("(2,1)", "(1,2)"), (r"\{1,2\}", "(1,2)"), ("[1,2]", "(1,2)"), ("(1,2)", "[1,2)"), ("1,2,3", "1,2"), ("1,1,2", "1,2,2"),
    ("1,2", "12"), ("1 2", "12"), ("1 1/2", "11/2"), ("r^2", "R^2"), ("R-r", "0"), ("r-r", "R-r"), ("52_9", "52_8"), ("2^{2024}", "2^{2024}+1"),
    (r"10^{100}", r"\sqrt{10^{200}+1}"), ("1.41", r"\sqrt{2}"), ("0.33", r"\frac13"), ("1234567.01", "1234567"), ("41.999999", "42"), ("x", "y"), ("n", "n-1"),
    (r"\text{east}", r"\text{west}"), ("even", "neve"), (r"1+\sqrt5", r"1\pm\sqrt5"), ("3+i", "3-i"), ("-42", "42"), ("", "42"), ("42", "4,2"),
    (r"\begin{pmatrix} 1 & 2 \\ 3 & 4 \end{pmatrix}", r"\begin{pmatrix} 1 & 3 \\ 2 & 4 \end{pmatrix}"), ("f(x)=x", "f(x)=-x"), (r"\frac{1}{0}", r"\frac{2}{0}"),
    (r"x \in [1,2]", "x=1,2"), (r"(-\infty,-1)\cup(2,\infty)", r"(-\infty,-1)\cup(3,\infty)"), (r"\infty", r"-\infty"), ("1/10", "10"), ("14,0000", "14,000"), ("14, 0", "14,000"), (r"90\%", r"90^\circ"), (r"\lfloor p/10 \rfloor", r"\lfloor p/9 \rfloor"),
]  # fmt: skip


@pytest.mark.parametrize(("answer", "gold"), SAME)
def test_right_answers_are_not_missed(answer: str, gold: str) -> None:
    """Cases E7, E9: false negatives."""
    assert equivalent(answer, gold)


@pytest.mark.parametrize(("answer", "gold"), DIFFERENT)
def test_wrong_answers_are_not_taken(answer: str, gold: str) -> None:
    """Case E9: false positives."""
    assert not equivalent(answer, gold)
