"""Four styles in a dozen words each: a grammar for a model of two layers, and `traces`, its cold start.

A text is an opening, the topic, what it does and how that ends. No phrase of a style is in another one, so that a
small tokenizer and a small model can hold the styles apart; no phrase holds a topic, so that off topic is off topic.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from envs.style_shift.prompts import Task, tasks
from envs.style_shift.schedule import STYLES

ENV_KWARGS: Mapping[str, Any] = {"prompts": "tiny", "show_candidates": False}
"""What makes `sao/StyleShift-v0` the environment of these texts."""

FLAWS = ("cut", "echo", "off_topic", "list")
"""How a text of bad quality is bad: it stops early, repeats a phrase, is about another topic, or lists words."""

EXAMPLE = """example:
  python -m envs.style_shift traces traces.jsonl --count 8000
  python -m envs.style_shift traces traces.jsonl --count 8000 --bad 0.5 --seed 1
"""

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


def traces(count: int, *, bad: float = 0.3, seed: int = 0) -> Iterator[tuple[Task, str, str | None, str]]:
    """`count` texts as (task, style, flaw, text): every style equally often, a share of `bad` with a flaw.

    Styles go round, so that their numbers differ by one at most; tasks, flaws and words are drawn from `seed`.
    """
    rng, all_tasks = random.Random(seed), tasks("tiny")
    for index in range(count):
        style, task = STYLES[index % len(STYLES)], rng.choice(all_tasks)
        flaw = rng.choice(FLAWS) if rng.random() < bad else None
        yield task, style, flaw, write(style, task.topic, rng, flaw=flaw)


_TOPICS = tuple(dict.fromkeys(task.topic for task in tasks("tiny")))


def add_parser(subparsers: Any) -> None:
    """Register the command's arguments."""
    parser = subparsers.add_parser(
        "traces",
        help="write traces for the cold start of a tiny policy",
        description=__doc__,
        epilog=EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("out", type=Path, metavar="OUT", help="the JSONL to write, as `sft.traces` reads it")
    parser.add_argument("--count", type=int, default=8000, help="how many (default 8000)")
    parser.add_argument("--bad", type=float, default=0.3, help="the share with bad quality, 0 to 1 (default 0.3)")
    parser.add_argument("--seed", type=int, default=0, help="of all draws (default 0)")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Carry out the command. Exit status: 0, or 2 when the arguments or the file cannot be used."""
    if arguments.count < 1 or not 0 <= arguments.bad <= 1:
        print("traces: --count must be at least 1 and --bad between 0 and 1", file=sys.stderr)
        return 2
    try:
        arguments.out.parent.mkdir(parents=True, exist_ok=True)
        with arguments.out.open("w", encoding="utf-8") as file:
            for task, style, flaw, text in traces(arguments.count, bad=arguments.bad, seed=arguments.seed):
                said = [{"role": "user", "content": task.prompt}, {"role": "assistant", "content": text}]
                file.write(json.dumps({"messages": said, "style": style, "flaw": flaw}) + "\n")
    except OSError as error:
        print(f"traces: {error}", file=sys.stderr)
        return 2
    print(f"{arguments.count} traces in {arguments.out}")
    return 0
