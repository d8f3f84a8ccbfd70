"""`sao/Chains-v0`: what is lost stays lost, only the whole way pays, and a prompt says how hard it is."""

from __future__ import annotations

import asyncio
import random
import statistics
from typing import Any

import gymnasium
import pytest
from gymnasium.utils.env_checker import check_env
from hypothesis import given, settings
from hypothesis import strategies as st

from envs import make_core
from envs.arguments import ArgumentError
from envs.chains import traces
from envs.chains.chain import DIGITS, Mix, Walk
from envs.chains.env import LINK_TOOL, Chains
from envs.chains.traces import Player, write_traces
from envs.tool_calls import ToolCall, parse_action, write_calls
from learner.data.traces import player_of

SEEDS = st.integers(0, 10_000)
HARD = Mix(sum_shares=(0.5,), guess_shares=(0.3,), skips=0.3)


def call(at: str, value: int) -> str:
    return write_calls([ToolCall("link", {"at": at, "value": value})])


async def play(env: Chains, task_id: str, actions: list[str]) -> tuple[list[str], float, dict[str, Any]]:
    """The observations of an episode, its reward, and the last `info`."""
    await env.areset(options={"task_id": task_id})
    seen: list[str] = []
    for action in actions:
        observation, reward, terminated, truncated, info = await env.astep(action)
        seen.append(observation)
        if terminated or truncated:
            return seen, reward, info
    raise AssertionError("the episode did not end")


def right_actions(env: Chains, task_id: str) -> list[str]:
    """The one way through a chain."""
    chain, value, actions = env.chain(task_id), env.chain(task_id).start, []
    for index, link in enumerate(chain.links):
        actions.append(call(link.name, chain.right_value(index, value)))
        value = link.gives
    return [*actions, str(value)]


def test_gymnasiums_checks_pass() -> None:
    env = gymnasium.make("sao/Chains-v0", disable_env_checker=True)
    check_env(env.unwrapped, skip_render_check=True)
    env.close()


async def test_the_expert_solves_every_chain_and_a_weak_player_does_not() -> None:
    env = Chains(size=300, seed=5)
    for error_rate, least, most in ((0.0, 1.0, 1.0), (0.3, 0.2, 0.7)):
        solved: list[float] = []
        async for messages in write_traces(env, env.task_ids, seed=1, error_rate=error_rate):
            actions = [m["content"] for m in messages if m["role"] == "assistant"]
            _, reward, info = await play(env, env.task_ids[len(solved)], actions)
            assert reward == float(info["metrics"]["correct"])
            solved.append(reward)
        assert least <= statistics.fmean(solved) <= most


@settings(max_examples=60, deadline=None)
@given(seed=SEEDS, at=st.floats(0, 1, exclude_max=True), off=st.integers(1, DIGITS - 1))
def test_one_wrong_call_is_seen_at_once_and_never_forgiven(seed: int, at: float, off: int) -> None:
    """Whatever follows, every answer says so, and the right end of the chain pays nothing."""
    chain = HARD.draw("x", seed)
    walk = Walk.begin(chain)
    wrong = int(at * len(chain.links))
    for index, link in enumerate(chain.links):
        value = chain.right_value(index, chain.start if index == 0 else chain.links[index - 1].gives)
        answer = walk.call(link.name, (value + off * (index == wrong)) % DIGITS)
        assert answer.startswith("lost ") == (index >= wrong)
    assert not walk.solved_by(str(chain.result))


@settings(max_examples=60, deadline=None)
@given(seed=SEEDS, calls=st.lists(st.tuples(st.sampled_from("abcdefghijklmnopqrstuvwxyz"), st.integers(-3, 12))))
def test_no_calls_but_the_right_ones_in_order_are_paid(seed: int, calls: list[tuple[str, int]]) -> None:
    chain = HARD.draw("x", seed)
    walk, value, expected = Walk.begin(chain), chain.start, []
    for index, link in enumerate(chain.links):
        expected.append((link.name, chain.right_value(index, value)))
        value = link.gives
    for name, digit in calls:
        walk.call(name, digit)
    assert walk.solved_by(str(chain.result)) == (calls == expected)


@settings(max_examples=60, deadline=None)
@given(seed=SEEDS)
def test_the_prompt_tells_length_and_kinds_and_the_same_seed_is_the_same_chain(seed: int) -> None:
    chain = HARD.draw("x", seed)
    assert chain == HARD.draw("x", seed)
    listed = chain.prompt.partition(": ")[2].split(", ")
    assert len([text for text in listed if not text.startswith("(")]) == len(chain.links)
    assert sum("?" in text for text in listed) == sum(link.kind == "guess" for link in chain.links)
    assert HARD.least <= len(chain.links) <= HARD.most
    assert len({link.name for link in chain.listed}) == len(chain.listed)


def test_lengths_have_a_heavy_tail_and_tasks_of_two_seeds_differ() -> None:
    one, other = Chains(size=2000, seed=0), Chains(size=2000, seed=1)
    lengths = sorted(len(one.chain(task_id).links) for task_id in one.task_ids)
    assert lengths[0] == 2
    assert lengths[-1] == 12
    assert lengths[1000] <= 4
    assert lengths[1900] >= 9
    prompts = [{env.chain(task_id).prompt for task_id in env.task_ids} for env in (one, other)]
    assert len(prompts[0] & prompts[1]) < 100  # short ones meet by chance


async def test_only_the_whole_way_with_its_result_is_paid() -> None:
    env = Chains(size=20, seed=3, system_prompt="")
    for task_id in env.task_ids:
        actions = right_actions(env, task_id)
        assert (await play(env, task_id, actions))[1] == 1.0
        assert (await play(env, task_id, [*actions[1:]]))[1] == 0.0
        assert (await play(env, task_id, [*actions[:-2], actions[-1]]))[1] == 0.0
        assert (await play(env, task_id, [*actions[:-1], str((int(actions[-1]) + 1) % DIGITS)]))[1] == 0.0
        assert (await play(env, task_id, [actions[0], *actions]))[1] == 0.0


async def test_a_malformed_call_is_lost_too_and_turns_end_the_episode_unpaid() -> None:
    env = Chains(size=5, seed=3, max_turns=3)
    seen, reward, info = await play(env, env.task_ids[0], ["<tool_call>{</tool_call>"] * 3)
    assert all(text.startswith("lost ") for text in seen[:2])
    assert (reward, info["truncation"], info["metrics"]["malformed_calls"]) == (0.0, "turns", 3)
    await env.areset(seed=0)
    assert (await env.atruncate("context"))[1:4] == (0.0, False, True)
    with pytest.raises(RuntimeError, match="no episode"):
        await env.astep("1")


@pytest.mark.parametrize(
    ("kwargs", "says"),
    [
        (dict(min_links=5, max_links=4), "min_links 5 and max_links 4"),
        (dict(max_links=20), "a letter of its own"),
        (dict(sum_shares=[]), "sum_shares"),
        (dict(skips=1.5), "skips"),
        (dict(guess_of=11), "guess_of"),
        (dict(lenght=3), "lenght"),
    ],
)
def test_a_wrong_argument_is_refused_by_name(kwargs: dict[str, Any], says: str) -> None:
    with pytest.raises((ArgumentError, ValueError), match=says):
        Chains(**kwargs)


async def test_a_task_that_is_not_there_is_refused() -> None:
    env = Chains(size=3, seed=1)
    for task_id in ("1/3", "2/0", "1/03", "x", "1"):
        with pytest.raises(ValueError, match="the first is '1/0'"):
            await env.areset(options={"task_id": task_id})


def test_the_cold_start_finds_its_player() -> None:
    env = make_core("sao/Chains-v0", size=4)
    play_traces = player_of(env, {})
    assert play_traces is not None

    async def collected() -> int:
        return len([m async for m in play_traces(env.task_ids, seed=0, error_rate=0.0)])

    assert asyncio.run(collected()) == 4


def test_a_player_that_is_lost_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """An episode's length says nothing of its fate."""
    monkeypatch.setattr(traces, "STOP", 0.0)
    chain = Mix(least=6, most=6, sum_shares=(1.0,), guess_shares=(0.0,), skips=0.0).draw("x", 1)
    player, walk = Player(chain, random.Random(0), error_rate=1.0), Walk.begin(chain)
    action, calls = player.next_action(None), 0
    while not player.done:
        calls += 1
        found = parse_action(action, [LINK_TOOL]).call
        assert found is not None
        action = player.next_action(walk.call(found.arguments["at"], found.arguments["value"]))
    assert walk.lost
    assert calls == 6
