"""What an environment asks the engine of its own episode: a judge, a user simulator, another role of the same model.

Its tokens are sampled as an action's are, with the same limits and the same retries, and then they are forgotten: they
are in no segment, so nothing is trained on them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any, Protocol

import msgspec

from agent.chat.template import ChatTemplateError
from agent.engines.base import Engine, EngineFault
from agent.engines.prompt import Prompt
from agent.runtime.engine_requests import ActionSampler, Recover
from agent.runtime.episode_clock import EpisodeClock
from agent.runtime.settings import SamplingConfig, StageLimits
from agent.store.protocol import Ticket
from envs.asking.endpoint import ModelFault
from envs.core import Message
from envs.tool_calls import visible_text

_SEEDS_APART = 1_000_003


class _Rendered(Protocol):
    @property
    def token_ids(self) -> Sequence[int]: ...


class Renderer(Protocol):
    """What is needed of `agent.chat.renderer.ChatRenderer`."""

    @property
    def stop_token_ids(self) -> Sequence[int]: ...

    def start(self, messages: Sequence[Message], tools: Sequence[dict[str, Any]]) -> _Rendered: ...

    def decode(self, ids: Sequence[int]) -> str: ...


class AskedEngine:
    """The engine of one episode as an `envs.core.Model`, which is handed to the environment.

    Several questions may be asked at once. Each may take `limits.generate_s` in all; whatever keeps it from an answer
    is a `ModelFault`, and so the environment's. With `seeded` each has a seed that follows from the ticket's.
    """

    def __init__(
        self,
        engine: Engine,
        ticket: Ticket,
        renderer: Renderer,
        limits: StageLimits,
        recover: Recover | None,
        *,
        seeded: bool = False,
    ) -> None:
        self._engine, self._ticket, self._renderer, self._limits = engine, ticket, renderer, limits
        self._recover, self._seeded = recover, seeded
        self._moving = asyncio.Lock()
        self._questions = 0
        self.tokens = 0

    async def chat(
        self, messages: Sequence[Message], *, max_tokens: int = 512, temperature: float = 1.0, stop: Sequence[str] = ()
    ) -> str:
        """See `envs.core.Model.chat`."""
        self._questions += 1
        own = self._ticket
        # Another seed than the actions have, which are drawn from the ticket's.
        seed = own.seed + self._questions * _SEEDS_APART
        ticket = msgspec.structs.replace(own, id=f"{own.id}.asked{self._questions}", seed=seed)
        sampler = ActionSampler(
            self._engine,
            ticket,
            SamplingConfig(temperature=temperature, stop=tuple(stop), seeded=self._seeded),
            tuple(self._renderer.stop_token_ids),
            request_limit_s=self._limits.generate_s,
            clock=EpisodeClock(self._limits.generate_s),
            recover=None if self._recover is None else self._recovered,
            patience_s=self._limits.generate_s,
        )
        try:
            prompt = Prompt(self._renderer.start(list(messages), []).token_ids)
            action = await sampler.sample(prompt, max_tokens)
        except (EngineFault, ChatTemplateError) as error:
            raise ModelFault(f"the engine did not answer the environment's question: {error}") from error
        self.tokens += len(action.token_ids)
        if action.finish_reason in ("abort", "wall_clock"):
            limit = f"within limits.generate_s={self._limits.generate_s:g} s"
            raise ModelFault(f"the engine did not answer the environment's question {limit} ({action.finish_reason})")
        text = _before(visible_text(self._renderer.decode(action.token_ids)), stop).strip()
        if not text and action.finish_reason == "length":
            raise ModelFault(f"the engine was still thinking when max_tokens={max_tokens} were used up: raise it")
        return text

    async def _recovered(self, fault: EngineFault) -> None:
        # One at a time: an episode has one seat, and each failed question wants it moved.
        assert self._recover is not None
        async with self._moving:
            await self._recover(fault)


def _before(text: str, stops: Sequence[str]) -> str:
    """`text` before the first of `stops`."""
    return text[: min((text.find(stop) for stop in stops if stop in text), default=len(text))]
