"""`sao/StyleShift-v0` with the embedded judge, and with judges that fail."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import warnings
from collections.abc import AsyncIterator, Callable
from typing import Any

import gymnasium
import pytest
from gymnasium.utils.env_checker import check_env

from envs import EnvironmentFault, make_core
from envs.style_shift.env import StyleShift
from envs.style_shift.judging.judge import Judge, JudgeFault, Verdict

ENV_ID = "sao/StyleShift-v0"
CUTE = "Aww, the little rain gives me a big hug, hehe! It is so fluffy and sweet, yay~"
DARK = "Behold, mortals! The rain feeds the demon that is sealed within my right arm!"
RAIN = "en/0.0"
Make = Callable[..., StyleShift]


@pytest.fixture
async def make() -> AsyncIterator[Make]:
    cores: list[StyleShift] = []

    def make_one(**kwargs: Any) -> StyleShift:
        core = make_core(ENV_ID, **kwargs)
        assert isinstance(core, StyleShift)
        cores.append(core)
        return core

    yield make_one
    await asyncio.gather(*(core.aclose() for core in cores))


class Broken(Judge):
    """A judge that is down, or hangs."""

    def __init__(self, hangs: bool = False) -> None:
        self.hangs = hangs

    async def judge(self, prompt: str, text: str, style: str) -> Verdict:
        if self.hangs:
            await asyncio.Event().wait()
        raise JudgeFault("the judge is down")


class Listening(Judge):
    """Keeps what it was asked."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, str, str]] = []

    async def judge(self, prompt: str, text: str, style: str) -> Verdict:
        self.asked.append((prompt, text, style))
        return Verdict(1, style, "as you like it")


@pytest.mark.parametrize(
    ("text", "step", "reward"),
    [(CUTE, 0, 1.0), (CUTE, 159, 1.0), (CUTE, 160, 0.0), (DARK, 0, 0.0), (DARK, 160, 1.0), (DARK, 300, 0.0)],
)
async def test_the_reward_is_quality_times_the_style_preferred_at_the_step(
    make: Make, text: str, step: int, reward: float
) -> None:
    env = make()
    await env.areset(options={"task_id": RAIN, "step": step})
    observation, got, terminated, truncated, info = await env.astep(text)
    assert (observation, got, terminated, truncated) == ("", reward, True, False)
    assert info["metrics"]["quality"] == 1
    assert info["metrics"]["style_match"] == reward
    assert info["metrics"]["step"] == step


@pytest.mark.parametrize(
    "text", [CUTE.rstrip("~"), f"{CUTE} " * 4, CUTE.replace("rain", "sun"), "yay hehe cutie rain hug!"]
)
async def test_the_right_style_in_bad_quality_earns_nothing(make: Make, text: str) -> None:
    env = make()
    await env.areset(options={"task_id": RAIN, "step": 0})
    _, reward, _, _, info = await env.astep(text)
    assert (reward, info["metrics"]["quality"], info["metrics"]["style"]) == (0.0, 0, "cute")


@pytest.mark.parametrize("show_candidates", [True, False])
async def test_the_target_is_never_in_the_policys_input(make: Make, show_candidates: bool) -> None:
    """Under every possible target the policy sees the same: messages, observation and all of `info` at reset."""
    seen = []
    for target in ("academic", "cute", "chuunibyou", "classical"):
        env = make(phases=[{"start": 0, "style": target}], show_candidates=show_candidates)
        seen.append([await env.areset(options={"task_id": task_id, "step": 7}) for task_id in env.task_ids])
    assert seen[0] == seen[1] == seen[2] == seen[3]


async def test_a_shift_that_keeps_the_candidates_changes_nothing_the_policy_sees(make: Make) -> None:
    env = make()
    assert env.schedule.at(159).style != env.schedule.at(160).style
    for task_id in env.task_ids:
        assert env.messages(task_id, 159) == env.messages(task_id, 160)


async def test_candidates_are_listed_in_the_prompts_own_language(make: Make) -> None:
    env = make()
    assert env.messages(RAIN, 0)[-1]["content"].endswith("styles: Academic, Cute, Chuunibyou.")
    assert env.messages("zh/0.0", 300)[-1]["content"].endswith("可爱、中二、古风。")


async def test_the_step_comes_from_options_then_the_attribute_then_the_seed(make: Make) -> None:
    env = make(step=170)

    async def step_of(**reset: Any) -> int:
        await env.areset(**reset)
        info = (await env.astep("x"))[4]
        step: int = info["metrics"]["step"]
        return step

    assert await step_of(seed=1) == 170
    env.global_step = 42
    assert await step_of(seed=1) == 42
    assert await step_of(seed=1, options={"step": 301}) == 301
    env.global_step = None
    drawn = [await step_of(seed=seed) for seed in range(40)]
    assert drawn == [await step_of(seed=seed) for seed in range(40)], "a pure function of the seed"
    assert len({env.schedule.index(step) for step in drawn}) == 3, "all phases come up"


async def test_the_task_drawn_with_a_seed_does_not_depend_on_the_step(make: Make) -> None:
    env = make()
    first = (await env.areset(seed=5, options={"step": 3}))[1]["task_id"]
    assert (await env.areset(seed=5))[1]["task_id"] == first


@pytest.mark.parametrize("step", [-1, 1.5, "7", True])
async def test_a_step_that_is_none_is_refused(make: Make, step: Any) -> None:
    with pytest.raises(ValueError, match="global step"):
        await make().areset(options={"step": step})
    with pytest.raises(ValueError, match="step must be"):
        make(step=step)


async def test_a_judge_that_fails_voids_the_episode_and_is_never_a_reward_of_0(make: Make) -> None:
    """Case G1: no verdict is an infrastructure failure."""
    for judge, limit in ((Broken(), 10.0), (Broken(hangs=True), 0.05)):
        env = make(judge=judge, judge_timeout_s=limit)
        await env.areset(seed=0)
        with pytest.raises(EnvironmentFault):
            await env.astep(CUTE)
        with pytest.raises(RuntimeError, match="reset"):
            await env.astep(CUTE)
        await env.areset(seed=0)
        with pytest.raises(EnvironmentFault):
            await env.atruncate("turns", CUTE)


async def test_thinking_is_not_judged_and_nothing_at_all_is_not_sent_to_the_judge(make: Make) -> None:
    judge = Listening()
    env = make(judge=judge)
    await env.areset(options={"task_id": RAIN, "step": 0})
    await env.astep(f"<think>they want it dark: {DARK}</think>{CUTE}")
    assert judge.asked == [("Write a short text about rain.", CUTE, "cute")], "the prompt without the candidates"
    for action in ("", "  \n", f"<think>{CUTE}</think>", "x" * 2001):
        await env.areset(options={"task_id": RAIN, "step": 0})
        assert (await env.astep(action))[1] == 0.0
    assert len(judge.asked) == 1


async def test_a_text_cut_by_the_runtime_is_graded_as_it_stands(make: Make) -> None:
    env = make()
    await env.areset(options={"task_id": RAIN, "step": 0})
    _, reward, terminated, truncated, info = await env.atruncate("context", CUTE[:-20])
    assert (reward, terminated, truncated, info["truncation"]) == (0.0, False, True, "context")
    await env.areset(options={"task_id": RAIN, "step": 0})
    with pytest.raises(ValueError, match="truncation"):
        await env.atruncate("boredom")


async def test_half_a_surrogate_pair_and_nul_are_only_bad_texts(make: Make) -> None:
    env = make()
    for action in ("\ud800", "\x00\x00", "rain \ud83d rain", "\u202e" * 50):
        await env.areset(options={"task_id": RAIN, "step": 0})
        assert (await env.astep(action))[1] == 0.0


@pytest.mark.parametrize(
    ("kwargs", "says"),
    [
        ({"judge": "oracle"}, "judge must be"),
        ({"judge": {"kind": "llm", "url": "http://h/v1"}}, "'model' is missing"),
        ({"judge": {"kind": "llm", "url": "http://h/v1", "model": "m", "retry": 3}}, "unknown key 'retry'"),
        ({"judge": {"kind": "llm", "url": "h:80", "model": "m"}}, "url must be"),
        ({"judge": {"kind": "llm", "url": "http://h/v1", "model": "m", "attempts": 0}}, "attempts"),
        ({"prompts": "poems"}, "prompts must be"),
        ({"prompts": []}, "at least one"),
        ({"phases": [{"start": 0, "style": "cute"}], "schedule_seed": 1}, "exclude each other"),
        ({"max_chars": 0}, "max_chars"),
    ],
)
def test_an_impossible_argument_is_an_error_at_once(kwargs: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        make_core(ENV_ID, **kwargs)


async def test_unknown_tasks_are_named_and_own_prompts_are_taken(make: Make) -> None:
    with pytest.raises(ValueError, match="no task 'nope'"):
        await make().areset(options={"task_id": "nope"})
    env = make(prompts=["Write about rain.", "写一段关于雨的短文。"], show_candidates=False)
    assert [env.messages(t, 0) for t in env.task_ids] == [
        [{"role": "user", "content": "Write about rain."}],
        [{"role": "user", "content": "写一段关于雨的短文。"}],
    ]


def test_there_are_more_than_a_hundred_different_prompts_in_two_languages_and_a_fixed_order() -> None:
    first, second = make_core(ENV_ID), make_core(ENV_ID)
    assert isinstance(first, StyleShift)
    assert first.task_ids == second.task_ids
    prompts = {first.task(task_id).prompt for task_id in first.task_ids}
    assert len(prompts) == len(first.task_ids) >= 200
    assert {first.task(task_id).language for task_id in first.task_ids} == {"en", "zh"}


def test_check_env_passes_without_a_warning_and_in_a_vector() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        env = gymnasium.make(ENV_ID)
        check_env(env.unwrapped)
        env.close()
    vector = gymnasium.make_vec(ENV_ID, num_envs=3, vectorization_mode="sync")
    vector.reset(seed=0, options={"task_id": RAIN, "step": 0})
    _, rewards, ended, _, _ = vector.step((CUTE, DARK, CUTE))
    assert (list(rewards), list(ended)) == ([1.0, 0.0, 1.0], [True, True, True])
    vector.close()


def test_the_environment_works_without_torch() -> None:
    code = "import sys, envs; envs.make_core('sao/StyleShift-v0'); assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
