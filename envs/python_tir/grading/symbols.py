r"""Which symbols stand in a normalised answer as it was written, before anything cancels.

symbols(r"6*7+0x")         # {"x"}
symbols(r"42 e^0 \pi/\pi") # {"e", "pi"}
"""

from __future__ import annotations

import re

# Commands that are structure, operations or named functions. Every other command is a symbol: \alpha, \ell, \hbar.
_NO_SYMBOLS_TEXT = """
frac sqrt binom cdot times div pm mp le ge ne lt gt in cup cap setminus and or mid ldots text begin end newline
sin cos tan cot sec csc arcsin arccos arctan arccot arcsec arccsc sinh cosh tanh coth arsinh arcosh artanh ln
log max min gcd lcm lfloor rfloor lceil rceil langle rangle lvert rvert vert overline bar circ infty angle mod
bmod pmod left right mathbb emptyset approx equiv sum prod int lim to quad qquad degree operatorname euro pounds
yen
"""
_NO_SYMBOLS = frozenset(_NO_SYMBOLS_TEXT.split())
_TOKEN = re.compile(r"\\(?:text|begin|end|mathbb)\s*\{[^{}]*\}|\\([A-Za-z]+)|([A-Za-z])")


def symbols(normal: str) -> frozenset[str]:
    r"""The letters and symbol commands in a normalised answer; `pi`, `e` and `i` are among them, `\exp` counts as `e`.

    Words in `\text{}` and the letters of environments are none.
    """
    found: set[str] = set()
    for match in _TOKEN.finditer(normal):
        command, letter = match.groups()
        if letter is not None:
            found.add(letter)
        elif command is not None and command not in _NO_SYMBOLS:
            found.add("e" if command == "exp" else command)
    return frozenset(found)


def adds_none(answer: str, gold: str) -> bool:
    """Whether every symbol of the answer stands in the gold too. Degrees in the gold allow pi."""
    allowed = symbols(gold)
    return symbols(answer) <= (allowed | {"pi"} if r"^\circ" in gold else allowed)
