"""Simulated users: they ask, judge what they get, and say so. What they ask and like is their audience's."""

from __future__ import annotations

import asyncio
import random
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import aiohttp

from agent.simulate.audience import Audience
from agent.simulate.clock import PolicyClock, Stalled
from agent.simulate.recovery import Interaction
from envs.core import Message

_FIRST_WAIT_S, _LONGEST_WAIT_S = 0.2, 5.0


class UserFault(RuntimeError):
    """The server does not do what its interface says; the message has its answer."""


@dataclass
class Users:
    """`concurrency` users of the server at `url`, over its public HTTP interface only.

        users = Users(session, url, "style_shift_tiny", StyleAudience(env), clock, batch=32, seed=0)
        interactions = await users.run()

    What they prefer may follow the clock's step. They pace themselves: at step s at most
    (s + 1 + `ahead`) * `batch` conversations are begun, so that two methods get equally many at equal steps,
    however fast the machine is. Each asks again `pace_s` after its last question at the earliest. Prompts are drawn
    from `seed`.
    """

    session: aiohttp.ClientSession
    url: str
    model: str
    audience: Audience
    clock: PolicyClock
    batch: int
    seed: int = 0
    concurrency: int = 16
    ahead: int = 1
    patience_s: float = 600.0
    pace_s: float = 0.0
    headers: dict[str, str] = field(default_factory=dict)
    on_interaction: Callable[[Interaction], None] = lambda interaction: None
    _begun: int = 0
    _interactions: list[Interaction] = field(default_factory=list)

    async def run(self) -> list[Interaction]:
        """Use the server until the audience leaves; every interaction in the order of its beginning.

        Raises `Stalled` when the policy stops moving and `UserFault` for answers that nobody may give.
        """
        async with asyncio.TaskGroup() as group:
            for _ in range(self.concurrency):
                group.create_task(self._user())
        return sorted(self._interactions, key=lambda interaction: interaction.index)

    async def _user(self) -> None:
        while True:
            index, self._begun = self._begun, self._begun + 1
            needed = index // self.batch - self.ahead
            if needed >= self.audience.steps:
                return
            await self.clock.reach(needed, patience_s=self.patience_s)
            if self.clock.step >= self.audience.steps:
                return
            began = time.monotonic()
            await self._interact(index)
            await asyncio.sleep(max(0.0, began + self.pace_s - time.monotonic()))

    async def _interact(self, index: int) -> None:
        rng = random.Random(f"{self.seed}:{index}")
        step, began = self.clock.step, time.monotonic()
        session = f"simulated-{self.seed}-{index}-{uuid.uuid4().hex[:8]}"

        async def chat(messages: Sequence[Message], tools: Sequence[dict[str, Any]]) -> dict[str, Any]:
            question = {
                "model": self.model,
                "messages": list(messages),
                "user": f"simulated-{index % self.concurrency}",
                "seed": rng.randrange(2**31),
                **({"session": session} if self.audience.sessions else {}),
                **({"tools": list(tools)} if tools else {}),
            }
            return await self._post("/v1/chat/completions", question)

        judged = await self.audience.converse(chat, rng, step)
        told = {"response_id": judged.answer["id"], "reward": judged.reward, "final": True}
        await self._post("/v1/feedback", {**told, "metadata": dict(judged.metadata)})
        interaction = Interaction(
            index=index,
            step=step,
            version=judged.answer["policy_version"],
            task_id=judged.task_id,
            style=judged.style,
            target=judged.target,
            quality=judged.quality,
            reward=judged.reward,
            seconds=time.monotonic() - began,
        )
        self._interactions.append(interaction)
        self.on_interaction(interaction)

    async def _post(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        """The answer of a call that is made again while the server is busy or away. Feedback may be sent twice."""
        deadline, wait_s = time.monotonic() + self.patience_s, _FIRST_WAIT_S
        while True:
            try:
                async with self.session.post(self.url + path, json=body, headers=self.headers) as answer:
                    if answer.status == 200:
                        decoded: dict[str, Any] = await answer.json()
                        return decoded
                    problem = f"{path} was answered {answer.status}: {(await answer.text())[:500]}"
                    if answer.status != 429 and answer.status < 500:
                        raise UserFault(problem)
            except (aiohttp.ClientError, TimeoutError) as error:
                problem = f"{path} was not answered: {error!r}"
            if time.monotonic() > deadline:
                raise Stalled(problem)
            await asyncio.sleep(wait_s)
            wait_s = min(2 * wait_s, _LONGEST_WAIT_S)
