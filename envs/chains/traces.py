"""Players of chains, for a policy's cold start: one that knows the way, and one with a weak policy's mistakes."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field

from envs.chains.chain import DIGITS, Chain
from envs.chains.env import Chains
from envs.core import Message
from envs.tool_calls import FamilyFormat, ToolCall, write_calls

COPY, SKIP, STOP = 0.05, 0.2, 0.02
"""How much rarer than in a sum mistakes are in copying, in leaving links out, and in not stopping."""


def chance(chain: Chain, index: int, error_rate: float) -> float:
    """The chance that a `Player` that is not lost makes the right call at link number `index` of `chain.links`."""
    link = chain.links[index]
    at = chain.listed.index(link)
    right = {"sum": 1 - error_rate, "guess": 1 / chain.guess_of}.get(link.kind, 1 - error_rate * COPY)
    if at and chain.listed[at - 1].kind == "skip":
        right *= 1 - error_rate * SKIP
    return right * (1 - error_rate * STOP) if index else right


@dataclass
class Player:
    """Writes the actions of one trace, fed with each observation. `done`: the last action was an answer.

    Without an `error_rate` it knows even what guesses take, and solves every chain. With one, a sum is off by one
    with that probability, other mistakes are rarer (`COPY`, `SKIP`, `STOP`), and guesses are guesses. Once it is lost
    it goes on as if it were not.
    """

    chain: Chain
    rng: random.Random
    error_rate: float = 0.0
    tool_format: FamilyFormat = "hermes"
    done: bool = field(init=False, default=False)
    _value: int = field(init=False)
    _next: int = field(init=False, default=0)

    def __post_init__(self) -> None:
        self._value = self.chain.start

    def next_action(self, observation: str | None) -> str:
        """The next action after `observation` (None: at the start)."""
        if observation is not None:
            self._value = int(observation.split()[-1])
        links = self.chain.links
        if self._next >= len(links) or (self._next and self._errs(STOP)):
            self.done = True
            return str(self._value)
        if (skipped := self._skippable()) is not None and self._errs(SKIP):
            return self._call(skipped, self._value)
        link, value = links[self._next], self.chain.right_value(self._next, self._value)
        if self.error_rate and link.kind == "guess":
            value = (self._value + self.rng.randrange(self.chain.guess_of)) % DIGITS
        elif self._errs(1.0 if link.kind == "sum" else COPY):
            value = (value + self.rng.choice((-1, 1))) % DIGITS
        self._next += 1
        return self._call(link.name, value)

    def _errs(self, how_often: float) -> bool:
        return bool(self.error_rate) and self.rng.random() < self.error_rate * how_often

    def _skippable(self) -> str | None:
        """The link before the next one, if it is one to leave out."""
        before = None
        for link in self.chain.listed:
            if link == self.chain.links[self._next]:
                return before
            before = link.name if link.kind == "skip" else None
        return None

    def _call(self, name: str, value: int) -> str:
        return write_calls([ToolCall("link", {"at": name, "value": value})], self.tool_format)


async def write_traces(
    env: Chains, task_ids: Sequence[str], *, seed: int, error_rate: float
) -> AsyncIterator[list[Message]]:
    """Yield the messages of one trace a task of `env`, played in it."""
    rng = random.Random(seed)
    for task_id in task_ids:
        _, info = await env.areset(options={"task_id": task_id})
        messages: list[Message] = list(info["messages"])
        player = Player(env.chain(task_id), random.Random(rng.getrandbits(64)), error_rate)
        observation: str | None = None
        while True:
            action = player.next_action(observation)
            messages.append({"role": "assistant", "content": action})
            observation, _, terminated, truncated, step = await env.astep(action)
            if terminated or truncated:
                break
            messages += step["messages"]
        yield messages
