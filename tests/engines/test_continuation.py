"""A turn that an engine aborts goes on from its tokens so far: each with its own log-prob and version."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from typing import Any

from engine_tools import VOCABULARY, EngineUnderTest
from test_engine_contract import assert_same, prompt_of, reference, until

from agent.chat.renderer import Rendering
from agent.engines.base import Completion, EngineFault
from agent.engines.client import HttpEngine
from agent.episode import SamplingParams, StopReason
from agent.runtime.rollout import rollout
from agent.runtime.settings import RolloutSettings, SamplingConfig, StageLimits
from agent.store.protocol import Ticket
from envs.core import AsyncEnv, Step

PROMPT = prompt_of(40, seed=3)
ACTION = 600


class Numbers:
    """A renderer for models without a tokenizer: a token is its number."""

    stop_token_ids: Sequence[int] = ()

    def start(self, messages: Sequence[Any], tools: Sequence[Any]) -> Rendering:
        return Rendering(tuple(PROMPT), "")

    def extend(
        self, transcript: Sequence[Any], action_ids: Sequence[int], messages: Sequence[Any], tools: Sequence[Any]
    ) -> Rendering:
        raise AssertionError("the episode has one turn")

    def decode(self, ids: Sequence[int]) -> str:
        assert all(0 <= i < VOCABULARY for i in ids)
        return " ".join(map(str, ids))


class OneTurn(AsyncEnv):
    """Ends with the first action, or where that is cut."""

    @property
    def task_ids(self) -> Sequence[str]:
        return ["one"]

    async def areset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[str, dict[str, Any]]:
        return "", {"messages": [], "tools": [], "segment": "prompt"}

    async def astep(self, action: str) -> Step:
        return "", 1.0, True, False, {"messages": [], "segment": "observation"}

    async def atruncate(self, reason: str, action: str = "") -> Step:
        return "", 1.0, False, True, {"messages": [], "segment": "observation", "truncation": reason}

    async def aclose(self) -> None: ...


async def test_an_aborted_turn_goes_on_with_exact_log_probs_and_versions_of_every_token(
    engine: EngineUnderTest,
) -> None:
    """Cases A20 and H5: aborted, published to, aborted again; the episode is one segment, scored token by token."""
    settings = RolloutSettings(
        env_id="test/One-v0",
        sampling=SamplingConfig(temperature=1.0),
        max_context_tokens=engine.max_context,
        max_tokens_per_turn=ACTION,
        limits=StageLimits(),
    )
    ticket = Ticket(id=f"turn-{engine.version}", kind="train", task_index=0, epoch=0, seed=1)
    start = (await engine.client.health()).tokens_generated
    running = asyncio.create_task(rollout(ticket, OneTurn(), engine.client, Numbers(), settings))

    async def sampled(count: int) -> None:
        await until(engine, lambda health: health.tokens_generated >= start + count)

    await sampled(20)
    await engine.client.abort(f"{ticket.id}.{ticket.attempt}.1")
    await sampled(60)
    await engine.client.publish(engine.version + 1, engine.second)
    await sampled(120)
    await engine.client.abort(f"{ticket.id}.{ticket.attempt}.2")
    episode = await running

    assert episode.stop_reason in (StopReason.TERMINATED, StopReason.TRUNCATED_TURN_TOKENS)
    action = episode.segments[1]
    assert [segment.kind for segment in episode.segments] == ["prompt", "action"]
    assert len(action.token_ids) == len(action.logprobs) == len(action.versions) == ACTION
    assert sorted(set(action.versions)) == [engine.version, engine.version + 1]
    assert list(action.versions) == sorted(action.versions)
    cut = action.versions.index(engine.version + 1)
    assert cut >= 60
    assert_same(action.logprobs[:cut], reference(engine.first, PROMPT, action.token_ids)[:cut])
    assert_same(action.logprobs[cut:], reference(engine.second, PROMPT, action.token_ids)[cut:])


class _Counted:
    """An engine's client that counts its requests."""

    def __init__(self, client: HttpEngine) -> None:
        self._client, self.requests = client, 0

    async def generate(self, *arguments: Any, **limits: Any) -> Completion:
        self.requests += 1
        return await self._client.generate(*arguments, **limits)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._client, name)


async def test_a_turn_longer_than_a_request_keeps_every_token_that_was_sampled(engine: EngineUnderTest) -> None:
    """Case M1, over the real client: six requests from one prompt and nothing kept, a bias against long turns."""
    began = time.monotonic()
    await engine.client.generate(PROMPT, SamplingParams(max_tokens=ACTION))
    whole_s = time.monotonic() - began
    settings = RolloutSettings(
        env_id="test/One-v0",
        sampling=SamplingConfig(temperature=1.0),
        max_context_tokens=engine.max_context,
        max_tokens_per_turn=ACTION,
        limits=StageLimits(generate_s=whole_s / 4),
    )
    ticket = Ticket(id=f"long-{engine.version}", kind="train", task_index=0, epoch=0, seed=1)
    before = (await engine.client.health()).tokens_generated
    counted = _Counted(engine.client)

    async def recover(fault: EngineFault) -> None:
        """A busy machine may sample nothing in so short a time: asked again."""

    episode = await rollout(ticket, OneTurn(), counted, Numbers(), settings, recover=recover)
    action = episode.segments[1]
    assert counted.requests >= 2
    assert len(action.token_ids) == len(action.logprobs) == ACTION
    assert_same(action.logprobs, reference(engine.first, PROMPT, action.token_ids))
    # A token in the midst of its step when the abort comes may be lost, never what came before it.
    assert (await engine.client.health()).tokens_generated - before <= ACTION + 2 * counted.requests
