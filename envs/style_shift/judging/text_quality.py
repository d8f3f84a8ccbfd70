# ruff: noqa: RUF001 (Chinese punctuation is meant)
"""Whether a short text is sound, as far as counting words can tell: the lexical judge's half of quality."""

from __future__ import annotations

import itertools
import math
import re
from collections import Counter
from collections.abc import Sequence

from envs.style_shift.judging.lexicon import (
    FORM_CHARACTERS,
    FORM_WORDS,
    FUNCTION_WORDS,
    SALAD,
    STYLE_PATTERNS,
    TO_THE_JUDGE,
)
from envs.style_shift.prompts import Language, is_han, language_of

LENGTHS: dict[Language, tuple[int, int]] = {"en": (5, 150), "zh": (8, 300)}
"""Words (English) or Chinese characters that a text may have."""

MAX_STRONG, MAX_MARKED = 0.6, {"en": 0.75, "zh": 0.6}
"""The largest share of words (characters) that may be strong markers (weight 2 or more) of one style, and any
markers of it: beyond them, a list of stock words."""

LEAST_OWN_CHARACTERS = 5
"""Different Chinese characters that a text must have of its own: in no marker, not in the prompt, no small word."""

_SMALL_CHARACTERS = frozenset("的了与和是也在着又这那我你他她它")
_GLUE = frozenset(("the", "a", "an", "of", "and", "is"))
_WORD = re.compile(r"[a-z]+(?:'[a-z]+)*")
_ENDS = tuple(".!?~。！？～…♡♥❤")
_CLOSERS = "\"'”’」』)） "


def normal(text: str) -> str:
    """Lower case, straight apostrophes, single spaces: what patterns are matched on."""
    return " ".join(text.lower().replace("\u2019", "'").split())


def flaws(prompt: str, text: str) -> list[str]:
    """What is wrong with `text` as an answer to `prompt`; empty for a sound one."""
    language = language_of(prompt)
    low = normal(text)
    units = _units(low, language)
    seen = []
    least, most = LENGTHS[language]
    if not least <= len(units) <= most:
        return [f"{len(units)} words or characters, not {least} to {most}"]
    if _other_script(low, language):
        seen.append("another language than the prompt's, or a mixture")
    if not text.rstrip(_CLOSERS).endswith(_ENDS):
        seen.append("cut off")
    if _echoes(normal(prompt), units, language):
        seen.append("repeats the prompt")
    if TO_THE_JUDGE.search(low):
        seen.append("speaks to its judge")
    strong, marked = (_marked_share(low, units, language, least) for least in (2.0, 0.0))
    if strong > MAX_STRONG or marked > MAX_MARKED[language] or _says_nothing(normal(prompt), low, language):
        seen.append("a list of stock words")
    if _repetitive(units, language):
        seen.append("repeats itself")
    if _fragments(low, units, language):
        seen.append("fragments, not sentences")
    if SALAD.search(low) or (language == "en" and _no_language(units)):
        seen.append("no grammar")
    if not on_topic(prompt, low, language):
        seen.append("off topic")
    return seen


def on_topic(prompt: str, low: str, language: Language) -> bool:
    """Whether the text shares a content word (English) or a telling character (Chinese) with the prompt."""
    asked = normal(prompt)
    if language == "zh":
        topic = {c for c in asked if is_han(c)} - FORM_CHARACTERS
        return not topic or any(c in topic for c in low)
    words = set(_WORD.findall(low))
    topic_words = {word for word in _WORD.findall(asked) if word not in FUNCTION_WORDS | FORM_WORDS}
    return not topic_words or any(_same_word(word, topic) for topic in topic_words for word in words)


def _same_word(word: str, topic: str) -> bool:
    stem = topic.removesuffix("s") if len(topic) > 4 else topic
    # Of a short word only the plural: `cat` is not in `category`.
    return word in (stem, stem + "s", stem + "'s", topic) or (len(stem) >= 4 and word.startswith(stem))


def _units(low: str, language: Language) -> list[str]:
    return [c for c in low if is_han(c)] if language == "zh" else _WORD.findall(low)


def _other_script(low: str, language: Language) -> bool:
    letters = [c for c in low if c.isalpha()]
    expected = sum(map(is_han, letters)) if language == "zh" else sum(c.isascii() for c in letters)
    return expected < 0.9 * len(letters)


def _marked_share(low: str, units: Sequence[str], language: Language, least: float) -> float:
    """The share of words (characters) in markers of a style, of weight `least` or more: the largest over the styles."""
    shares = []
    for patterns in STYLE_PATTERNS[language].values():
        marked = [False] * len(low)
        for pattern, weight in patterns:
            for match in () if weight < least else pattern.finditer(low):
                marked[match.start() : match.end()] = [True] * (match.end() - match.start())
        if language == "zh":
            count = sum(is_han(c) and marked[i] for i, c in enumerate(low))
        else:
            count = sum(marked[match.start()] for match in _WORD.finditer(low))
        shares.append(count / len(units))
    return max(shares)


def _echoes(asked: str, units: Sequence[str], language: Language) -> bool:
    """Whether the text holds most of the prompt in one run (of at least three words or characters)."""
    wanted = _units(asked, language)
    least = max(3, math.ceil(0.75 * len(wanted)))
    runs = {tuple(wanted[i : i + least]) for i in range(len(wanted) - least + 1)}
    if language == "en":  # `a train journey` is what a text is about; `describe a train` only a prompt says
        runs = {run for run in runs if FORM_WORDS.intersection(run)}
    return any(tuple(units[i : i + least]) in runs for i in range(len(units) - least + 1))


def _says_nothing(asked: str, low: str, language: Language) -> bool:
    """Whether only stock words, small words and the prompt's own are there: a list, whatever stands between them."""
    hits = sorted(
        match.span() for patterns in STYLE_PATTERNS[language].values() for p, _ in patterns for match in p.finditer(low)
    )
    inside = [False] * len(low)
    for start, end in hits:
        inside[start:end] = [True] * (end - start)
    if language == "zh":
        own = {c for i, c in enumerate(low) if is_han(c) and not inside[i]} - set(asked) - _SMALL_CHARACTERS
        return bool(hits) and len(own) < LEAST_OWN_CHARACTERS
    words = list(_WORD.finditer(low))
    known = FUNCTION_WORDS | FORM_WORDS | set(_WORD.findall(asked))
    own_words = {word[0] for word in words if not inside[word.start()]} - known
    glued = sum(a[0] in _GLUE and not inside[a.start()] and inside[b.start()] for a, b in itertools.pairwise(words))
    chain = _longest_chain(hits, words)
    return (not own_words and chain >= 3) or (len(own_words) <= 1 and (chain >= 6 or glued >= 4))


def _longest_chain(hits: Sequence[tuple[int, int]], words: Sequence[re.Match[str]]) -> int:
    """How many markers follow on each other with at most one word between them."""
    longest = length = 0
    last: int | None = None
    for start, end in hits:
        if last is not None and start < last:
            last = max(last, end)
            continue
        near = last is not None and sum(last <= word.start() and word.end() <= start for word in words) <= 1
        length = length + 1 if near else 1
        longest, last = max(longest, length), end
    return longest


def _repetitive(units: Sequence[str], language: Language) -> bool:
    pairs = list(itertools.pairwise(units))
    if language == "zh":
        echoes = sum(units[i : i + 2] == units[i + 2 : i + 4] for i in range(len(units) - 3))
        doubles = sum(a == b for a, b in pairs)
        return len(set(pairs)) < 0.65 * len(pairs) or echoes > 0.12 * len(units) or doubles > 0.3 * len(units)
    echoes = sum(a == b for a, b in pairs)
    phrases = Counter(zip(units, units[1:], units[2:], strict=False))
    thrice = max(phrases.values(), default=0) > 2
    return thrice or len(set(units)) < 0.55 * min(len(units), 60) or echoes > 0.12 * len(units)


def _fragments(low: str, units: Sequence[str], language: Language) -> bool:
    sentences = [part for part in re.split(r"[.!?~。！？～…]+", low) if _units(part, language)]
    if len(units) < (4.0 if language == "zh" else 3.0) * len(sentences):
        return True
    phrases = [part for part in re.split(r"[,;:、，；]", low) if _units(part, language)]
    return len(phrases) > 3 and len(units) < (3.0 if language == "zh" else 2.3) * len(phrases)


def _no_language(words: Sequence[str]) -> bool:
    """No small words at all, or letters that nobody could say."""
    small = sum(word in FUNCTION_WORDS for word in words)
    unsayable = sum(len(word) > 3 and not re.search("[aeiouy]", word) for word in words)
    return small < 0.1 * len(words) or unsayable > 0.15 * len(words)
