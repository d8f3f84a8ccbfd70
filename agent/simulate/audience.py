"""Who the simulated users are: what they ask, and what they think of the replies. One kind for styles, one for any
environment."""

from __future__ import annotations

import json
import random
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from envs import AsyncEnv, make_core
from envs.core import Message
from envs.style_shift.env import StyleShift
from envs.tool_calls import write_calls
from envs.tool_formats.reading import ToolCall

Chat = Callable[[Sequence[Message], Sequence[dict[str, Any]]], Awaitable[dict[str, Any]]]
"""(messages, tools) -> what the server answers; all calls of one conversation are one session."""

LONGEST_CONVERSATION = 64
"""Turns after which users give up; environments have limits of their own."""


@dataclass(frozen=True)
class Judgement:
    """One conversation that is over: the last `answer`, the `reward` (0 to 1) and what the feedback says with it.

    `style` and `target` are "" where there are none.
    """

    answer: dict[str, Any]
    task_id: str
    reward: float
    metadata: Mapping[str, Any] = field(default_factory=dict)
    style: str = ""
    target: str = ""
    quality: int = 1


class Audience(Protocol):
    """Users of one kind; `steps`: for how many policy steps they stay. `sessions`: they say more than one thing."""

    @property
    def sessions(self) -> bool: ...

    @property
    def steps(self) -> int: ...

    async def converse(self, chat: Chat, rng: random.Random, step: int) -> Judgement:
        """Hold one conversation in policy step `step`; what is drawn is drawn from `rng`. Raises `EnvironmentFault`."""
        ...

    async def aclose(self) -> None:
        """Give back what they have."""
        ...


class StyleAudience:
    """Users of `sao/StyleShift-v0`: one question each, and a preferred style that follows the schedule."""

    sessions = False

    def __init__(self, env: StyleShift) -> None:
        self.env = env

    @property
    def steps(self) -> int:
        """The schedule's."""
        return self.env.schedule.steps

    async def converse(self, chat: Chat, rng: random.Random, step: int) -> Judgement:
        """Quality times style, as the environment's judge sees them."""
        env = self.env
        task_id, target = rng.choice(env.task_ids), env.schedule.at(step).style
        answer = await chat(env.messages(task_id, step), ())
        verdict = await env.verdict(task_id, answer["choices"][0]["message"]["content"] or "", step)
        metadata = {"style": verdict.style, "target": target, "phase": env.schedule.index(step), "step": step}
        return Judgement(answer, task_id, verdict.reward(target), metadata, verdict.style, target, int(verdict.quality))

    async def aclose(self) -> None:
        """Its judge's connections."""
        await self.env.aclose()


class EnvironmentAudience:
    """Users of any environment: its prompts are what they ask, its observations what they say next, and the sum of its
    rewards, held to 0 ... 1, is their verdict on the last reply.

    The environments live here, one for every conversation at once; the server knows nothing of them.
    """

    sessions = True

    def __init__(self, make: Callable[[], AsyncEnv], steps: int) -> None:
        self._make, self.steps = make, steps
        self._free: list[AsyncEnv] = []

    @classmethod
    def of(cls, env_id: str, kwargs: Mapping[str, Any], steps: int) -> EnvironmentAudience:
        """Of `make_core(env_id, **kwargs)`; a wrong argument is said now."""
        made = cls(lambda: make_core(env_id, **kwargs), steps)
        made._free.append(make_core(env_id, **kwargs))
        return made

    async def converse(self, chat: Chat, rng: random.Random, step: int) -> Judgement:
        """One episode, played over the server's public interface."""
        env = self._free.pop() if self._free else self._make()
        try:
            judgement = await self._episode(env, chat, rng, step)
        except BaseException:
            await env.aclose()
            raise
        self._free.append(env)
        return judgement

    async def _episode(self, env: AsyncEnv, chat: Chat, rng: random.Random, step: int) -> Judgement:
        task_id = rng.choice(env.task_ids)
        _, info = await env.areset(seed=rng.randrange(2**31), options={"task_id": task_id})
        messages, tools, total = list(info["messages"]), list(info.get("tools", ())), 0.0
        for turn in range(LONGEST_CONVERSATION):
            answer = await chat(messages, tools)
            [choice] = answer["choices"]
            cut, last = choice["finish_reason"] == "length", turn == LONGEST_CONVERSATION - 1
            text = action_of(choice["message"])
            if cut or last:
                _, reward, *_ = await env.atruncate("turn_tokens" if cut else "turns", text)
                total += reward
                break
            _, reward, terminated, truncated, info = await env.astep(text)
            total += reward
            if terminated or truncated:
                break
            messages += [choice["message"], *info["messages"]]
        return Judgement(answer, task_id, min(1.0, max(0.0, total)), {"step": step, "turns": turn + 1})

    async def aclose(self) -> None:
        """The environments that are not in a conversation."""
        while self._free:
            await self._free.pop().aclose()


def action_of(message: Mapping[str, Any]) -> str:
    """A reply as an environment reads it: its text, and its calls in the form that environments take by default.

    The server has read the calls from the model's own text, so they are sound.
    """
    called = [call["function"] for call in message.get("tool_calls") or ()]
    text = message.get("content") or ""
    if not called:
        return text
    written = write_calls([ToolCall(call["name"], json.loads(call["arguments"])) for call in called])
    return f"{text}\n{written}" if text else written
