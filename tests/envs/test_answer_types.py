r"""Answers as typed values: what earns without a solution, and honest forms (cases I1-I6, I8-I10)."""

from __future__ import annotations

import random

import pytest

from envs.python_tir.grading.equivalence import equivalent
from envs.python_tir.grading.python_notation import to_latex

GOLDS = [
    "42",
    r"\frac12",
    r"\sqrt2",
    "3+4i",
    r"5\text{ cm}",
    r"90^\circ",
    "x=42",
    "B",
    "x^2+1",
    "42\\%",
    "(1,2)",
    "x<3",
]


def pairs(table: str) -> list[tuple[str, str]]:
    """Read lines of `answer ~ gold`."""
    rows = [line.partition("~") for line in table.splitlines() if line.strip()]
    return [(answer.strip(), gold.strip()) for answer, _, gold in rows]


UNIVERSAL = [
    r"-\infty x",
    r"\infty",
    r"-\infty",
    r"\infty+x",
    r"\frac{1}{0}",
    r"\frac00",
    r"\infty-\infty",
    "oo",
    "nan",
    r"x\cdot\infty",
    r"\frac{x}{0}",
    r"e^{\infty}",
    r"\infty i",
    "zoo",
    r"\lim_{n\to\infty} n",
    r"\sqrt{\infty}",
]


@pytest.mark.parametrize("gold", GOLDS)
@pytest.mark.parametrize("answer", UNIVERSAL)
def test_what_is_not_finite_equals_no_finite_gold(answer: str, gold: str) -> None:
    """Case I1."""
    assert not equivalent(answer, gold)


@pytest.mark.parametrize(
    ("answer", "gold", "same"),
    [
        (r"\infty", r"\infty", True),
        (r"+\infty", r"\infty", True),
        ("oo", r"\infty", True),
        (r"-\infty", r"\infty", False),
        (r"-\infty", r"-\infty", True),
        (r"2\infty", r"\infty", False),
        (r"\infty x", r"\infty", False),
        ("42", r"\infty", False),
    ],
)
def test_an_infinity_equals_itself(answer: str, gold: str, same: bool) -> None:
    assert equivalent(answer, gold) is same


NOTHING_ADDED = [
    "{v}+0x",
    r"{v}*\pi/\pi",
    "{v}*e^0",
    "{v}+0i",
    "{v}+x-x",
    "{v}*i^4",
    r"{v}+\alpha-\alpha",
    r"{v}\cdot\frac yy",
    r"{v}+\sin^2 t+\cos^2 t-1",
    r"{v}^{z^0}",
    r"{v}\cdot|i|",
    r"{v}+\ln e-1",
    r"-{v}e^{i\pi}",
    "{v}+0*k",
]


@pytest.mark.parametrize("form", NOTHING_ADDED)
@pytest.mark.parametrize("gold", ["42", r"\frac{3}{7}", r"2\sqrt{5}", "n^2+n", r"42\text{ cm}", "17%"])
def test_no_symbol_that_the_gold_lacks_even_one_that_cancels(form: str, gold: str) -> None:
    """Case I2."""
    value = gold.replace(r"\text{ cm}", "").replace("%", "")
    assert not equivalent(form.replace("{v}", f"({value})"), gold)
    assert not equivalent(form.replace("{v}", value), gold)


@pytest.mark.parametrize("seed", range(12))
def test_the_prompt_is_no_answer(seed: int) -> None:
    """Case I2: arithmetic with symbols that cancel, over seeded numbers, in both kinds of source."""
    rng = random.Random(seed)
    a, b = rng.randint(2, 99), rng.randint(2, 99)
    operator, value = rng.choice([("+", a + b), ("*", a * b), ("-", a - b)])
    asked = f"{a}{operator}{b}"
    for tail in ("", "+x-x", "+0", "*1", "+0i", r"\cdot\pi/\pi", r"\%"):
        assert not equivalent(asked + tail, str(value))
        assert not equivalent(asked + tail, str(value), form="number")
        assert not equivalent(f"x={asked}{tail}", f"x={value}")


FORMS_OF_NUMBER = pairs(r"""
42 ~ 42
42.0 ~ 42
x = 42 ~ 42
4.2\times10^1 ~ 42
4.2e1 ~ 42
42\text{ apples} ~ 42
1{,}234 ~ 1234
-3/4 ~ -\frac34
0.75 ~ \frac34
1\frac34 ~ 1.75
42\% ~ 42\%
0.42 ~ 42\%
""")


@pytest.mark.parametrize(("answer", "gold"), FORMS_OF_NUMBER)
def test_literal_numbers_answer_arithmetic(answer: str, gold: str) -> None:
    """Case I2: integer, decimal, fraction, mixed number, percent, scientific."""
    assert equivalent(answer, gold, form="number")


@pytest.mark.parametrize(
    "answer",
    [
        "6*7",
        r"6\cdot7",
        "84/2",
        r"\frac{84}{2}",
        r"\sqrt{1764}",
        "40+2",
        r"\binom{9}{5}\div3",
        "x=6*7",
        "6*7=42",
        r"\begin{vmatrix}6&0\\0&7\end{vmatrix}",
        "42^1",
        r"6*7\%",
    ],
)
def test_nothing_but_a_literal_answers_arithmetic(answer: str) -> None:
    assert not equivalent(answer, "42", form="number")


WRONG = r"""
6*7*i^4 ~ 42
\begin{vmatrix}6&0\\0&7\end{vmatrix} ~ 42
6\cdot7\% ~ 42\%
\binom72+x-x ~ 42
35 hours ~ 3.5 hours
125\text{ cm} ~ 12.5\text{ cm}
1050 dollars ~ 10.50 dollars
5\text{ ways} ~ 5!\text{ ways}
12:3 ~ 1:23
12:3 \text{ PM} ~ 1:23 \text{ PM}
1.5 \text{ of the zorks} ~ 15 \text{ of the zorks}
42 thousand ~ 42
3\text{ million} ~ 3
42\text{ plus one} ~ 42
3\text{ factorial} ~ 3
3\text{ factorial} ~ 6
42 wrong ~ 42
42 \text{ squared} ~ 42
42\text{ zorks} ~ 42
\text{not }42 ~ 42
\text{The answer is not }42 ~ 42
5 pears ~ 5 zorks
|x| ~ x
\sqrt{x^2} ~ x
e^{\ln x} ~ x
(\sqrt{x})^2 ~ x
\sqrt[4]{x^4} ~ x
\sin(\arcsin x) ~ x
\sqrt{x^2+2x+1} ~ x+1
|n-3| ~ n-3
2x=42 ~ 42
x^2=42 ~ 42
41=42 ~ 42
42=41 ~ 42
-x=42 ~ 42
x+1=42 ~ 42
xy=42 ~ 42
\ln x=42 ~ 42
x=6*7 ~ x=42
2x=84 ~ x=42
x=41=42 ~ 42
x^2<9 ~ (-3,3)
2x<6 ~ x<3
x<1+2 ~ x<3
x<3+y-y ~ x<3
(1+1,5) ~ (2,5)
[1+1,5) ~ [2,5)
B+0 ~ B
A ~ B
\frac{1}{x} \cdot x ~ 1
2*sin(x) ~ sin(2*x)
]1,2] ~ [1,2]
2n\pi, n\in\mathbb Z ~ n\pi, n\in\mathbb Z
2 hours 30 minutes ~ 2.3 hours
0.\overline{3} ~ 0.3
1\,23 ~ 123
42个 ~ 43
42万 ~ 42
\frac12\begin{pmatrix}1&2\\3&4\end{pmatrix} ~ \begin{pmatrix}1&2\\3&4\end{pmatrix}
42_5 ~ 42
(A)(B) ~ A
(A) or (B) ~ A
(A) is wrong ~ A
2^{42}=42 ~ 42
90^\circ C ~ 90\%
"""


@pytest.mark.parametrize(("answer", "gold"), pairs(WRONG))
def test_what_is_no_solution_is_refused(answer: str, gold: str) -> None:
    """Cases I2, I4, I5, I6 and their siblings."""
    assert not equivalent(answer, gold)


RIGHT = r"""
3\text{ million} ~ 3000000
3 million dollars ~ \$3000000
\$3 million ~ 3{,}000{,}000
42 thousand ~ 42000
2 dozen ~ 24
3.50 hours ~ 3.5 hours
5 zorks ~ 5 zorks
5 ~ 5 zorks
-1 + exp(16) ~ e^{16}-1
e^{16}-1 ~ -1 + exp(16)
cos(pi/7) ~ \cos\frac{\pi}{7}
\cos\frac{\pi}{7} ~ cos(pi/7)
2cos(pi/7) ~ 2\cos\frac{\pi}{7}
asin(x) ~ \arcsin x
\arcsin x ~ asin(x)
\operatorname{arcsin} x ~ \arcsin x
Abs(x) ~ |x|
|x| ~ Abs(x)
\left|x\right| ~ Abs(x)
\lvert x \rvert ~ |x|
sqrt(2)/2 ~ \frac{\sqrt2}{2}
3 + 4*I ~ 3+4i
(3+4j) ~ 3+4i
x**2 + 2*x + 1 ~ (x+1)^2
Rational(1, 2) ~ \frac12
Matrix([[1, 2], [3, 4]]) ~ \begin{pmatrix}1&2\\3&4\end{pmatrix}
log(2) ~ \ln 2
\ln 2 ~ log(2)
factorial(20) ~ 20!
binomial(2*n, n) ~ \binom{2n}{n}
Interval.open(1, 2) ~ (1,2)
Interval(1, oo) ~ [1,\infty)
{1, 2, 3} ~ \{1,2,3\}
sin(2*x) ~ \sin 2x
\left[\begin{matrix}1 & 2\\3 & 4\end{matrix}\right] ~ \begin{pmatrix}1&2\\3&4\end{pmatrix}
\left(\begin{array}{ l l }1&2\\3&4\end{array}\right) ~ \begin{pmatrix}1&2\\3&4\end{pmatrix}
\begin{bmatrix}1&2\\3&4\\\end{bmatrix} ~ \begin{pmatrix}1&2\\3&4\end{pmatrix}
\begin{bmatrix}1&2\\3&4\\ \end{bmatrix} ~ \begin{pmatrix}1&2\\3&4\end{pmatrix}
\frac12\begin{pmatrix}1&2\\3&4\end{pmatrix} ~ \begin{pmatrix}\frac12&1\\\frac32&2\end{pmatrix}
\begin{pmatrix}1/2&1\\3/2&2\end{pmatrix} ~ \frac12\begin{pmatrix}1&2\\3&4\end{pmatrix}
-\begin{pmatrix}1\\2\end{pmatrix} ~ \begin{pmatrix}-1\\-2\end{pmatrix}
1\,234\,567 ~ 1234567
0.\overline{3} ~ \frac13
0.1\overline{6} ~ \frac16
\textcolor{red}{42} ~ 42
{\color{red}42} ~ 42
**42** ~ 42
`42` ~ 42
42个 ~ 42
42元 ~ 42
42\text{ 米} ~ 42
4200厘米 ~ 42米
3万 ~ 30000
\text{The area is }42 ~ 42
The final answer is: 42 ~ 42
\text{The answer is }276,000 ~ 276,000
21 = x ~ 21
21 = x ~ x=21
]1,2] ~ (1,2]
[1,2[ ~ [1,2)
\{x\mid x>3\} ~ (3,\infty)
\{x \in \mathbb{R} : x>3\} ~ x>3
2n\pi, n\in\mathbb Z ~ 2\pi k, k\in\mathbb Z
2 hours 30 minutes ~ 2.5 hours
2\text{ hours }30\text{ minutes} ~ 150\text{ minutes}
1 hour and 30 minutes ~ 1.5 hours
5 feet 6 inches ~ 66 inches
2小时30分钟 ~ 2.5小时
25^\circ\text{C} ~ 25
\underline{42} ~ 42
{\bf 42} ~ 42
1 234 567 ~ 1234567
\{2n\pi \mid n\in\mathbb{Z}\} ~ 2k\pi, k\in\mathbb{Z}
x = k\pi \text{ for } k\in\mathbb{Z} ~ x = n\pi, n \in \mathbb{Z}
\sin A = \frac35 ~ \frac35
(A)\ 42 ~ A
\sqrt{a}\sqrt{b} ~ \sqrt{ab}
\ln(a^2) ~ 2\ln a
\frac{n(n-1)}{2} ~ \binom n2
x\sqrt{x} ~ \sqrt{x^3}
"""


@pytest.mark.parametrize(("answer", "gold"), pairs(RIGHT))
def test_honest_forms_are_taken(answer: str, gold: str) -> None:
    """Cases I5, I8, I9, I10 and their siblings."""
    assert equivalent(answer, gold)


@pytest.mark.parametrize(
    "text", ["42", "6*7", r"\frac12", "__import__('os')", "f(x", "x", "2x**", "a.b(3)", "sqrt(x)(2)", "lambda: 3"]
)
def test_what_is_no_python_stays_as_it_is(text: str) -> None:
    assert to_latex(text) == text


def test_python_is_read_and_never_run() -> None:
    assert to_latex("exp(__import__('os').getpid())") == "exp(__import__('os').getpid())"
    assert not equivalent("exp(open('x'))+42", "42")
