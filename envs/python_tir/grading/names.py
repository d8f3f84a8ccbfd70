r"""What may stand on the left of an equation in an answer: a name of what was asked, and nothing to be solved."""

from __future__ import annotations

import re

_LETTER = r"(?:[A-Za-z]|\\(?:alpha|beta|gamma|delta|theta|phi|varphi|lambda|mu|rho|sigma|omega|tau|ell|Delta|Omega))"
_ONE = rf"{_LETTER}\s?(?:_(?:\{{[^{{}}]*\}}|\w))?'*\*?"
_SEGMENT = r"[A-Z]'?(?:_(?:\{\w+\}|\w))?(?:[A-Z]'?(?:_(?:\{\w+\}|\w))?)+"
_NAME = re.compile(
    rf"{_ONE}"
    rf"|{_SEGMENT}|\|{_SEGMENT}\||\\overline\{{{_SEGMENT}\}}"
    rf"|(?:m\s?)?\\angle\s?(?:[A-Z]+|\{{[A-Z]+\}}|{_ONE})"
    rf"|\\(?:sin|cos|tan)\s?(?:\\angle\s?)?[A-Z]+"
    rf"|(?:[A-Wabcfghkpqrsuvw]|\\text\{{[A-Za-z]+\}})(?:_\w)?'*(?:_(?:\{{[^{{}}]*\}}|\w))?\([^()]*\)"
    rf"|[A-Za-z]{{3,}}|\|{_LETTER}\s?-\s?{_LETTER}\|"
    rf"|\(\s?{_ONE}(?:,\s?{_ONE})+\s?\)|\\frac\{{d[a-z]\}}\{{d[a-z]\}}"
)
_TERM = re.compile(rf"{_ONE}|{_SEGMENT}")
_DENIES = re.compile(r"\b(?:not|no|never|nor|wrong|incorrect|false|if|unless|or|than|isn|cannot|except)\b")


def is_name(side: str) -> bool:
    r"""Whether `side` only names something: `x`, `a_1`, `f(2)`, `AB`, `m\angle A`, `\text{the area}`, `m+n`."""
    side = side.strip()
    if "\\text" in side or re.fullmatch(r"[A-Za-z]+(?: [A-Za-z]+)+", side):
        prose = re.sub(r"\\text\{([^{}]*)\}", r" \1 ", side)  # "\text{not}c" denies c
        if re.fullmatch(r"[A-Za-z ,'()-]+", prose):
            return _DENIES.search(prose.lower()) is None
    if _NAME.fullmatch(side):
        return True
    terms = re.split(r"\+", side)  # "m+n = 42": what was asked is a sum of two names
    return len(terms) > 1 and len(set(terms)) == len(terms) and all(_TERM.fullmatch(term.strip()) for term in terms)


def is_letter(side: str) -> bool:
    """Whether `side` is one letter with or without an index."""
    return re.fullmatch(_ONE, side.strip()) is not None
