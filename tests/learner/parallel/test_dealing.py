"""Rows are dealt so that no rank waits long for the one with most tokens."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from learner_tools import action, episode, prompt

from learner.parallel.dealing import EVEN_ENOUGH, deal, rows_of_rank


def unevenness(weights: list[int], world: int) -> float:
    """The largest sum of a rank over what can be reached: the mean, or the largest weight where that is more."""
    sums = [sum(weights[i] for i in share) for share in deal(weights, world)]
    return max(sums) / max(sum(weights) / world, max(weights))


@given(seed=st.integers(0, 2**32), sigma=st.floats(0.05, 1.5), world=st.sampled_from([8, 32]))
@settings(deadline=None, max_examples=80)
def test_128_lognormal_lengths_are_dealt_within_seven_percent(seed: int, sigma: float, world: int) -> None:
    """Case N15: it was 1.55 to 1.62 on 32 ranks. One length above the mean is a bound that no dealing passes."""
    rng = random.Random(seed)
    lengths = [max(2, round(rng.lognormvariate(8, sigma))) for _ in range(128)]
    # Four rows of nearly the same length a rank: now and then there is no exchange that evens them out further.
    assert unevenness(lengths, world) <= (1.07 if sigma >= 0.45 else 1.1)


@pytest.mark.parametrize("world", [8, 32])
def test_without_an_outsized_row_the_largest_share_is_within_seven_percent_of_the_mean(world: int) -> None:
    """Case N15, in its own words: largest / mean."""
    for seed in range(10):
        rng = random.Random(seed)
        lengths = [round(rng.lognormvariate(8, 0.5)) for _ in range(128)]
        mean = sum(lengths) / world
        if max(lengths) <= mean:
            assert max(sum(lengths[i] for i in share) for share in deal(lengths, world)) / mean <= 1.07


@given(weights=st.lists(st.integers(0, 1000), min_size=1, max_size=60), world=st.integers(1, 12))
@settings(deadline=None, max_examples=200)
def test_everything_is_dealt_once_and_every_rank_gets_some(weights: list[int], world: int) -> None:
    world = min(world, len(weights))
    shares = deal(weights, world)
    assert sorted(i for share in shares for i in share) == list(range(len(weights)))
    assert all(shares)
    assert deal(weights, world) == shares  # every rank computes it for itself


@given(seed=st.integers(0, 2**32), world=st.integers(1, 6))
@settings(deadline=None, max_examples=50)
def test_ranks_have_all_rows_once_and_groups_whole(seed: int, world: int) -> None:
    rng = random.Random(seed)
    episodes = [
        episode([prompt([1] * rng.randint(1, 300)), action([2])], [0.0], name=f"e{i}", group=f"g{i % 12}")
        for i in range(48)
    ]
    shares = [rows_of_rank(episodes, rank, world) for rank in range(world)]
    assert sorted(row for share in shares for row in share) == list(range(48))
    groups = [{episodes[row].group_id for row in share} for share in shares]
    assert sum(len(found) for found in groups) == 12


def test_one_giant_gets_a_rank_of_its_own_and_the_others_share_the_rest() -> None:
    shares = deal([10_000, *[100] * 30], 4)
    assert [0] in shares
    assert sorted(len(share) for share in shares) == [1, 10, 10, 10]
    assert unevenness([10_000, *[100] * 30], 4) == 1.0 <= EVEN_ENOUGH


def test_ranks_beyond_the_last_prompt_get_no_row() -> None:
    rows = [episode([prompt([1]), action([2])], [0.0], name=f"e{i}", group="one") for i in range(8)]
    assert [rows_of_rank(rows, rank, 2) for rank in range(2)] == [list(range(8)), []]
