"""What counts as the same answer (cases E7 and E9, and their siblings)."""

from __future__ import annotations

import contextlib

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from envs.python_tir.grading.equivalence import equivalent


def pairs(table: str) -> list[tuple[str, str]]:
    """Read lines of `answer ~ gold`."""
    rows = [line.partition("~") for line in table.splitlines() if line.strip()]
    return [(answer.strip(), gold.strip()) for answer, _, gold in rows]


E7_SAME = r"""
0.5 ~ 1/2
\frac12 ~ 0.5
1/2 ~ \frac{1}{2}
10\% ~ 10
10\% ~ 0.1
0.1 ~ 10\%
10% ~ \frac{1}{10}
10,080 ~ 10080
10,\!080 ~ 10080
1{,}234.5 ~ 1234.5
42. ~ 42
\text{42} ~ 42
5\text{ cm} ~ 5
5 ~ 5 \text{ cm}
5 cm ~ 5\text{ cm}
$36 ~ \$36
36 dollars ~ \$36
90^\circ ~ 90
90 degrees ~ 90^{\circ}
18 apples ~ 18
x = 42 ~ 42
m+n = 42 ~ 42
\frac{84}{2} = 42 ~ 42
\frac{84}{2} ~ 42
84/2 ~ 42
\dfrac{3}{4} ~ 0.75
-3/4 ~ -\tfrac34
1\frac45 ~ \frac95
1 4/5 ~ 1.8
137 \frac{1}{2} ~ 137.5
500 cm ~ 5 m
"""

E9_SAME = r"""
(-\infty,3) ~ x<3
x<3 ~ (-\infty,3)
3>x ~ x<3
x \in (-\infty, 3) ~ x<3
1e-3 ~ 0.001
0.001 ~ 1e-3
10^{-3} ~ 1e-3
1\times 10^{-3} ~ 1e-3
\sqrt{17} ~ \sqrt{17}
\sqrt{68}/2 ~ \sqrt{17}
B ~ B
\text{B} ~ B
(B) ~ B
\textbf{(B)} ~ B
1331, 1728 ~ 1331 and 1728
1728 \text{ and } 1331 ~ 1331 and 1728
\{1331, 1728\} ~ 1331 and 1728
6x-2y+26=0 ~ 3x-y+13=0
y=3x+13 ~ 3x-y+13=0
\frac{1}{2005! \cdot 2006} ~ \frac{1}{2006!}
"""

SIBLINGS_SAME = r"""
\text{(C) } 42 ~ \text{(C)}
0<x<36, x\ne 9 ~ (0,9) \cup (9,36)
n \text{ odd} ~ odd $n$
\mathbb{Z}^+ ~ All positive integers
\text{The answer is } 42 ~ 42
6\text{ units}^2 ~ 6
2\pi r h ~ 2\pi hr
7:30 \text{ PM} ~ 7:30 pm
2^{10} ~ 1024
3/6 ~ 1/2
6 \cdot 7 ~ 7 \cdot 6
0<c<1 ~ (0,1)
0<k\le\frac49 ~ (0,\frac{4}{9}]
x<-1 \text{ or } x>2 ~ (-\infty,-1)\cup(2,\infty)
(2,\infty)\cup(-\infty,-1) ~ (-\infty,-1)\cup(2,\infty)
x\ge -1.2 ~ x\geq-\frac{6}{5}
\mathbb{R}\setminus\{3\} ~ (-\infty,3)\cup(3,\infty)
x \neq 3 ~ (-\infty,3)\cup(3,\infty)
1\pm\sqrt5,-2 ~ \{1+\sqrt{5}, 1-\sqrt{5}, -2\}
x=\pm 2 ~ 2, -2
x=1 or x=2 ~ 1,2
\left( 3, \frac{\pi}{2} \right) ~ (3,\pi/2)
3, 5 ~ (3,5)
(3, 5) ~ (3,5)
[3,5,7] ~ 3, 5, 7
(1,2),(3,4) ~ (3,4), (1,2)
f(t)=t^2-t ~ f(x) = x^2 - x
x^2-x ~ f(x) = x^2 - x
P(x)=x+1 \text{ or } P(x)=-1 ~ P(x)=-1, P(x)=x+1
\begin{bmatrix} 1 \\ 0.5 \end{bmatrix} ~ \begin{pmatrix} 1 \\ 1/2 \end{pmatrix}
(1, 0.5) ~ \begin{pmatrix} 1 \\ 1/2 \end{pmatrix}
52 ~ 52_8
52_{8} ~ 52_8
(1+i)^2 ~ 2i
(n+1)(n+2) ~ n^2+3n+2
\frac{\sqrt3}{3} ~ \frac{1}{\sqrt{3}}
2*x**2 ~ 2x^2
sqrt(2)/2 ~ \frac{\sqrt{2}}{2}
0.333333 ~ \frac13
2^{2024}+1 ~ 1+2^{2024}
\text{evelyn} ~ \text{Evelyn}
east ~ \text{east}
All positive integers ~ all positive integers.
no solution ~ \text{No solutions}
\emptyset ~ no solutions
\frac{\pi}{2} ~ 90^\circ
\sqrt{51} ~ $\sqrt 51$
R+r ~ r+R
100, 200 ~ 200,100
½ ~ 0.5
n \ge 3 \text{ and } n=1 ~ n=1, n \ge 3
x>1 \text{ and } x<2 ~ (1,2)
3√2 ~ 3\sqrt{2}
"""

E9_DIFFERENT = r"""
5 m ~ 5 cm
5\text{ m} ~ 5\text{ cm}
\frac{1}{2004!} ~ \frac{1}{2006!}
1/2004! ~ 1/2006!
3x+4y+14=0 ~ 3x-y+13=0
3x-y+13=0 ~ 3x+4y+14=0
1728 ~ 1331 and 1728
1331 ~ 1331 and 1728
1331 and 1728 ~ 1728
"""

SIBLINGS_DIFFERENT = r"""
\sin^2 x + \cos^2 x ~ 1
42 \text{ or } 43 ~ 42
42\text{ or 43} ~ 42
42 \text{ is not it} ~ 42
\pm 42 ~ 42
42 = 41 ~ 42
42, 42 ~ 42
6*7 ~ 42
6 \cdot 7 ~ 42
6 \cdot 7 = 42 ~ 42
40+2 ~ 42
\binom{7}{2}\cdot 2 ~ 42
\sum_{n=1}^{6} 2n ~ 42
1-\frac{1}{2} ~ \frac{1}{2}
R\text{ cm} ~ r\text{ cm}
1 if even, 2 if odd ~ 2 if even, 1 if odd
(D) 42 ~ \text{(C)}
T(p,q)=7 if (p,q)=(0,0), p+q otherwise ~ T(p,q)=0 if (p,q)=(0,0), p+q otherwise
5 cm ~ 5\text{ cm}^2
5 apples ~ 5 pears
5 hours ~ 5 minutes
\$5 ~ 5 euros
1\% ~ 0.1
0.1\% ~ 0.1\%\cdot 10
(-\infty,3] ~ x<3
x>3 ~ x<3
y<3 ~ x<3
(3,\infty) ~ x<3
3 ~ x<3
x=3 ~ x<3
1e-3 ~ 0.01
1e3 ~ e-3
A ~ B
b ~ B
\sqrt{71} ~ \sqrt{17}
3x-y=0 ~ 3x-y+13=0
0 ~ 3x-y+13=0
x^2-4=0 ~ 0
x=5 ~ y=5
(2,1) ~ (1,2)
\{1,2\} ~ (1,2)
[1,2] ~ (1,2)
(1,2) ~ [1,2)
1,2,3 ~ 1,2
1,1,2 ~ 1,2,2
1,2 ~ 12
1 2 ~ 12
1 1/2 ~ 11/2
r^2 ~ R^2
R-r ~ 0
r-r ~ R-r
52_9 ~ 52_8
2^{2024} ~ 2^{2024}+1
10^{100} ~ \sqrt{10^{200}+1}
1.41 ~ \sqrt{2}
0.33 ~ \frac13
1234567.01 ~ 1234567
41.999999 ~ 42
x ~ y
n ~ n-1
\text{east} ~ \text{west}
even ~ neve
1+\sqrt5 ~ 1\pm\sqrt5
3+i ~ 3-i
-42 ~ 42
~ 42
42 ~ 4,2
\begin{pmatrix} 1 & 2 \\ 3 & 4 \end{pmatrix} ~ \begin{pmatrix} 1 & 3 \\ 2 & 4 \end{pmatrix}
f(x)=x ~ f(x)=-x
\frac{1}{0} ~ \frac{2}{0}
x \in [1,2] ~ x=1,2
(-\infty,-1)\cup(2,\infty) ~ (-\infty,-1)\cup(3,\infty)
\infty ~ -\infty
1/10 ~ 10
14,0000 ~ 14,000
14, 0 ~ 14,000
90\% ~ 90^\circ
\lfloor p/10 \rfloor ~ \lfloor p/9 \rfloor
"""


@pytest.mark.parametrize(("answer", "gold"), pairs(E7_SAME + E9_SAME + SIBLINGS_SAME))
def test_right_answers_are_not_missed(answer: str, gold: str) -> None:
    """Cases E7, E9: false negatives."""
    assert equivalent(answer, gold)


@pytest.mark.parametrize(("answer", "gold"), pairs(E9_DIFFERENT + SIBLINGS_DIFFERENT))
def test_wrong_answers_are_not_taken(answer: str, gold: str) -> None:
    """Case E9: false positives."""
    assert not equivalent(answer, gold)


integers = st.integers(-(10**9), 10**9)
slow = settings(deadline=None, max_examples=40)


@slow
@given(top=integers, bottom=st.integers(1, 10**6))
def test_a_fraction_is_itself_in_every_notation(top: int, bottom: int) -> None:
    sign, size = ("-" if top < 0 else ""), abs(top)
    forms = [
        rf"\frac{{{top}}}{{{bottom}}}",
        f"{top}/{bottom}",
        rf"{sign}\dfrac{{{size}}}{{{bottom}}}",
        f"{3 * top}/{3 * bottom}",
    ]
    for form in forms:
        assert equivalent(form, forms[0])
        assert not equivalent(form, rf"\frac{{{top + 1}}}{{{bottom}}}")


@slow
@given(left=integers, right=integers)
def test_integers_are_equal_only_to_themselves(left: int, right: int) -> None:
    assert equivalent(str(left), f"{right:,}") == (left == right)
    assert equivalent(f"{left}.0", str(left))


@slow
@given(members=st.lists(st.integers(-500, 500), min_size=2, max_size=6, unique=True), data=st.data())
def test_lists_need_every_member_in_any_order(members: list[int], data: st.DataObject) -> None:
    shuffled = data.draw(st.permutations(members))
    gold = ", ".join(map(str, members))
    assert equivalent(rf"\{{{', '.join(map(str, shuffled))}\}}", gold)
    assert not equivalent(", ".join(map(str, shuffled[1:])), gold)
    if shuffled != members:
        assert not equivalent(f"({', '.join(map(str, shuffled))})", f"({gold})")


@slow
@given(low=st.integers(-99, 99), width=st.integers(1, 99), left=st.booleans(), right=st.booleans(), flip=st.booleans())
def test_inequalities_are_intervals(low: int, width: int, left: bool, right: bool, flip: bool) -> None:
    high = low + width
    interval = f"{'[' if left else '('}{low}, {high}{']' if right else ')'}"
    chain = f"{low} {'<=' if left else '<'} x {'<=' if right else '<'} {high}"
    if flip:
        chain = f"{high} {'>=' if right else '>'} x {'>=' if left else '>'} {low}"
    assert equivalent(chain, interval)
    assert equivalent(interval, chain)
    assert not equivalent(chain, f"({low - 1}, {low + width})")


@slow
@given(answer=st.text(alphabet="0123x+-/(){}[],=<>\\ .%$frac", max_size=25))
def test_any_text_gets_a_verdict(answer: str) -> None:
    with contextlib.suppress(RecursionError, MemoryError, OverflowError):  # the worker's business
        assert equivalent(answer, "42") in (True, False)
