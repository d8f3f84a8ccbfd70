"""Scripted traces of StyleShift with tiny prompts, for a policy's cold start; sound texts for the held-out probe.

The grammar of `envs.style_shift.tiny` writes them: every style equally often, so that the cold start knows all of
them about equally and prefers none. `python -m envs.style_shift traces` writes a file of them.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from envs.core import Message
from envs.style_shift import tiny
from envs.style_shift.prompts import tasks
from envs.style_shift.schedule import STYLES

ENV_ID = "sao/StyleShift-v0"
EXAMPLE = """example:
  python -m envs.style_shift traces traces.jsonl --count 8000
  python -m envs.style_shift traces traces.jsonl --count 8000 --bad 0.5 --seed 1
"""
_DRAWS = 80  # a style has eight sound texts on a topic; so many draws miss one of them once in 5,000 prompts


def has_script(env_id: str, kwargs: Mapping[str, Any]) -> bool:
    """Whether the grammar can write for this environment."""
    return env_id == ENV_ID and kwargs.get("prompts") == "tiny"


def style_traces(count: int, *, bad: float, seed: int) -> Iterator[list[Message]]:
    """`count` conversations, a share `bad` of them with a text of bad quality."""
    for task, _, _, text in tiny.texts(count, bad=bad, seed=seed):
        yield [{"role": "user", "content": task.prompt}, {"role": "assistant", "content": text}]


def sound_texts(prompts: int, seed: int = 0) -> list[list[Message]]:
    """Every sound text that the grammar has for each of `prompts` prompts, in all styles."""
    rng = random.Random(seed)
    available = tasks("tiny")
    conversations = []
    for task in rng.sample(available, min(prompts, len(available))):
        texts = {tiny.write(style, task.topic, rng) for style in STYLES for _ in range(_DRAWS)}
        for text in sorted(texts):
            conversations.append([{"role": "user", "content": task.prompt}, {"role": "assistant", "content": text}])
    return conversations


def add_parser(subparsers: Any) -> None:
    """Register the command's arguments."""
    parser = subparsers.add_parser(
        "traces",
        help="write traces for the cold start of a tiny policy",
        description=tiny.__doc__,
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
            for task, style, flaw, text in tiny.texts(arguments.count, bad=arguments.bad, seed=arguments.seed):
                said = [{"role": "user", "content": task.prompt}, {"role": "assistant", "content": text}]
                file.write(json.dumps({"messages": said, "style": style, "flaw": flaw}) + "\n")
    except OSError as error:
        print(f"traces: {error}", file=sys.stderr)
        return 2
    print(f"{arguments.count} traces in {arguments.out}")
    return 0
