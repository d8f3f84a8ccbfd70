"""Who acts in an evaluation: a chat endpoint, or rollout engines. To the rest both are one: `Actor`."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Protocol

from agent.backoff import Unreachable
from agent.chat.renderer import ChatRenderer
from agent.chat.template import ChatTemplateError
from agent.doors.door import DoorFault
from agent.engines.base import EngineFault, EngineHealth
from agent.engines.client import HttpEngine
from agent.engines.pool import EnginePool
from agent.evaluate.config import Endpoint, Evaluation, EvaluationError, RolloutEngine, WrongArgument
from agent.evaluate.endpoint.client import ChatClient
from agent.evaluate.endpoint.episode import chat_sample
from agent.evaluate.engine_episode import engine_sample, rollout_settings
from agent.evaluate.sample import Sample
from agent.runtime.settings import RolloutSettings
from envs.core import AsyncEnv
from envs.tool_calls import FamilyFormat

_HEALTH_S = 30.0


class Actor(Protocol):
    """Runs one sample at a time, any number beside each other."""

    @property
    def policy_version(self) -> int | None:
        """Which weights act, where that is told."""
        ...

    @property
    def tool_format(self) -> FamilyFormat:
        """The form of calls in the policy's texts."""
        ...

    @property
    def held_s(self) -> float:
        """How much longer requests wait because the endpoint asked for it."""
        ...

    async def sample(self, task_index: int, task_id: str, number: int, env: AsyncEnv) -> Sample:
        """One episode. What goes wrong with it alone is a fault in it; raises `EvaluationError` for the rest."""
        ...


@contextlib.asynccontextmanager
async def acting(evaluation: Evaluation) -> AsyncIterator[Actor]:
    """The actor of `evaluation`, and all that it holds until the end. Raises `EvaluationError`."""
    if isinstance(evaluation.policy, Endpoint):
        async with _chat_actor(evaluation, evaluation.policy) as chat:
            yield chat
    else:
        async with _engine_actor(evaluation, evaluation.policy) as engine:
            yield engine


class _ChatActor:
    policy_version: int | None = None

    def __init__(self, evaluation: Evaluation, endpoint: Endpoint, client: ChatClient) -> None:
        self._evaluation, self._endpoint, self._client = evaluation, endpoint, client
        self.tool_format = endpoint.tool_format

    @property
    def held_s(self) -> float:
        return self._client.pace.held_s

    async def sample(self, task_index: int, task_id: str, number: int, env: AsyncEnv) -> Sample:
        return await chat_sample(task_id, number, env, self._client, self._evaluation, self._endpoint)


@contextlib.asynccontextmanager
async def _chat_actor(evaluation: Evaluation, endpoint: Endpoint) -> AsyncIterator[Actor]:
    client = ChatClient(endpoint, evaluation.sampling, evaluation.pacing)
    try:
        yield _ChatActor(evaluation, endpoint, client)
    finally:
        await client.aclose()


class _EngineActor:
    held_s = 0.0

    def __init__(
        self,
        evaluation: Evaluation,
        pool: EnginePool,
        renderer: ChatRenderer,
        settings: RolloutSettings,
        policy_version: int,
    ) -> None:
        self._evaluation, self._pool, self._renderer, self._settings = evaluation, pool, renderer, settings
        self.policy_version: int | None = policy_version
        self.tool_format = renderer.tool_format

    async def sample(self, task_index: int, task_id: str, number: int, env: AsyncEnv) -> Sample:
        try:
            async with self._pool.seat() as seat:
                return await engine_sample(
                    task_id, number, env, seat, self._renderer, self._settings, self._evaluation, task_index
                )
        except (Unreachable, DoorFault) as error:
            raise EvaluationError(str(error)) from error


@contextlib.asynccontextmanager
async def _engine_actor(evaluation: Evaluation, policy: RolloutEngine) -> AsyncIterator[Actor]:
    try:
        renderer = await asyncio.to_thread(policy.chat.load, policy.model)
    except ChatTemplateError as error:
        raise WrongArgument(f"--model-folder: {error}") from error
    engines = {url: HttpEngine(url, control_timeout_s=_HEALTH_S) for url in policy.urls}
    pool = EnginePool({**engines}, patience_s=evaluation.pacing.patience_s)
    watching: asyncio.Task[None] | None = None
    try:
        healths = [await _health(engine) for engine in engines.values()]
        versions = sorted({health.version for health in healths})
        if len(versions) > 1:
            raise WrongArgument(f"--engine: they serve different weights, versions {versions}; publish to all first")
        settings = rollout_settings(evaluation, min(health.max_context for health in healths))
        watching = asyncio.create_task(pool.run(), name="engines")
        yield _EngineActor(evaluation, pool, renderer, settings, versions[0])
    finally:
        if watching is not None:
            watching.cancel()
            await asyncio.gather(watching, return_exceptions=True)
        for engine in engines.values():
            await engine.close()


async def _health(engine: HttpEngine) -> EngineHealth:
    try:
        return await engine.health()
    except (EngineFault, DoorFault) as fault:
        raise EvaluationError(f"--engine: {fault}") from fault
