"""`build_batch` and `bucket_by_length`: what is trained on, where its reward stands, and how it is packed."""

from __future__ import annotations

import itertools
import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from learner_tools import action, episode, observation, prompt, random_episodes

from agent.episode import StopReason
from learner.data.batch import PAD, build_batch
from learner.data.buckets import bucket_by_length, micro_batch_tokens, padding_share
from learner.updates import StepSettings, _bootstrap

TWO_TURNS = (prompt([9]), action([1, 2], [-0.1, -0.2], [3, 4]), observation([7, 7]), action([5, 6], [-0.5, -0.6], 5))


def test_masks_come_from_segments_and_are_never_a_packed_prefix() -> None:
    """Case B3: with the prompt cut off the mask is [1,1,0,0,1,1]."""
    batch = build_batch([episode(TWO_TURNS, [0.0, 1.0])])
    assert batch.action_mask[0].int().tolist() == [0, 1, 1, 0, 0, 1, 1]
    assert batch.turn_ids[0].tolist() == [-1, 0, 0, -1, -1, 1, 1]
    assert batch.input_ids[0].tolist() == [9, 1, 2, 7, 7, 5, 6]


def test_observations_carry_no_logprob_and_no_version_into_anything() -> None:
    """Case B5, and A20: log-probs and versions stay with their own tokens."""
    batch = build_batch([episode(TWO_TURNS, [0.0, 1.0])])
    assert batch.rollout_logprobs[0].tolist() == pytest.approx([0, -0.1, -0.2, 0, 0, -0.5, -0.6])
    assert batch.versions[0].tolist() == [-1, 3, 4, -1, -1, 5, 5]


def test_padding_is_no_action_even_where_the_pad_id_is_the_sampled_end_token() -> None:
    """Case B7: PAD here is also an end token that was sampled, which is an action token (B8)."""
    short = episode([prompt([4]), action([PAD], -0.25)], [1.0], name="short")
    batch = build_batch([short, episode(TWO_TURNS, [0.0, 1.0], name="long")])
    assert batch.input_ids[0].tolist() == [4, *[PAD] * 6]
    assert batch.action_mask[0].int().tolist() == [0, 1, 0, 0, 0, 0, 0]
    assert batch.lengths.tolist() == [2, 7]


def test_each_turns_reward_stands_on_that_turns_last_action_token() -> None:
    batch = build_batch([episode([*TWO_TURNS, observation([8])], [0.25, 1.0])])
    assert batch.rewards[0].tolist() == [0, 0, 0.25, 0, 0, 0, 1.0, 0]


def test_an_action_without_tokens_hands_its_reward_to_the_action_before_it() -> None:
    batch = build_batch([episode([*TWO_TURNS, observation([8]), action([])], [0.25, 0.5, 1.0])])
    assert batch.rewards.sum() == pytest.approx(1.75)
    assert batch.rewards[0, 6] == pytest.approx(1.5)


@pytest.mark.parametrize("stop", [s for s in StopReason if not s.trainable], ids=str)
@pytest.mark.parametrize("truncation", ["terminal", "bootstrap", "drop"])
def test_aborted_and_faulty_episodes_never_get_a_mask_or_a_reward(stop: StopReason, truncation: str) -> None:
    """Case C: neither is trained, and neither counts as reward 0."""
    assert stop in (StopReason.ABORTED, StopReason.INFRASTRUCTURE_ERROR)
    batch = build_batch([episode(TWO_TURNS, [0.0, 1.0], stop=stop)], truncation=truncation)
    assert batch.action_tokens == 0
    assert not batch.rewards.any()
    assert not batch.rollout_logprobs.any()


@pytest.mark.parametrize("stop", [s for s in StopReason if s.truncated], ids=str)
def test_truncated_episodes_are_trained_as_terminal_or_dropped_as_the_recipe_says(stop: StopReason) -> None:
    """Case C: `truncation: terminal | bootstrap | drop`."""
    cut = episode(TWO_TURNS, [0.0, 1.0], stop=stop)
    ended = episode(TWO_TURNS, [0.0, 1.0], name="e1")
    for truncation, tokens in (("terminal", [4, 4]), ("bootstrap", [4, 4]), ("drop", [0, 4])):
        batch = build_batch([cut, ended], truncation=truncation)
        assert batch.action_mask.sum(-1).tolist() == tokens, truncation
        assert batch.truncated.tolist() == [True, False]


def test_only_truncated_episodes_bootstrap_and_only_from_the_value_after_their_last_action() -> None:
    """Case A14: the value after the last action; a terminated episode keeps 0."""
    cut = episode([*TWO_TURNS, observation([8])], [0.0, 0.0], stop=StopReason.TRUNCATED_TURNS)
    batch = build_batch([cut, episode(TWO_TURNS, [0.0, 1.0], name="e1")], truncation="bootstrap")
    after = torch.arange(16.0).reshape(2, 8)
    found = _bootstrap(batch, after, StepSettings(truncation="bootstrap"))
    assert found is not None
    assert found.tolist() == [6.0, 0.0]
    assert _bootstrap(batch, after, StepSettings()) is None


def test_members_of_a_group_share_a_number_and_single_rollouts_have_their_own() -> None:
    names = ["a", "a", None, "b", None, "a"]
    rows = [episode(TWO_TURNS, [0.0, 1.0], name=f"e{i}", group=g) for i, g in enumerate(names)]
    ids = build_batch(rows).group_ids.tolist()
    assert ids[0] == ids[1] == ids[5]
    assert len({ids[0], ids[2], ids[3], ids[4]}) == 4


def test_an_empty_batch_is_a_batch() -> None:
    batch = build_batch([])
    assert batch.size == batch.action_tokens == 0


def test_rows_are_cut_to_their_own_longest_and_lose_nothing() -> None:
    batch = build_batch(random_episodes(12))
    for index in ([0], [3, 1], [11, 5, 7]):
        part = batch.rows(index)
        assert part.input_ids.shape == (len(index), max(int(batch.lengths[i]) for i in index))
        assert part.action_tokens == sum(int(batch.action_mask[i].sum()) for i in index)
        assert part.episode_ids == tuple(f"e{i}" for i in index)
        assert float(part.rewards.sum()) == sum(float(batch.rewards[i].sum()) for i in index)


@given(
    lengths=st.lists(st.integers(1, 5000), max_size=200),
    max_tokens=st.integers(1, 20_000),
    max_padding=st.floats(0, 0.9),
)
@settings(deadline=None, max_examples=150)
def test_buckets_hold_every_row_once_within_their_caps(lengths: list[int], max_tokens: int, max_padding: float) -> None:
    buckets = bucket_by_length(lengths, max_tokens=max_tokens, max_padding=max_padding)
    assert sorted(itertools.chain.from_iterable(buckets)) == list(range(len(lengths)))
    for bucket in buckets:
        area = max(lengths[i] for i in bucket) * len(bucket)
        assert area <= max_tokens or len(bucket) == 1
        assert area - sum(lengths[i] for i in bucket) <= max_padding * area + 1e-6
    assert padding_share(lengths, buckets) <= max_padding + 1e-9


def test_padding_stays_below_five_percent_in_few_buckets_at_the_tiny_recipes_lengths() -> None:
    """About 115 tokens an episode with a tail: the promise is 5 % in all, and not by one bucket a row."""
    rng = random.Random(0)
    rows = [min(round(60 + rng.gammavariate(3.0, 55 / 3)), 400) for _ in range(128)]
    buckets = bucket_by_length(rows, max_tokens=16_384, max_padding=0.05)
    assert padding_share(rows, buckets) <= 0.05
    assert len(buckets) <= 40


def test_a_dummy_is_two_tokens_that_fit_wherever_a_micro_batch_does() -> None:
    batch = build_batch(random_episodes(5))
    part = batch.dummy()
    assert part.input_ids.shape == batch.input_ids[[0], : part.width].shape == (1, 2)
    assert part.action_tokens == 0
    assert part.lengths.tolist() == [2]
    assert build_batch([episode([action([1])], [0.0])]).dummy().width == 1


def test_micro_batches_are_smaller_on_cpus_unless_the_recipe_says() -> None:
    """Case P5."""
    assert micro_batch_tokens(None, "cpu") == 4_096
    assert micro_batch_tokens(None, "cuda") == 16_384
    assert micro_batch_tokens(100, "cpu") == micro_batch_tokens(100, "cuda") == 100
