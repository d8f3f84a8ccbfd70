"""Which experts an engine chose, from its answers to the episode's segments."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import numpy as np
import pytest
from runtime_tools import EchoEnv, ScriptedEngine, settings, ticket

from agent.chat.renderer import ChatRenderer
from agent.engines.base import Completion
from agent.episode import Episode, EpisodeError, Experts, SamplingParams, decode, encode
from agent.runtime.rollout import rollout


class RoutingEngine(ScriptedEngine):
    """Returns for each token that it runs its id and the number of the request, as the experts of one layer."""

    rows: Callable[[int, int], int] = staticmethod(lambda prompt, sampled: prompt + sampled - 1)
    silent: tuple[int, ...] = ()

    async def generate(self, prompt_ids: Sequence[int], sampling: SamplingParams, **options: Any) -> Completion:
        done = await super().generate(prompt_ids, sampling, **options)
        number = len(self.requests)
        if number in self.silent:
            return done
        run = [*prompt_ids, *done.token_ids][: self.rows(len(prompt_ids), len(done.token_ids))]
        run += [0] * (self.rows(len(prompt_ids), len(done.token_ids)) - len(run))
        ids = np.array([[[token, number]] for token in run])
        return msgspec.structs.replace(done, experts=Experts.pack(ids))


def turns(prompt: str, number: int) -> str:
    return ("more", "more please", "right")[min(number, 2)]


def carried(episode: Episode) -> list[list[tuple[int, int]]]:
    """(token, number of the request that ran it) as each segment carries them."""
    return [[] if s.experts is None else [tuple(row[0]) for row in s.experts.array()] for s in episode.segments]


async def played(engine: ScriptedEngine, renderer: ChatRenderer) -> Episode:
    return decode(encode(await rollout(ticket(), EchoEnv(), engine, renderer, settings())))


async def test_each_token_carries_the_experts_of_the_request_that_ran_it_first(renderer: ChatRenderer) -> None:
    """What was sampled carries what it was sampled with; its last token is run by the next request, or by none."""
    episode = await played(RoutingEngine(renderer, turns), renderer)
    prompt, *rest = carried(episode)
    assert {number for _, number in prompt} == {1}
    for segment, known, number in zip(episode.segments[1:], rest, (1, 2, 2, 3, 3), strict=True):
        last = segment is episode.segments[-1]
        assert [token for token, _ in known] == list(segment.token_ids)[: len(segment.token_ids) - last]
        numbers = [n for _, n in known]
        own = [number] * len(known)
        if segment.kind == "action" and not last:
            own[-1] = number + 1
        assert numbers == own


async def test_an_answer_without_them_leaves_no_gap(renderer: ChatRenderer) -> None:
    engine = RoutingEngine(renderer, turns)
    engine.silent = (2,)
    episode = await played(engine, renderer)
    tokens = [token for segment in carried(episode) for token, _ in segment]
    assert tokens == [t for s in episode.segments for t in s.token_ids][:-1]
    assert {n for segment in carried(episode) for _, n in segment} == {1, 3}


async def test_an_engine_that_returns_none_leaves_the_record_as_it_was(renderer: ChatRenderer) -> None:
    episode = await played(ScriptedEngine(renderer, turns), renderer)
    assert all(segment.experts is None for segment in episode.segments)


async def test_experts_of_more_tokens_than_were_run_are_no_record(renderer: ChatRenderer) -> None:
    engine = RoutingEngine(renderer, turns)
    engine.rows = lambda prompt, sampled: prompt + sampled + 1
    with pytest.raises(EpisodeError, match=r"experts of \d+ tokens, and it was given or sampled"):
        await played(engine, renderer)
