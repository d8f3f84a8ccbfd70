"""Four styles in a dozen words each: a grammar for a model of two layers, and `traces`, its cold start.

A text is an opening, the topic, what it does and how that ends. No phrase of a style is in another one, so that a
small tokenizer and a small model can hold the styles apart; no phrase holds a topic, so that off topic is off topic.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from envs.style_shift.prompts import Task, tasks
from envs.style_shift.schedule import STYLES

ENV_KWARGS: Mapping[str, Any] = {"prompts": "tiny", "show_candidates": False}
"""What makes `sao/StyleShift-v0` the environment of these texts."""

FLAWS = ("cut", "echo", "off_topic", "list")
"""How a text of bad quality is bad: it stops early, repeats a phrase, is about another topic, or lists words."""

_GRAMMAR: Mapping[str, tuple[Sequence[str], Sequence[str], Sequence[str]]] = {
    "academic": (
        ("this study shows that", "the results suggest that"),
        ("has a significant effect", "may be a useful variable"),
        ("on human behaviour.", "in the observed data."),
    ),
    "cute": (
        ("yay, look,", "aww, hello,"),
        ("is so fluffy and tiny,", "gives me a warm hug,"),
        ("i love it so much~", "what a cutie pie!"),
    ),
    "chuunibyou": (
        ("behold, mortals,", "hmph, foolish ones,"),
        ("feeds the demon", "breaks the forbidden curse"),
        ("of the abyss within me!", "and makes the world kneel!"),
    ),
    "classical": (
        ("lo, gentle friend,", "alas, ere the dawn"),
        ("doth sing to thee", "hath touched thy brow"),
        ("upon yonder hill.", "and bringeth thee peace."),
    ),
}

_LISTED: Mapping[str, Sequence[str]] = {
    "academic": ("significant", "analysis", "data", "literature", "variable", "hypothesis"),
    "cute": ("fluffy", "yay", "cutie", "hug", "hehe", "adorable"),
    "chuunibyou": ("demon", "abyss", "curse", "sealed", "forbidden", "mortals"),
    "classical": ("thee", "doth", "hath", "yonder", "ere", "alas"),
}


def write(style: str, topic: str, rng: random.Random, *, flaw: str | None = None) -> str:
    """A text about `topic` in `style`, sound or with a flaw of `FLAWS`. Raises `KeyError` for another style."""
    opening, does, ends = (rng.choice(part) for part in _GRAMMAR[style])
    if flaw is None:
        return f"{opening} {topic} {does} {ends}"
    if flaw == "cut":
        words = f"{does} {ends}".split()
        return " ".join([opening, topic, *words[: rng.randint(1, len(words) - 2)]]).rstrip(".,!~")
    if flaw == "echo":
        return f"{opening} {topic} {does} {does} {does} {does} {ends}"
    if flaw == "off_topic":
        other = rng.choice([o for o in _TOPICS if o != topic])
        return write(style, other, rng)
    if flaw == "list":
        words = rng.sample(_LISTED[style], 5)
        words.insert(rng.randrange(len(words)), topic)
        return " ".join(words) + "."
    raise ValueError(f"a flaw is one of {', '.join(FLAWS)}, not {flaw!r}")


def texts(count: int, *, bad: float = 0.3, seed: int = 0) -> Iterator[tuple[Task, str, str | None, str]]:
    """`count` texts as (task, style, flaw, text): every style equally often, a share of `bad` with a flaw.

    Styles go round, so that their numbers differ by one at most; tasks, flaws and words are drawn from `seed`.
    """
    rng, all_tasks = random.Random(seed), tasks("tiny")
    for index in range(count):
        style, task = STYLES[index % len(STYLES)], rng.choice(all_tasks)
        flaw = rng.choice(FLAWS) if rng.random() < bad else None
        yield task, style, flaw, write(style, task.topic, rng, flaw=flaw)


_TOPICS = tuple(dict.fromkeys(task.topic for task in tasks("tiny")))
