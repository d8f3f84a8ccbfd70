"""`LexicalJudge`: a judge that counts words. A stand-in, so that everything runs without a model or a network.

It knows lists of words and a few rules, not meaning: a clever text in a style that uses none of the words is
"none" to it, and fluent nonsense that keeps the rules passes. `python -m envs.style_shift agreement` says how
often it agrees with the labelled examples.
"""

from __future__ import annotations

from envs.style_shift.judging.judge import Judge, Verdict
from envs.style_shift.judging.lexicon import SHAPES, STYLE_PATTERNS
from envs.style_shift.judging.text_quality import flaws, normal
from envs.style_shift.prompts import language_of
from envs.style_shift.schedule import NONE, STYLES

MIN_SCORE = 2.0
"""What the best style must score: one word that stands in no other style."""

MARGIN = 1.2
"""How many times the second style's score the best one must have; closer is a mixture, so "none".
A third style with a word of its own is one too."""


class LexicalJudge(Judge):
    """Deterministic, without state, and quick (well under a millisecond a text)."""

    async def judge(self, prompt: str, text: str, style: str) -> Verdict:
        """Judge by word lists; never faults. `style` changes nothing."""
        scores = style_scores(text)
        seen = flaws(prompt, text)
        best, second, third = sorted(STYLES, key=lambda name: -scores[name])[:3]
        mixed = scores[best] < MARGIN * scores[second] or scores[third] >= MIN_SCORE
        clear = scores[best] >= MIN_SCORE and not mixed
        listed = ", ".join(f"{name} {scores[name]:g}" for name in STYLES)
        return Verdict(int(not seen), best if clear else NONE, f"{listed}; {'; '.join(seen) or 'no fault found'}")


def style_scores(text: str) -> dict[str, float]:
    """By style, the sum of the weights of its markers that are in `text`, each counted once."""
    low, language = normal(text), language_of(text)
    scores = {
        style: sum(weight for pattern, weight in patterns if pattern.search(low))
        for style, patterns in STYLE_PATTERNS[language].items()
    }
    for style, pattern, least, weight in SHAPES[language]:
        if sum(1 for _ in pattern.finditer(low)) >= least:
            scores[style] += weight
    return scores
