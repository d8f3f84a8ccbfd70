# ruff: noqa: RUF001 (the table below is about characters that look alike)
r"""Finding the final answer in a model's text, and spelling answers in one way. Pure functions, linear in the text.

extract_answer(r"... so \boxed{\dfrac12}.")   # r"\dfrac12"
normalize(r"$\dfrac12$.")                     # r"\frac{1}{2}"
"""

from __future__ import annotations

import re
from itertools import pairwise

_BOX = re.compile(r"\\(?:boxed|fbox)(?![A-Za-z])\s*")
_BARE = re.compile(r"[^\s${}]+")


def brace_pairs(text: str) -> dict[int, int]:
    r"""Map the index of every balanced `{` to that of its `}`. Escaped braces (`\{`) are text."""
    pairs: dict[int, int] = {}
    stack: list[int] = []
    for match in re.finditer(r"\\.|[{}]", text, re.DOTALL):
        token = match.group()
        if token == "{":
            stack.append(match.start())
        elif token == "}" and stack:
            pairs[stack.pop()] = match.start()
    return pairs


_BETWEEN_BOXES = re.compile(
    r"[\s$,;&*]*(?:\\(?:text\{)?\s*)?(?:and)?\s*\}?[\s$,;&*]*(?:(?:[A-Za-z]|\\[a-z]+)(?:_(?:\{\w*\}|\w))?\s*=\s*)?"
)
_SEPARATOR = re.compile(r"[,;]|and")


def extract_answer(text: str) -> str | None:
    r"""Return the content of the last balanced `\boxed{...}` or `\fbox{...}`, or None when there is none.

    Of nested boxes the outermost counts; empty boxes do not. Boxes with nothing but commas, "and" or a name between
    them are one list: `\boxed{3}, \boxed{5}` is `3, 5`. Without a braced box, the token after a bare `\boxed 42` is
    taken.
    """
    pairs = brace_pairs(text)
    boxes: list[tuple[int, int, str]] = []  # begin, end and content, none inside another
    bare: list[int] = []
    for match in _BOX.finditer(text):
        start = match.end()
        if text[start : start + 1] == "{":
            end = pairs.get(start)
            if end is not None and (not boxes or end > boxes[-1][1]):
                content = text[start + 1 : end].strip()
                if content:
                    boxes.append((match.start(), end, content))
        else:
            bare.append(start)
    if boxes:
        return ", ".join(_listed_at_end(text, boxes))
    tokens = (_BARE.match(text, start) for start in reversed(bare))
    return next((token.group().rstrip(".,;:!?") or None for token in tokens if token), None)


def _listed_at_end(text: str, boxes: list[tuple[int, int, str]]) -> list[str]:
    """The contents of the last box and of those that it makes a list with; a box that is repeated counts once."""
    contents = [boxes[-1][2]]
    for (_, end, content), (begin, _, _) in reversed(list(pairwise(boxes))):
        gap = text[end + 1 : begin] if begin - end < 80 else "."
        if _SEPARATOR.search(gap) is None or _BETWEEN_BOXES.fullmatch(gap) is None:
            break
        contents.insert(0, content)
    return contents if len(set(contents)) > 1 else contents[:1]


_UNICODE = str.maketrans(
    {
        "−": "-", "–": "-", "—": "-", "‐": "-", "×": r"\times ", "·": r"\cdot ", "⋅": r"\cdot ", "∗": "*", "÷": "/",
        "⁄": "/", "π": r"\pi ", "θ": r"\theta ", "φ": r"\varphi ", "α": r"\alpha ", "β": r"\beta ", "λ": r"\lambda ",
        "∞": r"\infty ", "≤": r"\le ", "≥": r"\ge ", "⩽": r"\le ", "⩾": r"\ge ", "≠": r"\ne ", "≈": r"\approx ",
        "±": r"\pm ", "∓": r"\mp ", "√": r"\sqrt ", "°": r"^\circ ", "∪": r"\cup ", "∩": r"\cap ", "∈": r"\in ",
        "∅": r"\emptyset ", "ℝ": r"\mathbb{R}", "ℤ": r"\mathbb{Z}", "ℕ": r"\mathbb{N}", "ℚ": r"\mathbb{Q}",
        "²": "^{2}", "³": "^{3}", "⁴": "^{4}", "½": r"\frac{1}{2}", "¼": r"\frac{1}{4}", "¾": r"\frac{3}{4}",
        "⌊": r"\lfloor ", "⌋": r"\rfloor ", "⌈": r"\lceil ", "⌉": r"\rceil ", "…": r"\ldots ", "%": r"\%",
        "€": r"\euro ", "£": r"\pounds ", "¥": r"\yen ", "\u00a0": " ", "\u202f": " ", "\u2009": " ", "\u200b": "",
        "｜": "|", "【": "[", "】": "]", "、": ",", "。": ".", "：": ":", "；": ";",
        "＝": "=", "’": "'", "“": '"', "”": '"', "，": ",", "（": "(", "）": ")",
    }
)  # fmt: skip

_GREEK = r"\\(?:pi|theta|alpha|beta|gamma|lambda|mu|rho|sigma|omega|varphi|phi)(?![A-Za-z])"

# Each pair is applied once, in this order. None of the patterns can backtrack over more than one token.
_FUNCTIONS = "arc(?:sin|cos|tan|cot|sec|csc)|(?:sin|cos|tan|cot|sec|csc)h?|ln|log|exp|max|min|gcd|lcm"

_SPELLINGS: tuple[tuple[re.Pattern[str], str], ...] = tuple(
    (re.compile(pattern), replacement)
    for pattern, replacement in (
        (r"\\(?:boxed|fbox)(?![A-Za-z])\s*", ""),
        (r"^\s*(\*{1,3}|__|`{1,2})(?=[^\s*`])(.*)(?<=[^\s*`])\1\s*$", r"\2"),
        (r"\\(?:underline|bf|it|rm|tt|[lL]arge|huge|normalsize)(?![A-Za-z])", ""),
        (r"^(-?\d{1,3}) (\d{3}) (\d{3})$", r"\1\2\3"),
        (r"\\(?:textcolor|colorbox|color)\s*(?:\[[^\[\]{}]*\])?\s*\{[^{}]*\}", ""),
        (r"(?<=\d)(?:\\[,;:!]|\\thinspace ) ?(?=\d{3}(?!\d))", ""),
        (r"\\[lr]?vert(?![A-Za-z])", "|"),
        (r"\\(?:displaystyle|textstyle|limits|nolimits|bigl?|bigr|Bigl?|Bigr|left|right|middle)(?![A-Za-z])\.?", ""),
        (r"\\!", ""),
        (r"\{,\}", ","),
        (r"(?<!\\)\\(?:[,;:> ]|q?quad(?![A-Za-z])|thinspace(?![A-Za-z]))|~", " "),
        (r"\\[dtc]frac(?![A-Za-z])", r"\\frac"),
        (r"(?<![\\A-Za-z])sqrt(?=[\s({\d])", r"\\sqrt "),
        (r"(?<![\\A-Za-z])(?:pi|Pi)(?![A-Za-z])", r"\\pi "),
        (r"(?<![\\A-Za-z])(?:infinity|inf|oo)(?![A-Za-z])", r"\\infty "),
        (r"\\(?:leqslant|leqq|leq)(?![A-Za-z])|<=", r"\\le "),
        (r"\\(?:geqslant|geqq|geq)(?![A-Za-z])|>=", r"\\ge "),
        (r"\\neq(?![A-Za-z])|!=", r"\\ne "),
        (r"\\lt(?![A-Za-z])", "<"),
        (r"\\gt(?![A-Za-z])", ">"),
        (r"\\lbrace(?![A-Za-z])", r"\\{"),
        (r"\\rbrace(?![A-Za-z])", r"\\}"),
        (r"\\(?:dots|cdots|dotsc|dotsb)(?![A-Za-z])|\.\.\.", r"\\ldots "),
        (r"\\varnothing(?![A-Za-z])", r"\\emptyset "),
        (r"\\lg(?![A-Za-z])", r"\\log_{10}"),
        (r"\^\s*\{\s*\\circ\s*\}|\^\s*\\circ(?![A-Za-z])|\\degree(?![A-Za-z])", r"^\\circ "),
        (r"\\(?:mathrm|textrm|textbf|textit|textnormal|mbox|hbox|mathbf|bold|operatorname\*?)\s*(?=\{)", r"\\text"),
        (r"\\text\s+(?=\{)", r"\\text"),
        (rf"\\text\{{ ?({_FUNCTIONS}) ?\}}", r"\\\1 "),
        (r"(?<![\\A-Za-z])a(sin|cos|tan)(?=\s?\()", r"\\arc\1"),
        (rf"(?<![\\A-Za-z])({_FUNCTIONS})(?=\s?\(|\\)", r"\\\1 "),
        (r"(?<![\\A-Za-z])((?:sin|cos|tan|cot|sec|csc)h?|ln|log)(?=\s[a-z\d]|\s\\|[\^_{])", r"\\\1 "),
        (r"\\text\{ ?,? ?(and|or) ?\}", r" \1 "),
        (r",? ?\\text\{ ?,? ?(?:for|where|with)(?: (?:all|any|every|some|integers?))* ?\}(?= ?[a-z] ?\\in)", ", "),
        (r"(?<![A-Za-z\\])(?:and|or)(?![A-Za-z])", r" \\\g<0> "),
        (r"\\(?:land|wedge)(?![A-Za-z])", r" \\and "),
        (r"\\(?:lor|vee)(?![A-Za-z])", r" \\or "),
        (r",\s*\\(and|or) ", r" \\\1 "),
        (r"\\text\{([^A-Za-z{}]*|[^A-Za-z{}]*[A-Za-z][^A-Za-z{}]*)\}", r" \1 "),
        (r"\*\*", "^"),
        (rf"\\(frac|binom)\s*([0-9]|(?<=\s)[A-Za-z]|{_GREEK})", r"\\\1{\2}"),
        (rf"\\sqrt\s*(\[[^\[\]{{}}]*\])?\s*([0-9]+|(?<=[\s\]])[A-Za-z]|{_GREEK})", r"\\sqrt\1{\2}"),
    )
)
_TOKEN = re.compile(rf"\s*([0-9A-Za-z]|{_GREEK})")
_DELIMITERS = re.compile(r"\\\\|\\\$|\\[()\[\]]|\$+")
_SPACES = re.compile(r"\s+")
_THIN_GROUPS = re.compile("(?<=\\d)[\u00a0\u202f\u2009](?=\\d{3}(?!\\d))")
_REPEATING = re.compile(r"(?<![\d.])(\d*)\.(\d*)\\(?:overline|overlien|bar|dot)\s?\{(\d+)\}(?!\d)")
_LOOSE_SPACE = re.compile(r"(?<![A-Za-z0-9]) | (?![A-Za-z0-9])")


def _second_arguments(text: str) -> str:
    r"""Brace the second argument of `\frac{1}2`, whose first is braced already."""
    pairs = brace_pairs(text)
    out: list[str] = []
    position = 0
    for match in re.finditer(r"\\(?:frac|binom)\s*(?=\{)", text):
        close = pairs.get(match.end())
        token = None if close is None else _TOKEN.match(text, close + 1)
        if token is not None:
            out += [text[position : token.start()], "{", token.group(1), "}"]
            position = token.end()
    return "".join(out) + text[position:]


def _round_arguments(text: str) -> str:
    r"""Turn `\sqrt(2)` and `x^(n+1)` into `\sqrt{2}` and `x^{n+1}`."""
    if not re.search(r"(?:\\sqrt|\^)\s*\(", text):
        return text
    stack: list[int] = []
    pairs: dict[int, int] = {}
    for index, char in enumerate(text):
        if char == "(":
            stack.append(index)
        elif char == ")" and stack:
            pairs[stack.pop()] = index
    chars = list(text)
    for match in re.finditer(r"(?:\\sqrt|\^)\s*(\()", text):
        start = match.start(1)
        if start in pairs:
            chars[start], chars[pairs[start]] = "{", "}"
    return "".join(chars)


def _one_space(match: re.Match[str]) -> str:
    """A run of white space as one space; a thin or fixed space alone stays, since it may group digits."""
    return match.group() if match.group() in "\u00a0\u202f\u2009" else " "


def _repeating(match: re.Match[str]) -> str:
    r"""Write `0.1\overline{6}` as the fraction that it is."""
    whole, fixed, period = match.groups()
    if len(match.group()) > 200:
        return match.group()
    nines = int("9" * len(period) + "0" * len(fixed))
    top = int(whole + fixed + period) - int(whole + fixed or "0")
    return rf"\frac{{{top}}}{{{nines}}}"


def normalize(answer: str, *, thousands: bool = True) -> str:
    r"""Return `answer` in the one spelling that comparisons start from; equal results mean the same.

    Math delimiters, sizes, spacing and thousands separators go; `\dfrac12` becomes `\frac{1}{2}`, Unicode becomes
    LaTeX, the final full stop goes. `\text{...}` stays around words. Idempotence is not promised, safety is: any
    string is accepted. `thousands=False` leaves `100,200` a list of two.
    """
    text = _THIN_GROUPS.sub("", _SPACES.sub(_one_space, answer)).translate(_UNICODE).replace("\\\\%", "\\%")
    text = _DELIMITERS.sub(lambda m: m.group() if m.group() in ("\\\\", "\\$") else " ", text)
    for pattern, replacement in _SPELLINGS:
        text = pattern.sub(replacement, text)
    text = _REPEATING.sub(_repeating, text)
    text = _second_arguments(text)
    text = _round_arguments(text)
    text = _SPACES.sub(" ", text).strip()
    text = text.rstrip(".,;: ") if not text.endswith("\\ldots") else text
    text = _LOOSE_SPACE.sub("", text)
    return _join_thousands(text) if thousands else text


def _join_thousands(text: str) -> str:
    """Write `10,080` as `10080`, outside brackets only: in `(2,251,252)` commas separate."""
    match = re.fullmatch(r"(?:\\text\{[A-Za-z :]*\} ?)?(\\\$|-|\+)*(\d{1,3}(?:,\d{3})+)(?![\d,]).*", text, re.DOTALL)
    if match is None:
        return text
    return text[: match.start(2)] + match.group(2).replace(",", "") + text[match.end(2) :]


def unwrap(normal: str) -> str:
    r"""Drop the `\text{}` wrappers of a normalised answer, for comparing prose."""
    return _SPACES.sub(" ", re.sub(r"\\text\{([^{}]*)\}", r" \1 ", normal)).strip()
