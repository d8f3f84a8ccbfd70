"""`Verifiers`: an environment of the verifiers library (its v1), with our runtime in the place of its model.

The library runs the whole rollout: its tasks, tool servers, stop conditions, hooks, trace and rewards. What it asks its
model becomes an observation here, and the policy's action is what the model answers.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from envs.adapters.turns import MAX_TURNS, Opening, Reply, TurnEnv, reward_number, sendable, task_range
from envs.adapters.verifiers.endpoint import Asked
from envs.adapters.verifiers.library import Episode, Serving, acquire, load_environment, release
from envs.arguments import ArgumentError, Count, Seconds, checked_arguments
from envs.core import EnvironmentFault, Message
from envs.tool_calls import ToolCall, visible_text

SUBPROCESS: Mapping[str, Any] = {"type": "subprocess"}


class Verifiers(TurnEnv):
    """Tasks of a verifiers taskset; `docs/suites.md` is the manual page.

    `taskset`: its id, or its id with keys of its configuration. `path`: a folder with tasksets that are not installed.
    `tasks`: which of them by position, `{start: 0, count: 100}`; with it nothing is loaded to know the tasks, so that
    a process without the library can plan a run. `runtime`: where the library runs a task's own commands, e.g.
    `{type: docker}`. `max_turns`, `wall_clock_s`: of an episode, beside the library's own limits.
    """

    @checked_arguments(apart=("taskset", "path", "tasks", "runtime"))
    def __init__(
        self,
        taskset: str | Mapping[str, Any],
        *,
        path: str | Path | None = None,
        tasks: Mapping[str, Any] | None = None,
        runtime: Mapping[str, Any] = SUBPROCESS,
        max_turns: Count = MAX_TURNS,
        wall_clock_s: Seconds | None = None,
    ) -> None:
        super().__init__(max_turns=max_turns, wall_clock_s=wall_clock_s)
        named = {"id": taskset} if isinstance(taskset, str) else dict(taskset)
        if not isinstance(named.get("id"), str) or not named["id"]:
            raise ArgumentError(f"taskset must be a taskset's id, or a mapping with an id, not {taskset!r}")
        self._taskset, self._runtime = named, dict(runtime)
        self._path = None if path is None else Path(path).expanduser().resolve()
        self._chosen = None if tasks is None else task_range(tasks)
        self._serving: Serving | None = None
        self._episode: Episode | None = None
        self._asked: Asked | None = None
        self._seen: list[Message] = []
        self._last_reward = 0.0

    @property
    def task_ids(self) -> Sequence[str]:
        """Positions in the taskset, as text. Without `tasks` the taskset is loaded and counted."""
        if self._chosen is None:
            taskset = load_environment(self._taskset, self._runtime, self._path).taskset
            if not taskset.bounded:
                raise ArgumentError(
                    f"tasks: the taskset {self._taskset['id']} has no end: say how many, {{count: 1000}}"
                )
            self._chosen = range(sum(1 for _ in taskset))
        return tuple(map(str, self._chosen))

    async def aclose(self) -> None:
        """End the episode, and give back this environment's share of the library's servers."""
        try:
            await super().aclose()
        finally:
            serving, self._serving = self._serving, None
            if serving is not None:
                await release(serving)

    async def _open(self, task_id: str, seed: int | None) -> Opening:
        if self._serving is None:
            self._serving = acquire(self._taskset, self._runtime, self._path)
        await self._serving.ready()
        self._episode = Episode(self._serving, await self._serving.task(int(task_id)))
        self._asked = await self._episode.next()
        if self._asked is None:
            raise EnvironmentFault(
                f"the rollout of task {task_id} of {self._taskset['id']} ended without asking anything"
            )
        self._seen = self._asked.messages
        return Opening([_plain(message) for message in self._seen], self._asked.tools, self._taskset["id"])

    async def _act(self, action: str, calls: Sequence[ToolCall], content: str) -> Reply:
        made = self.transcript[-1].get("tool_calls") or []
        # Rewards read what was said; what was thought is not the answer.
        self._answer(visible_text(content), made, "tool_calls" if made else "stop")
        assert self._episode is not None
        asked = self._asked = await self._episode.next()
        if asked is None:
            return Reply(ended=True, truncation="turns" if self._episode.trace.is_truncated else None)
        before, answer, new = _split(self._seen, asked.messages)
        if before != self._seen or answer is None:
            raise EnvironmentFault(
                f"{self._taskset['id']} rewrote the conversation, and an episode only ever grows: not supported"
            )
        self._seen = asked.messages
        return Reply([_plain(message) for message in new])

    async def _grade(self, truncation: str | None) -> tuple[float, dict[str, Any]]:
        assert self._episode is not None
        if self._asked is not None:  # cut short by the runtime: the library's turn is answered one last time, and ends
            last = self.transcript[-1]
            if last["role"] == "assistant" and not last.get("tool_calls"):
                self._answer(visible_text(str(last["content"])), [], "length")
            else:
                self._asked.end()
            self._asked = None
            if await self._episode.next() is not None:
                raise EnvironmentFault(f"{self._taskset['id']} went on after its episode was cut short")
        trace = self._episode.trace
        reward = reward_number(trace.reward, f"the reward of {self._taskset['id']}")
        figures = {name: value for name, value in trace.metrics.items() if math.isfinite(value)}
        return reward, {**figures, **{f"reward_{name}": one.score for name, one in trace.rewards.items()}}

    async def _release(self) -> None:
        episode, asked = self._episode, self._asked
        self._episode = self._asked = None
        if asked is not None:
            asked.end()
        if episode is not None:
            await episode.close()

    def _answer(self, content: str, calls: list[dict[str, Any]], finish_reason: str) -> None:
        assert self._asked is not None
        self._asked.say(**sendable({"content": content, "calls": calls}), finish_reason=finish_reason)


def _split(seen: list[Message], now: list[Message]) -> tuple[list[Message], Message | None, list[Message]]:
    """What was there before, the policy's own message behind it, and what is new."""
    rest = now[len(seen) :]
    answer = rest[0] if rest and rest[0].get("role") == "assistant" else None
    return now[: len(seen)], answer, rest[1:]


def _plain(message: Message) -> Message:
    """A message whose content is one text. Raises `EnvironmentFault` for pictures and the like."""
    content = message.get("content")
    if isinstance(content, list):
        if not all(isinstance(part, dict) and part.get("type") == "text" for part in content):
            raise EnvironmentFault("a message holds something other than text, which is not supported")
        content = "\n".join(part["text"] for part in content)
    kept: Message = {key: message[key] for key in ("role", "tool_call_id", "tool_calls") if key in message}
    return {**kept, "content": content or ""}
