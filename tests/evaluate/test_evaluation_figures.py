"""The figures of an evaluation: clustered by task, faults in none of them, intervals that say what they are."""

from __future__ import annotations

import math
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agent.estimates import bootstrap_interval
from agent.evaluate.figures import estimate, summarise
from agent.evaluate.sample import Sample, Tokens


def sample(task: str, number: int, reward: float | None, **more: object) -> Sample:
    stop = "terminated" if reward is not None else "infrastructure_error"
    return Sample(task, number, **{"stop_reason": stop, "reward": reward, **more})  # type: ignore[arg-type]


rewards = st.lists(st.lists(st.floats(-5, 5), min_size=1, max_size=4), min_size=2, max_size=8)


@settings(max_examples=40)
@given(rewards)
def test_the_mean_lies_in_its_interval_and_tasks_weigh_alike(tasks: list[list[float]]) -> None:
    found = estimate(tasks)
    assert found is not None
    means = [math.fsum(values) / len(values) for values in tasks]
    assert found.mean == pytest.approx(math.fsum(means) / len(means))
    if found.low is not None and found.high is not None:
        assert found.low - 1e-9 <= found.mean <= found.high + 1e-9
    assert found == estimate(tasks)  # the same samples give the same report


def test_the_bootstrap_covers_the_mean_as_often_as_it_says() -> None:
    generator, covered = random.Random(0), 0
    for _ in range(300):
        values = [generator.gauss(1.0, 2.0) for _ in range(40)]
        low, high = bootstrap_interval(values, resamples=400)
        covered += low <= 1.0 <= high
    assert 0.90 <= covered / 300 <= 0.98


def test_samples_of_one_task_are_no_independent_evidence() -> None:
    """Ten tasks sampled 50 times are ten tasks: the interval stays as wide as that of one sample each."""
    few = [[float(task % 2)] for task in range(10)]
    many = [[float(task % 2)] * 50 for task in range(10)]
    once, often = estimate(few), estimate(many)
    assert once is not None
    assert often is not None
    assert (once.method, often.method) == ("Wilson over tasks", "bootstrap over tasks")
    assert often.low is not None
    assert often.high is not None
    assert often.high - often.low > 0.4


def test_a_share_that_is_all_or_nothing_is_no_certainty_and_a_score_says_nothing() -> None:
    whole = estimate([[1.0, 1.0]] * 8)
    assert whole is not None
    assert whole.low is not None
    assert (whole.method, whole.high) == ("Wilson over tasks", 1.0)
    assert whole.low < 0.8
    score = estimate([[0.4]] * 8)
    assert score is not None
    assert (score.method, score.low, score.high) == ("none", None, None)
    assert estimate([]) is None


def test_faults_are_in_no_figure_but_their_own_and_their_tokens() -> None:
    samples = [
        sample("a", 0, 1.0, tokens=Tokens(10, 5), turns=2, requests=2),
        sample("a", 1, None, fault="EndpointFault: away", tokens=Tokens(7, 3), requests=3, retries=2),
        sample("b", 0, 0.0, tokens=Tokens(10, 5), turns=4, stop_reason="truncated_context"),
    ]
    found = summarise(samples, ["a", "b", "c"], 2, None)
    assert (found.wanted, found.samples, found.faults, found.tasks) == (6, 2, 1, 3)
    assert found.reward is not None
    assert (found.reward.mean, found.reward.tasks) == (0.5, 2)
    assert found.truncated == {"context": 1}
    assert found.fault_kinds == {"EndpointFault": 1}
    assert (found.tokens.prompt, found.tokens.completion, found.requests, found.retries) == (27, 13, 5, 2)
    assert (found.turns, found.tokens_a_pass) == (3.0, 40.0)
    assert [(t.task_id, t.samples, t.passed, t.faults) for t in found.by_task] == [
        ("a", 1, 1, 1),
        ("b", 1, 0, 0),
        ("c", 0, 0, 0),
    ]


def test_pass_at_k_is_of_tasks_with_enough_samples() -> None:
    samples = [sample("a", i, float(i == 0)) for i in range(4)] + [sample("b", 0, 1.0), sample("b", 1, None)]
    rates = {rate.k: rate.estimate for rate in summarise(samples, ["a", "b"], 4, None).passes}
    assert list(rates) == [1, 2, 4]
    assert (rates[1].mean, rates[1].tasks) == (pytest.approx((0.25 + 1) / 2), 2)
    assert (rates[2].mean, rates[2].tasks) == (pytest.approx(0.5), 1)
    assert (rates[4].mean, rates[4].tasks) == (1.0, 1)


def test_what_passes_is_said_by_the_reward() -> None:
    samples = [sample(f"t{i}", 0, reward) for i, reward in enumerate((0.0, 0.4, 0.8, 1.0))]
    names = [s.task_id for s in samples]
    assert summarise(samples, names, 1, None).passes[0].estimate.mean == 0.75
    assert summarise(samples, names, 1, 0.8).passes[0].estimate.mean == 0.5
    negative = [sample("a", 0, -1.0)]
    assert summarise(negative, ["a"], 1, None).passes[0].estimate.mean == 0.0


def test_samples_and_tasks_that_are_not_asked_for_are_left_out() -> None:
    samples = [sample("a", 0, 0.0), sample("a", 1, 1.0), sample("z", 0, 1.0)]
    found = summarise(samples, ["a"], 1, None)
    assert (found.samples, found.reward.mean if found.reward else None) == (1, 0.0)


def test_families_are_told_apart_where_there_are_several() -> None:
    samples = [sample(f"t{i}", 0, float(i < 2), metrics={"family": "easy" if i < 3 else "hard"}) for i in range(5)]
    found = dict(summarise(samples, [s.task_id for s in samples], 1, None).families)
    assert {name: (one.mean, one.tasks) for name, one in found.items()} == {
        "easy": (pytest.approx(2 / 3), 3),
        "hard": (0.0, 2),
    }
