"""`TurnEnv`: what adapters share. A task opens with messages and tools, is played in turns, and is graded at its end.

An adapter says how a task is opened, what an action does, and what the end is worth; see `TurnEnv` for the order of
its calls. Malformed tool calls, limits, the transcript, figures and the way out of every failure are here.
"""

from __future__ import annotations

import json
import random
import time
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from envs.arguments import ArgumentError, check_options
from envs.core import TRUNCATIONS, AsyncEnv, EnvironmentFault, Message, Step
from envs.tool_calls import ToolCall, parse_calls
from sandboxes.cancellation import to_the_end

MAX_TURNS = 50


@dataclass(frozen=True, slots=True)
class Opening:
    """What a task opens with: chat messages, OpenAI tool schemas, and the kind of task (for figures by kind).

    `reads_calls` False: the task reads the policy's text itself, tool calls and all.
    """

    messages: list[Message]
    tools: list[dict[str, Any]] = field(default_factory=list)
    family: str = ""
    reads_calls: bool = True


@dataclass(frozen=True, slots=True)
class Reply:
    """What an action brought: messages for the policy, a reward for this turn, and whether the task has ended.

    `truncation`: one of `envs.core.TRUNCATIONS` where the task itself was cut short.
    """

    messages: list[Message] = field(default_factory=list)
    reward: float = 0.0
    ended: bool = False
    truncation: str | None = None


class TurnEnv(AsyncEnv):
    """The turns of an adapted task.

    idle ──_open()──▶ playing ──_act()*──▶ _grade() ──_release()──▶ idle

    `_grade` is skipped where a call before it failed; `_release` never is, and it may be called when nothing is held.
    `max_turns`: actions an episode may take; `wall_clock_s`: seconds from reset to the end (None: no limit).
    """

    def __init__(self, *, max_turns: int = MAX_TURNS, wall_clock_s: float | None = None) -> None:
        self._max_turns, self._wall_clock_s = max_turns, wall_clock_s
        self._random = random.Random()
        self._playing = False
        self._tools: list[dict[str, Any]] = []
        self._family = ""
        self._deadline = float("inf")
        self._turns = self._calls = self._malformed = 0
        self.transcript: list[Message] = []
        """The conversation so far, the policy's messages too, their tool calls as OpenAI's chat format has them."""

    # what an adapter says

    @abstractmethod
    async def _open(self, task_id: str, seed: int | None) -> Opening:
        """Make the task ready to be played."""

    @abstractmethod
    async def _act(self, action: str, calls: Sequence[ToolCall], content: str) -> Reply:
        """Carry out one action: its sound tool calls, or its text where it has none. `content`: it without the calls.

        The id of call number `i` of this turn is `self.call_id(i)`.
        """

    @abstractmethod
    async def _grade(self, truncation: str | None) -> tuple[float, dict[str, Any]]:
        """The reward of the end beside those of the turns, and figures. `truncation`: why the task was cut short."""

    @abstractmethod
    async def _release(self) -> None:
        """Give back what the task holds."""

    # what is the same for all

    async def areset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[str, dict[str, Any]]:
        """Start an episode: of `options["task_id"]`, else of a task drawn with `seed`.

        Raises `ValueError` for an unknown task or option, and `EnvironmentFault` where it cannot be opened.
        """
        asked = check_options(options, "task_id")
        await self._end()
        if seed is not None:
            self._random.seed(seed)
        known = self.task_ids
        task_id = asked.get("task_id")
        if task_id is None:
            task_id = known[self._random.randrange(len(known))]
        elif task_id not in known:
            raise ValueError(f"there is no task {task_id!r}; the first is {known[0]!r}")
        self._turns = self._calls = self._malformed = 0
        # From here on: the time that opening takes is the task's own.
        self._deadline = float("inf") if self._wall_clock_s is None else time.monotonic() + self._wall_clock_s
        try:
            opening = await self._open(task_id, seed)
        except BaseException:
            await self._end()
            raise
        self._playing, self._family = True, opening.family
        self._tools = opening.tools if opening.reads_calls else []
        self.transcript = list(opening.messages)
        return text_of(opening.messages), {
            "messages": opening.messages,
            "tools": opening.tools,
            "task_id": task_id,
            "family": opening.family,
            "segment": "prompt",
        }

    async def astep(self, action: str) -> Step:
        """Carry out one action. Raises `EnvironmentFault` where the task's own machinery fails."""
        self._require_episode()
        try:
            return await self._step(action)
        except BaseException:
            await self._end()
            raise

    async def atruncate(self, reason: str, action: str = "") -> Step:
        """End the episode for `reason`, graded as it stands; no call in `action` is carried out."""
        self._require_episode()
        if reason not in TRUNCATIONS:
            raise ValueError(f"a truncation is one of {', '.join(TRUNCATIONS)}, not {reason!r}")
        if action:
            self._turns += 1
            self.transcript.append({"role": "assistant", "content": action})
        try:
            return await self._finish(0.0, reason)
        except BaseException:
            await self._end()
            raise

    async def aclose(self) -> None:
        """End the episode and give everything back."""
        await self._end()

    def call_id(self, number: int) -> str:
        """The id of call `number` (from 0) of the current turn."""
        return f"call_{self._turns}" + (f"_{number}" if number else "")

    def left_s(self, limit_s: float) -> float:
        """`limit_s`, or what is left of the episode's time if that is less (at least 1 s)."""
        return min(limit_s, max(1.0, self._deadline - time.monotonic()))

    async def _step(self, action: str) -> Step:
        self._turns += 1
        parsed = parse_calls(action, self._tools, self.tool_format) if self._tools else None
        calls = () if parsed is None else parsed.calls
        content = action if parsed is None else parsed.content
        said: Message = {"role": "assistant", "content": content}
        if calls:
            said["tool_calls"] = [_as_openai(call, self.call_id(i)) for i, call in enumerate(calls)]
        self.transcript.append(said)
        self._calls += len(calls)
        if parsed is not None and (mistake := parsed.error or self._unknown(calls)) is not None:
            self._malformed += 1
            reply = Reply([{"role": "tool", "content": mistake, "tool_call_id": self.call_id(0)}])
        elif calls and (due := self._over()) is not None:
            return await self._finish(0.0, due)  # nobody would read what they bring
        else:
            reply = await self._act(action, calls, content)
        if reply.ended:
            return await self._finish(reply.reward, reply.truncation)
        self.transcript += reply.messages
        if (due := self._over()) is not None:
            return await self._finish(reply.reward, due)
        info = {"messages": reply.messages, "segment": "observation"}
        return text_of(reply.messages), reply.reward, False, False, info

    async def _finish(self, reward: float, truncation: str | None) -> Step:
        graded, figures = await self._grade(truncation)
        metrics = {
            "turns": self._turns,
            "tool_calls": self._calls,
            "malformed_calls": self._malformed,
            **figures,
            "family": self._family,
        }
        await self._end()
        info: dict[str, Any] = {"messages": [], "segment": "observation", "metrics": metrics}
        if truncation is not None:
            info["truncation"] = truncation
        return "", reward + graded, truncation is None, truncation is not None, info

    async def _end(self) -> None:
        self._playing = False
        await to_the_end(self._release())

    def _require_episode(self) -> None:
        if not self._playing:
            raise RuntimeError("no episode is running: reset the environment first")

    def _unknown(self, calls: Sequence[ToolCall]) -> str | None:
        """What to tell a policy that calls a tool which is not there; then none of its calls is carried out."""
        names = [tool["function"]["name"] for tool in self._tools]
        unknown = next((call.name for call in calls if call.name not in names), None)
        if unknown is None:
            return None
        return f"There is no tool {unknown[:40]!r}; the tools are: {', '.join(names)}. Nothing was done."

    def _over(self) -> str | None:
        if time.monotonic() >= self._deadline:
            return "wall_clock"
        return "turns" if self._turns >= self._max_turns else None


def text_of(messages: Sequence[Message]) -> str:
    """The observation that goes with `messages`: the texts of those that are not the system's."""
    return "\n".join(str(message.get("content") or "") for message in messages if message["role"] != "system")


def task_range(tasks: Mapping[str, Any], count: int | None = None) -> range:
    """Which tasks of a long row are meant: `{start: 0, count: 100}`; `start` may be left out, `count` if given here.

    Raises `ArgumentError`.
    """
    wanted = {"start": 0, **({} if count is None else {"count": count}), **tasks}
    sound = set(wanted) == {"start", "count"} and all(type(value) is int for value in wanted.values())
    if not sound or wanted["start"] < 0 or wanted["count"] < 1:
        raise ArgumentError(f"tasks: {{start: 0, count: 100}} is how they are given, not {dict(tasks)!r}")
    return range(wanted["start"], wanted["start"] + wanted["count"])


def sendable(data: dict[str, Any]) -> dict[str, Any]:
    """`data` with a question mark for each half of a surrogate pair: a model may write one, and servers choke on it."""
    found: dict[str, Any] = json.loads(json.dumps(data, ensure_ascii=False).encode("utf-8", "replace"))
    return found


def reward_number(value: Any, what: str) -> float:
    """A finite number that something outside calls a reward. Raises `EnvironmentFault`, which names `what`."""
    if isinstance(value, bool | int | float):
        number = float(value)
        if number == number and abs(number) != float("inf"):
            return number
    raise EnvironmentFault(f"{what} must be a finite number, not {value!r}")


def _as_openai(call: ToolCall, identity: str) -> dict[str, Any]:
    arguments = json.dumps(call.arguments, ensure_ascii=False)
    return {"id": identity, "type": "function", "function": {"name": call.name, "arguments": arguments}}


def missing_library(module: str, extra: str, error: ImportError) -> ArgumentError:
    """The error for a library that is not installed; `extra` of this package brings it."""
    return ArgumentError(
        f"this environment needs the library {module}, which cannot be imported here ({error}): "
        f"pip install 'sao-agents[{extra}]', or name a Python that has it with runtime.python"
    )
