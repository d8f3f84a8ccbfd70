"""pass@k: the unbiased estimate, against counting and against what it estimates."""

from __future__ import annotations

import itertools
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from learner_tools import action, episode, prompt

from agent.estimates import pass_at, passes
from learner.config import HeldOutSet
from learner.run.evaluation.figures import set_figures
from learner.run.pass_rates import mean_pass_at, pass_rates, rates_of_sets


@st.composite
def samples_of_a_task(draw: st.DrawFn) -> tuple[int, int, int]:
    samples = draw(st.integers(1, 9))
    return samples, draw(st.integers(0, samples)), draw(st.integers(1, samples))


@given(samples_of_a_task())
def test_it_is_the_share_of_choices_that_hold_a_sample_which_passed(numbers: tuple[int, int, int]) -> None:
    samples, passed, k = numbers
    outcomes = [True] * passed + [False] * (samples - passed)
    choices = list(itertools.combinations(outcomes, k))
    assert pass_at(samples, passed, k) == pytest.approx(sum(map(any, choices)) / len(choices))


@given(samples_of_a_task(), st.floats(0, 1))
def test_its_mean_is_the_chance_that_one_of_k_passes(numbers: tuple[int, int, int], chance: float) -> None:
    """Unbiased: over all outcomes of `samples` tries that each pass with `chance`; 1 - (1 - c/n)^k is not."""
    samples, _, k = numbers
    mean = sum(
        math.comb(samples, passed) * chance**passed * (1 - chance) ** (samples - passed) * pass_at(samples, passed, k)
        for passed in range(samples + 1)
    )
    assert mean == pytest.approx(1 - (1 - chance) ** k, abs=1e-9)


@given(samples_of_a_task())
def test_it_grows_with_k_and_with_what_passed(numbers: tuple[int, int, int]) -> None:
    samples, passed, k = numbers
    if k < samples:
        assert pass_at(samples, passed, k) <= pass_at(samples, passed, k + 1) + 1e-12
    if passed < samples:
        assert pass_at(samples, passed, k) <= pass_at(samples, passed + 1, k) + 1e-12


@pytest.mark.parametrize(("samples", "passed", "k"), [(2, 1, 3), (2, 3, 1), (2, 1, 0), (0, 0, 1), (2, -1, 1)])
def test_more_than_was_sampled_is_refused(samples: int, passed: int, k: int) -> None:
    with pytest.raises(ValueError, match="at least k samples"):
        pass_at(samples, passed, k)


def answered(task: str, passed: int, samples: int):  # type: ignore[no-untyped-def]
    return [episode([prompt([1]), action([2, 3])], [float(i < passed)], task=task) for i in range(samples)]


def test_tasks_weigh_alike_and_the_figures_have_the_powers_of_two() -> None:
    episodes = answered("a", 1, 6) + answered("b", 0, 6) + answered("c", 6, 6)
    assert passes(6) == (1, 2, 4, 6)
    assert passes(1) == (1,)
    assert mean_pass_at(episodes, 2) == pytest.approx((1 / 3 + 0 + 1) / 3)
    assert pass_rates(episodes)[0].most == 6
    assert pass_rates(episodes)[0].pass_at_most == pytest.approx(2 / 3)
    chosen = HeldOutSet.model_construct(name="hard", samples=6)
    figures = set_figures(chosen, episodes)
    assert figures["evaluation/hard/success"] == pytest.approx(7 / 18)
    assert {k: figures[f"evaluation/hard/pass_at_{k}"] for k in (2, 4, 6)} == {
        2: pytest.approx((1 / 3 + 1) / 3),
        4: pytest.approx((2 / 3 + 1) / 3),
        6: pytest.approx(2 / 3),
    }
    assert not any("version" in name for name in figures)


def test_a_shared_evaluation_says_which_versions_its_tokens_came_from() -> None:
    segments = [prompt([1]), action([2, 3], versions=(4, 4)), prompt([1]), action([5, 6], versions=(4, 7))]
    figures = set_figures(HeldOutSet.model_construct(name="", samples=1), [episode(segments, [0.0, 1.0])], 4)
    assert figures["evaluation/version_min"] == 4
    assert figures["evaluation/version_max"] == 7
    assert figures["evaluation/version_share"] == 0.75


def test_rates_of_several_sets_are_told_apart_by_name() -> None:
    rates = rates_of_sets({"easy": answered("a", 2, 2), "hard": answered("a", 0, 2)})
    assert [rate.family.partition(":")[0] for rate in rates] == ["easy", "easy", "hard", "hard"]
    assert [rate.success for rate in rates] == [1.0, 1.0, 0.0, 0.0]
    assert rates_of_sets({"": answered("a", 1, 1)})[0].family == "all"
