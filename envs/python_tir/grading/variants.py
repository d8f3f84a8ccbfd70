r"""Right and wrong ways to write a gold answer, for measuring a grader: text in, text out.

Each function returns None where its form makes no sense for the answer (no thousands in a word). The random choices
come from the generator that is passed in, so a check can be repeated.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Sequence
from fractions import Fraction

Right = Callable[[str], str | None]
Wrong = Callable[[str, random.Random, Sequence[str]], str | None]

_INTEGER = re.compile(r"[+-]?\d+")
_FRACTION = re.compile(r"(-?)\\[dt]?frac\{(\d+)\}\{(\d+)\}|(-?)(\d+)/(\d+)")
_WORDS = re.compile(r"(?<![\\A-Za-z{])[A-Za-z]{4,}|\\text|\\mbox")
_LIST = re.compile(r"[^()\[\]{}=<>\\]*(?:\\(?:frac|sqrt|pi)[^,()\[\]=<>]*)*(?:,[^()\[\]=<>]+)+")


def bare(gold: str) -> str:
    """Drop the dollar signs around a gold answer, and a final full stop."""
    text = gold.strip().rstrip(".").strip()
    return text[1:-1].strip() if re.fullmatch(r"\$[^$]*\$", text) and not text.endswith("\\$") else text


def simple_value(gold: str) -> Fraction | None:
    """The value of an integer, decimal or fraction as text; None for anything else."""
    text = bare(gold).replace(",\\!", "").replace(" ", "")
    match = _FRACTION.fullmatch(text)
    if match is not None:
        sign, top, bottom = match.group(1, 2, 3) if match.group(2) else match.group(4, 5, 6)
        return Fraction(int(sign + top), int(bottom)) if int(bottom) else None
    text = re.sub(r"(?<=\d),(?=\d{3}(?!\d))", "", text)
    return Fraction(text) if re.fullmatch(r"-?(?:\d+\.?\d*|\.\d+)", text) else None


def has_words(gold: str) -> bool:
    """Whether the answer is partly or wholly prose."""
    return _WORDS.search(re.sub(r"\\text\{\s*(?:and|or)\s*\}", "", bare(gold))) is not None


# ------------------------------------------------------------------------------------------------ right forms


def boxed(gold: str) -> str | None:
    r"""The answer as it stands: `\boxed{gold}`."""
    return rf"\boxed{{{gold.strip()}}}"


def in_prose(gold: str) -> str | None:
    """At the end of an argument that boxed something else first, with prose after it."""
    return (
        "Let me check. A first guess is \\boxed{0}, but $\\{x : x > 0\\}$ excludes it.\n"
        f"**Final answer.** Therefore $$\\boxed{{\\ {bare(gold)}. }}$$ as we wanted {{to show}}."
    )


def in_delimiters(gold: str) -> str | None:
    r"""Math delimiters inside the box: `\(\displaystyle ...\)`; for prose, `\text{...}` around it."""
    text = bare(gold)
    if "$" in text.replace("\\$", ""):
        return rf"\[\fbox{{{gold.strip()}}}\]"
    if has_words(gold) and re.fullmatch(r"[A-Za-z ,.0-9]+", text):
        return rf"\[\boxed{{\text{{{text}}}}}\]"
    return rf"\[\boxed{{\(\displaystyle {text}\)}}\]"


def typeset(gold: str) -> str | None:
    r"""Other commands with the same look: `\dfrac`, `\left( \right)`, `\leq`, `^{\circ}`, thin spaces."""
    text = re.sub(r"\\[dt]?frac(?![A-Za-z])", r"\\dfrac", gold.strip())
    text = (
        re.sub(r"(?<![\\A-Za-z])-?(?<!\d)(\d+)/(\d+)(?![\d!])", r"\\tfrac{\1}{\2}", text) if "-" not in text else text
    )
    text = re.sub(r"(?<!\\)(?<!left)(?<!sqrt)([(])", r"\\left\1", text)
    text = re.sub(r"(?<!\\)(?<!right)([)])", r"\\right\1", text)
    text = re.sub(r"\\le(?:q)?(?![A-Za-z])", r"\\leqslant ", text)
    text = re.sub(r"\^\\circ", r"^{\\circ}", text)
    return rf"\boxed{{\,{text}\,}}"


def rewritten(gold: str) -> str | None:
    """The same value in another notation: separators, decimals, slashes, another order, a name in front."""
    text = bare(gold)
    value = simple_value(gold)
    if value is not None:
        if value.denominator > 1:
            places = next((p for p in range(1, 8) if (value * 10**p).denominator == 1), None)
            slash = rf"{value.numerator}/{value.denominator}"
            return rf"\boxed{{{slash if places is None or '.' in text else f'{float(value):.{places}f}'}}}"
        number = int(value)
        return rf"\boxed{{{f'{number:,}' if abs(number) >= 1000 else f'{number}.0'}}}"
    if has_words(gold):
        louder = re.sub(r"[A-Za-z]{2,}", lambda word: word.group().upper(), text)  # single letters are variables
        return rf"\boxed{{{louder}}}" if re.fullmatch(r"[A-Za-z ]+", text) else None
    members = split_list(text)
    if members is not None:
        return rf"\boxed{{{', '.join(members[:0:-1])} \text{{ and }} {members[0]}}}"
    if re.search(r"[=<>,$]|\\(?:in|le|ge|leq|geq|pm|cup|ne|begin|ldots|mathbb)(?![A-Za-z])|^\(?[A-Z]\)?$", text):
        return None
    return rf"\boxed{{A = {text}}}"


def as_printed(gold: str) -> str | None:
    """As Python and sympy print it: `Rational(1, 2)`, `3*sqrt(5)`, `-sqrt(2)/2`, `2*pi/3`, `Matrix([[1], [2]])`."""
    text = bare(gold).replace(" ", "")
    value = simple_value(gold)
    if value is not None:
        return rf"\boxed{{Rational({value.numerator}, {value.denominator})}}" if value.denominator > 1 else None
    matrix = re.fullmatch(r"\\begin\{[pb]matrix\}([-\d&\\]+)\\end\{[pb]matrix\}", text)
    if matrix is not None:
        rows = [row.split("&") for row in matrix.group(1).split("\\\\") if row]
        return rf"\boxed{{Matrix([{', '.join('[' + ', '.join(row) + ']' for row in rows)}])}}"
    match = re.fullmatch(r"(-?)(?:\\[dt]?frac\{)?(\d*)(?:\\sqrt\{(\d+)\}|(\\pi))(?:\}\{(\d+)\})?", text)
    if match is None or ("frac" in text) != (match.group(5) is not None):
        return None
    sign, factor, root, _, below = match.groups()
    printed = f"{sign}{factor + '*' if factor else ''}{f'sqrt({root})' if root else 'pi'}{'/' + below if below else ''}"
    return rf"\boxed{{{printed}}}"


def dressed(gold: str) -> str | None:
    r"""In a colour, in bold, or after `\text{The answer is }`."""
    text = bare(gold)
    if "$" in text or has_words(gold):
        return None
    if simple_value(gold) is not None:
        return rf"\boxed{{\text{{The answer is }}{text}}}" if len(text) % 2 else rf"\boxed{{**{text}**}}"
    return rf"\boxed{{\textcolor{{blue}}{{{text}}}}}"


def in_other_brackets(gold: str) -> str | None:
    r"""Several boxes for a list, `21 = x`, thin spaces, `]1,2]`, sympy's own matrices."""
    text = bare(gold)
    members = split_list(text)
    if members is not None and len(set(members)) == len(members) and not re.search(r"[={}]|\\(?:pm|ldots)", text):
        boxes = [rf"$\boxed{{{member}}}$" for member in members]
        return f"They are {', '.join(boxes)}."
    value = simple_value(gold)
    if value is not None and value.denominator == 1:
        grouped = f"{int(value):,}".replace(",", r"\,")
        return rf"\boxed{{{grouped} = x}}"
    matrix = re.sub(r"\\(begin|end)\{[pb]matrix\}", r"\\\1{matrix}", text)
    if matrix != text and text.startswith(r"\begin"):
        return rf"\boxed{{\left[{matrix}\right]}}"
    half_open = re.fullmatch(r"\((-?\d+),\s*(-?\d+)\]", text)
    return rf"\boxed{{]{half_open.group(1)}, {half_open.group(2)}]}}" if half_open is not None else None


RIGHT: dict[str, Right] = {
    "boxed": boxed,
    "in prose": in_prose,
    "in delimiters": in_delimiters,
    "typeset": typeset,
    "rewritten": rewritten,
    "as printed": as_printed,
    "dressed": dressed,
    "other brackets": in_other_brackets,
}


# ---------------------------------------------------------------------------------------------- wrong variants


def split_list(text: str) -> list[str] | None:
    """The members of a bare comma list; None for a number with separators, a tuple, a word."""
    if simple_value(text) is not None or has_words(text) or "," not in text:
        return None
    depth, members, current = 0, [], ""
    for char in text:
        depth += (char in "([{") - (char in ")]}")
        if char == "," and depth == 0:
            members.append(current.strip())
            current = ""
        else:
            current += char
    members.append(current.strip())
    return members if len(members) > 1 and all(members) and "\\!" not in text else None


def _replace_run(text: str, match: re.Match[str], new: str) -> str:
    return text[: match.start()] + new + text[match.end() :]


def off_by_one(gold: str, rng: random.Random, others: Sequence[str]) -> str | None:
    """The last integer in the answer plus one; without any, the answer plus one."""
    text = bare(gold)
    runs = list(re.finditer(r"\d+", text))
    if not runs:
        return f"not {text}" if has_words(gold) or re.fullmatch(r"\(?[A-Z]\)?", text) else f"{text}+1"
    return _replace_run(text, runs[-1], str(int(runs[-1].group()) + 1).zfill(len(runs[-1].group())))


def sign_flipped(gold: str, rng: random.Random, others: Sequence[str]) -> str | None:
    """The sign of the answer, or of the first member, or of the right side, changed."""
    text = bare(gold)
    if has_words(gold) or simple_value(gold) == 0 or re.fullmatch(r"\(?[A-Z]\)?", text):
        return None
    head, equals, tail = text.rpartition("=")
    if equals and tail.strip() not in ("0", "") and "," not in text:
        return f"{head}=-({tail})"
    if re.search(r"[=<>,]|\\(?:in|le|ge|leq|geq|pm|cup|ne|begin|ldots|mathbb)(?![A-Za-z])", text) and is_no_number(
        text
    ):
        runs = [run for run in re.finditer(r"(-\s*)?(?<![_\d.])(\d+)", text) if int(run.group(2))]
        if not runs:
            return None
        return _replace_run(text, runs[0], ("+" if runs[0].group(1) else "-") + runs[0].group(2))
    if text.startswith("-") and not re.search(r"[+-]", text[1:]):
        return text[1:]
    unit = re.search(r"(\\(?:text|mbox)\{[^{}]*\}.*|\\%|\^\\circ)$", text)
    body, tail = (text[: unit.start()], unit.group()) if unit else (text, "")
    return f"-({body}){tail}" if not re.fullmatch(r"[\d.,]+", body) else f"-{body}{tail}"


def is_no_number(text: str) -> bool:
    """Whether the text is no plain number."""
    return simple_value(text) is None


def digit_changed(gold: str, rng: random.Random, others: Sequence[str]) -> str | None:
    """One digit replaced by another; without digits, one letter."""
    text = bare(gold)
    digits = [index for index, char in enumerate(text) if char.isdigit()]
    if digits:
        at = rng.choice(digits)
        new = rng.choice([d for d in "123456789" if d != text[at]])
        return text[:at] + new + text[at + 1 :]
    letters = [m.start() for m in re.finditer(r"(?<![\\A-Za-z])[A-Za-z](?![A-Za-z]*\{)", text)]
    if not letters:
        return None
    at = rng.choice(letters)
    return text[:at] + ("q" if text[at] != "q" else "w") + text[at + 1 :]


def part_changed(gold: str, rng: random.Random, others: Sequence[str]) -> str | None:
    """A member of the list dropped, or the unit, or a variable changed, or for a number the magnitude."""
    text = bare(gold)
    value = simple_value(gold)
    if value is not None:
        return (
            f"{text}0"
            if value and value.denominator == 1 and "." not in text
            else f"10\\cdot {text}"
            if value
            else "10"
        )
    members = split_list(text)
    if members is not None:
        members.pop(rng.randrange(len(members)))
        return ", ".join(members)
    tuple_like = re.fullmatch(r"(\\left)?\((.*),([^,()]*?)(\\right)?\)", text)
    if tuple_like is not None and tuple_like.group(2).count("(") == tuple_like.group(2).count(")"):
        return f"({tuple_like.group(2)})" if "," in tuple_like.group(2) else tuple_like.group(2)
    for old, new in (("^\\circ", "\\%"), ("\\$", "\\euro "), ("cm", "km"), ("inches", "miles"), ("cents", "euros")):
        if old in text:
            return text.replace(old, new)
    if has_words(gold):
        return None
    defined, equals, body = text.partition("=")
    if equals and re.fullmatch(r"[A-Za-z]\([a-z]\)", defined.strip()):  # renaming a bound variable changes nothing
        return f"{defined}={body}+w"
    letter = re.search(r"(?<![\\A-Za-z{])[a-zA-Z](?![A-Za-z(])|(?<=\d)[a-z](?![a-z])", text)
    if letter is not None:
        return re.sub(rf"(?<![\\A-Za-z]){letter.group()}(?![A-Za-z])|(?<=\d){letter.group()}(?![A-Za-z])", "w", text)
    if re.search(r"[=<>,]|\\(?:in|le|ge|pm|cup|begin|ldots)(?![A-Za-z])", text):
        return None
    return f"10\\cdot({text})"


def other_gold(gold: str, rng: random.Random, others: Sequence[str]) -> str | None:
    """A different gold answer of the same set."""
    value = simple_value(gold)
    for _ in range(50):
        candidate = rng.choice(others)
        if bare(candidate).casefold() == bare(gold).casefold():
            continue
        if value is None or simple_value(candidate) != value:
            return bare(candidate)
    return None


def universal(gold: str, rng: random.Random, others: Sequence[str]) -> str | None:
    """What is not finite, and so equal to nothing."""
    return rng.choice([r"-\infty q", r"\infty\cdot q", r"\frac{q}{0}", r"\infty-\infty", r"\frac{1}{0}"])


def symbol_added(gold: str, rng: random.Random, others: Sequence[str]) -> str | None:
    """A symbol that the gold lacks and that cancels."""
    text = bare(gold)
    if has_words(gold) or re.fullmatch(r"\(?[A-Z]\)?", text) or "q" in re.sub(r"\\[A-Za-z]+", "", text):
        return None
    return text + rng.choice(["+q-q", "+0q", r"\cdot\frac{q}{q}", r"\cdot q^0", r"+0\cdot q"])


def word_added(gold: str, rng: random.Random, others: Sequence[str]) -> str | None:
    """A word beside a number that changes it, or is no unit."""
    value = simple_value(gold)
    if value is None:
        return None
    changing = ["thousand", "million", "plus one", "squared"] if value else []
    return rf"{bare(gold)}\text{{ {rng.choice(['wrong', 'or so', 'minus one', *changing])}}}"


def calculation(gold: str, rng: random.Random, others: Sequence[str]) -> str | None:
    """A calculation that leads to the number, as it may stand in the question."""
    value = simple_value(gold)
    if value is None or value.denominator != 1:
        return None
    part = rng.randint(2, 40)
    return rng.choice(
        [f"{int(value) - part}+{part}", rf"x={int(value) * part}\cdot\frac{{1}}{{{part}}}", f"2x={2 * value}"]
    )


WRONG: dict[str, Wrong] = {
    "off by one": off_by_one,
    "sign flipped": sign_flipped,
    "digit changed": digit_changed,
    "part changed": part_changed,
    "other gold": other_gold,
    "universal": universal,
    "symbol added": symbol_added,
    "word added": word_added,
    "calculation": calculation,
}
