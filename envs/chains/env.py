"""`sao/Chains-v0`: a chain of tool calls, each with the result of the one before; one mistake, and it is lost.

It is made for studies of credit assignment (docs/chains.md): difficulty that the prompt shows and that differs widely,
one reward at the end, a mistake that is seen at once and never undone, lengths with a heavy tail, a new prompt every
time. Nothing runs outside this process, and a step takes microseconds.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Iterator, Sequence
from typing import Annotated, Any, overload

from pydantic import Field

from envs.arguments import Count, check_options, checked_arguments
from envs.chains.chain import DIGITS, Chain, Mix, Walk
from envs.core import TRUNCATIONS, AsyncEnv, Step
from envs.said import said
from envs.tool_calls import parse_action

LINK_TOOL: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "link",
        "description": "Call one link of the chain with a digit; it answers with the next one.",
        "parameters": {
            "type": "object",
            "properties": {
                "at": {"type": "string", "description": "The link's letter."},
                "value": {"type": "integer", "description": "The digit that it takes."},
            },
            "required": ["at", "value"],
        },
    },
}
"""The OpenAI schema of the one tool."""

SYSTEM_PROMPT = (
    "Call the links one after the other with the tool, one call a message. A link takes the digit that the last call "
    "gave (the first one: the start). a: as it is. a+3: plus 3, modulo 10. a?: plus a number that nobody knows. (a): "
    "leave it out. After the last link answer with its digit alone, without a call. A wrong call is not forgiven."
)
"""What opens an episode unless `system_prompt` says otherwise."""

_SPARE_TURNS = 4

Share = Annotated[float, Field(ge=0, le=1)]


class _Ids(Sequence[str]):
    """The ids of `size` tasks of a seed, made when they are asked for: `<seed>/<index>`."""

    def __init__(self, seed: int, size: int) -> None:
        self.seed, self.size = seed, size

    def __len__(self) -> int:
        return self.size

    @overload
    def __getitem__(self, index: int) -> str: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[str]: ...
    def __getitem__(self, index: int | slice) -> str | Sequence[str]:
        if isinstance(index, slice):
            return [f"{self.seed}/{i}" for i in range(self.size)[index]]
        return f"{self.seed}/{range(self.size)[index]}"

    def __iter__(self) -> Iterator[str]:
        return (f"{self.seed}/{i}" for i in range(self.size))

    def __contains__(self, task_id: object) -> bool:
        seed, slash, index = str(task_id).partition("/")
        return bool(slash) and seed == str(self.seed) and index.isdecimal() and str(int(index)) == index and (
            int(index) < self.size
        )  # fmt: skip


class Chains(AsyncEnv):
    """Chains of tool calls; `docs/chains.md` is its manual page.

    `size` tasks are made from `seed`; two seeds have different ones. `min_links`, `max_links`: how many calls a chain
    takes. `tail`: the smaller, the more long ones. `sum_shares`, `guess_shares`: a chain draws one of each, the chance
    of a link to be a sum, else a guess of `guess_of` values. `skips`: how often a link to leave out is listed before
    another. `max_turns`: actions that an episode may take; None for all links and a few more. `system_prompt`: "" for
    none.
    """

    @checked_arguments()
    def __init__(
        self,
        *,
        size: Count = 200_000,
        seed: int = 0,
        min_links: Count = 2,
        max_links: Count = 12,
        tail: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 1.0,
        sum_shares: Sequence[Share] = (0.0, 0.8),
        guess_shares: Sequence[Share] = (0.0, 0.0, 1.0),
        guess_of: Annotated[int, Field(ge=2, le=DIGITS)] = 4,
        skips: Share = 0.2,
        max_turns: Count | None = None,
        system_prompt: str = SYSTEM_PROMPT,
    ) -> None:
        self.mix = Mix(min_links, max_links, tail, tuple(sum_shares), tuple(guess_shares), guess_of, skips)
        self._ids = _Ids(seed, size)
        self._max_turns = max_turns if max_turns is not None else max_links + _SPARE_TURNS
        self._system_prompt = system_prompt
        self._random = random.Random()
        self._walk: Walk | None = None  # None between episodes
        self._turns = self._malformed = 0

    @property
    def task_ids(self) -> Sequence[str]:
        """Every task's id; none is made before it is asked for."""
        return self._ids

    def chain(self, task_id: str) -> Chain:
        """The task `task_id`, with what no policy sees. Raises `ValueError` if there is none."""
        if task_id not in self._ids:
            raise ValueError(f"there is no task {task_id!r}; the first is {self._ids[0]!r}")
        return self.mix.draw(task_id, task_id)

    async def areset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[str, dict[str, Any]]:
        """Start an episode of `options["task_id"]`; a task that is not named is drawn with `seed`."""
        asked = check_options(options, "task_id")
        self._walk = None
        if seed is not None:
            self._random.seed(seed)
        drawn = self._random.randrange(len(self._ids))
        chain = self.chain(str(asked.get("task_id", self._ids[drawn])))
        self._walk, self._turns, self._malformed = Walk.begin(chain), 0, 0
        messages = [{"role": "system", "content": self._system_prompt}] if self._system_prompt else []
        messages.append({"role": "user", "content": chain.prompt})
        return chain.prompt, {
            "messages": messages,
            "tools": [copy.deepcopy(LINK_TOOL)],
            "task_id": chain.task_id,
            "segment": "prompt",
        }

    async def astep(self, action: str) -> Step:
        """Carry out one call, or end the episode with an answer."""
        walk = self._episode()
        self._turns += 1
        parsed = parse_action(action, [LINK_TOOL], self.tool_format)
        if parsed.call is None and parsed.error is None:
            return self._finish(walk, action, None)
        if parsed.call is not None:
            observation = walk.call(str(parsed.call.arguments["at"]), int(parsed.call.arguments["value"]))
        else:  # no mistake is forgiven, so there is nothing to explain
            self._malformed += 1
            observation = walk.lose()
        if self._turns >= self._max_turns:
            return self._finish(walk, "", "turns")
        message = {"role": "tool", "content": observation, "tool_call_id": f"call_{self._turns}"}
        return observation, 0.0, False, False, {"messages": [message], "segment": "observation"}

    async def atruncate(self, reason: str, action: str = "") -> Step:
        """End the episode for `reason`, with `action` as the answer if it is one."""
        if reason not in TRUNCATIONS:
            raise ValueError(f"a truncation is one of {', '.join(TRUNCATIONS)}, not {reason!r}")
        return self._finish(self._episode(), action, reason)

    async def aclose(self) -> None:
        """End the episode."""
        self._walk = None

    def _episode(self) -> Walk:
        if self._walk is None:
            raise RuntimeError("no episode is running: reset the environment first")
        return self._walk

    def _finish(self, walk: Walk, action: str, truncation: str | None) -> Step:
        self._walk = None
        solved = walk.solved_by(said(action, self.tool_format))
        kinds = [link.kind for link in walk.chain.listed]
        info: dict[str, Any] = {
            "messages": [],
            "segment": "observation",
            "metrics": {
                "links": len(walk.chain.links),
                "done": walk.done,
                "lost": walk.lost,
                "sums": kinds.count("sum"),
                "guesses": kinds.count("guess"),
                "malformed_calls": self._malformed,
                "attainable": walk.chain.attainable,
                "correct": solved,
            },
        }
        if truncation is not None:
            info["truncation"] = truncation
        return "", float(solved), truncation is None, truncation is not None, info
