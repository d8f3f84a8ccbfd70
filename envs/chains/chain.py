"""What a chain is: drawn from a seed, written as a prompt, and held against calls. Pure functions and values.

A prompt shows all that a call needs but for one thing: of a link with a question mark nobody can know which of a few
values it takes. So how hard a chain is can be read from its prompt: how many links, of which kinds.
"""

from __future__ import annotations

import random
import string
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

Kind = Literal["copy", "sum", "guess", "skip"]
"""What a link asks for: the last value as it is; plus a number; plus a number that nobody knows; to be left out."""

DIGITS = 10
"""Values are digits, and sums are taken modulo this."""

MOST_NAMES = len(string.ascii_lowercase)


@dataclass(frozen=True, slots=True)
class Link:
    """One link. `operand`: what a sum adds. `hidden`: what a guess adds. `gives`: the tool's answer to the right
    call, and `lost` the digit in its answer to any other."""

    name: str
    kind: Kind
    operand: int
    hidden: int
    gives: int
    lost: int

    @property
    def adds(self) -> int:
        """What is added to the last value to make the right one."""
        return {"sum": self.operand, "guess": self.hidden}.get(self.kind, 0)

    def __str__(self) -> str:
        forms = {"copy": "{0}", "sum": "{0}+{1}", "guess": "{0}?", "skip": "({0})"}
        return forms[self.kind].format(self.name, self.operand)


@dataclass(frozen=True, slots=True)
class Chain:
    """A task: the first value, and all links that the prompt lists, those to be skipped among them.

    `guess_of`: how many values a guess may take.
    """

    task_id: str
    start: int
    listed: tuple[Link, ...]
    guess_of: int

    @property
    def links(self) -> tuple[Link, ...]:
        """Those that have to be called, in order."""
        return tuple(link for link in self.listed if link.kind != "skip")

    @property
    def result(self) -> int:
        """The value after the last link: the answer."""
        return self.links[-1].gives

    @property
    def attainable(self) -> float:
        """The success of a policy that makes no mistake but in guesses."""
        return float(self.guess_of) ** -sum(link.kind == "guess" for link in self.listed)

    @property
    def prompt(self) -> str:
        """`Start 4: b+3, (q), k, m?`"""
        return f"Start {self.start}: " + ", ".join(map(str, self.listed))

    def right_value(self, index: int, value: int) -> int:
        """What link number `index` of `links` has to be called with after the answer `value`."""
        return (value + self.links[index].adds) % DIGITS


@dataclass(frozen=True, slots=True)
class Mix:
    """How chains are drawn: lengths from `least` to `most` links with weights 1, 2^-tail, 3^-tail, ...

    A chain draws one of `sum_shares` and one of `guess_shares`, the chance of each of its links to be a sum, else a
    guess, of `guess_of` values. Before each link stands one to skip with probability `skips`.
    """

    least: int = 2
    most: int = 12
    tail: float = 1.0
    sum_shares: tuple[float, ...] = (0.0, 0.8)
    guess_shares: tuple[float, ...] = (0.0, 0.0, 1.0)
    guess_of: int = 4
    skips: float = 0.2

    def __post_init__(self) -> None:
        if not 1 <= self.least <= self.most <= MOST_NAMES // 2:
            raise ValueError(
                f"min_links {self.least} and max_links {self.most}: expected 1 <= min_links <= max_links <= "
                f"{MOST_NAMES // 2}, since every link and every one to skip has a letter of its own"
            )
        if not 2 <= self.guess_of <= DIGITS:
            raise ValueError(f"guess_of {self.guess_of}: expected a number of values from 2 to {DIGITS}")
        for name, shares in (("sum_shares", self.sum_shares), ("guess_shares", self.guess_shares)):
            if not shares or not all(0 <= share <= 1 for share in shares):
                raise ValueError(f"{name} {list(shares)}: expected at least one share, each from 0 to 1")

    def length_weights(self) -> list[float]:
        """The weights of the lengths from `least` to `most`; heavy-tailed for a small `tail`."""
        return [(k + 1.0) ** -self.tail for k in range(self.most - self.least + 1)]

    def draw(self, task_id: str, seed: int | str) -> Chain:
        """The chain of `seed`: the same on every machine."""
        rng = random.Random(f"chain:{seed}")
        count = rng.choices(range(self.least, self.most + 1), self.length_weights())[0]
        sums, guesses = rng.choice(self.sum_shares), rng.choice(self.guess_shares)
        kinds: list[Kind] = []
        for _ in range(count):
            if rng.random() < self.skips:
                kinds.append("skip")
            kinds.append("sum" if rng.random() < sums else "guess" if rng.random() < guesses else "copy")
        names = rng.sample(string.ascii_lowercase, len(kinds))
        listed = tuple(self._link(name, kind, rng) for name, kind in zip(names, kinds, strict=True))
        return Chain(task_id, rng.randrange(DIGITS), listed, self.guess_of)

    def _link(self, name: str, kind: Kind, rng: random.Random) -> Link:
        return Link(
            name,
            kind,
            operand=rng.randrange(1, DIGITS) if kind == "sum" else 0,
            hidden=rng.randrange(self.guess_of) if kind == "guess" else 0,
            gives=rng.randrange(DIGITS),
            lost=rng.randrange(DIGITS),
        )


@dataclass(slots=True)
class Walk:
    """Where an episode stands in its chain.

    `call(name, value)` gives the tool's answer, as text. `done`: links called rightly so far. Once `lost`, nothing
    leads back: every further answer says so too.
    """

    chain: Chain
    value: int
    done: int = 0
    calls: int = 0
    lost: bool = False

    @classmethod
    def begin(cls, chain: Chain) -> Walk:
        return cls(chain, chain.start)

    def call(self, name: str, value: int) -> str:
        """Carry out one call."""
        links = self.chain.links
        self.calls += 1
        right = not self.lost and self.done < len(links) and links[self.done].name == name
        if right and value == self.chain.right_value(self.done, self.value):
            self.value = links[self.done].gives
            self.done += 1
            return str(self.value)
        return self.lose(_named(self.chain.listed, name))

    def lose(self, at: Link | None = None) -> str:
        """What is no right call: the episode is lost from here on."""
        self.lost = True
        self.value = at.lost if at is not None else (self.value + self.calls) % DIGITS
        return f"lost {self.value}"

    def solved_by(self, answer: str) -> bool:
        """Whether the episode may be ended with `answer`: all links called, none wrongly, and their result named."""
        return not self.lost and self.done == len(self.chain.links) and answer.strip() == str(self.chain.result)


def _named(links: Sequence[Link], name: str) -> Link | None:
    return next((link for link in links if link.name == name), None)
