"""One LLM judge for the environments of an event loop, and what its faults are to them."""

from __future__ import annotations

import asyncio

import pytest
from judge_server import Server, status

from envs import EnvironmentFault, make_core
from envs.style_shift.judging.lexical import LexicalJudge
from envs.style_shift.judging.llm import LLMJudge
from envs.style_shift.judging.spec import acquire_judge, release_judge


async def test_environments_of_one_loop_share_one_judge_and_the_last_one_closes_it(server: Server) -> None:
    spec = {"kind": "llm", "url": server.url, "model": "judge", "concurrency": 2}
    cores = [make_core("sao/StyleShift-v0", judge=spec, step=0) for _ in range(6)]
    for core in cores:
        await core.areset(seed=0)
    steps = await asyncio.gather(*(core.astep(f"A text, number {i}.") for i, core in enumerate(cores)))
    assert [step[1] for step in steps] == [1.0] * 6
    assert server.most_at_once <= 2
    shared = acquire_judge(spec)
    assert isinstance(shared, LLMJudge)
    assert shared.costs.calls == 6
    await asyncio.gather(*(core.aclose() for core in cores), *(core.aclose() for core in cores))
    assert shared._endpoint._session is not None, "still used here"
    await release_judge(shared)
    assert shared._endpoint._session is None
    again = acquire_judge(spec)
    assert again is not shared
    await release_judge(again)


async def test_a_down_judge_voids_the_episode_of_the_environment(server: Server) -> None:
    """Case G1, through the environment."""
    server.answers = [status(400)]
    core = make_core("sao/StyleShift-v0", judge={"kind": "llm", "url": server.url, "model": "judge"})
    await core.areset(seed=0)
    with pytest.raises(EnvironmentFault, match="400"):
        await core.astep("A text.")
    await core.aclose()


async def test_the_lexical_judge_is_its_own_and_needs_no_release() -> None:
    judge = acquire_judge("lexical")
    assert isinstance(judge, LexicalJudge)
    await release_judge(judge)
