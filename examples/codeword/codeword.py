"""Find a code of two letters: a guess is answered with how many are in the right place.

`python codeword.py COUNT` writes traces of a player.
"""

from __future__ import annotations

import itertools
import json
import random
import sys
from collections.abc import Iterator, Sequence
from typing import Any

from envs.core import AsyncEnv, Step
from envs.said import said

LETTERS = "ABCDE"
CODES = ["".join(pair) for pair in itertools.product(LETTERS, repeat=2)]
PROMPT = "Find the code: two letters, A to E."


class Codeword(AsyncEnv):
    """Reward 1 for the code within `guesses` guesses. `part`: "train", or "held_out", the other half of the codes."""

    def __init__(self, part: str = "train", guesses: int = 5) -> None:
        if part not in ("train", "held_out"):
            raise ValueError(f"part must be train or held_out, not {part!r}")
        self._codes, self._guesses = CODES[part == "held_out" :: 2], guesses

    @property
    def task_ids(self) -> Sequence[str]:
        return self._codes

    async def areset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[str, dict[str, Any]]:
        self._code = (options or {}).get("task_id") or random.Random(seed).choice(self._codes)
        self._made = 0
        return PROMPT, {"messages": [{"role": "user", "content": PROMPT}]}

    async def astep(self, action: str) -> Step:
        guess = said(action, self.tool_format).strip()
        self._made += 1
        if guess == self._code:
            return "", 1.0, True, False, {"messages": [], "metrics": {"guesses": self._made}}
        if self._made == self._guesses:
            return await self.atruncate("turns", action)
        text = str(places(guess, self._code))
        return text, 0.0, False, False, {"messages": [{"role": "user", "content": text}]}


def places(guess: str, code: str) -> int:
    """How many letters of `guess` are where they are in `code`."""
    return sum(a == b for a, b in zip(guess, code, strict=False))


def traces(count: int, rng: random.Random) -> Iterator[list[dict[str, str]]]:
    """Games of a player who guesses anything that is still possible: for the cold start of a tiny model."""
    for _ in range(count):
        code, possible, messages = rng.choice(CODES), CODES, [{"role": "user", "content": PROMPT}]
        while messages[-1]["content"] != code:
            guess = rng.choice(possible)
            messages.append({"role": "assistant", "content": guess})
            if guess != code:
                messages.append({"role": "user", "content": str(places(guess, code))})
                possible = [one for one in possible if places(guess, one) == places(guess, code) and one != guess]
        yield messages


if __name__ == "__main__":
    for played in traces(int(sys.argv[1]) if len(sys.argv) > 1 else 2000, random.Random(0)):
        print(json.dumps({"messages": played}))
