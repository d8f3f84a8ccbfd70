"""The environment keeps its promises, found by its name as a recipe finds it."""

import asyncio
import random

import pytest
from codeword import CODES, Codeword, traces

from envs import make_core


def test_a_right_guess_is_paid_and_a_wrong_one_is_answered() -> None:
    async def play() -> None:
        core = make_core("codeword", guesses=2)
        await core.areset(options={"task_id": "AC"})
        observation, reward, terminated, truncated, _ = await core.astep("<think>AC</think>AB")
        assert (observation, reward, terminated, truncated) == ("1", 0.0, False, False)
        assert (await core.astep(" AC\n"))[1:3] == (1.0, True)
        await core.areset(options={"task_id": "AC"})
        await core.astep("CA")
        assert (await core.astep(""))[1:4] == (0.0, False, True)
        await core.aclose()

    asyncio.run(play())


def test_training_and_evaluation_share_no_task() -> None:
    train, held_out = Codeword().task_ids, Codeword("held_out").task_ids
    assert sorted([*train, *held_out]) == CODES
    with pytest.raises(ValueError, match="held_out"):
        Codeword("test")


def test_every_trace_ends_on_its_code() -> None:
    for messages in traces(50, random.Random(0)):
        assert messages[-1]["content"] in CODES
