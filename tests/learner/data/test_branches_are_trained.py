"""Episodes with branches: every chain is a row, and whatever compares episodes counts each of them once."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
import torch
from learner_tools import (
    Gradients,
    action,
    build_learner,
    episode,
    observation,
    prompt,
    random_episodes,
    same,
    snapshot,
)

from agent.episode import Branch, Episode, EpisodeError, decode, encode, validate
from agent.inspect.tokens import token_views
from learner.advantages import RunningMeanBaseline
from learner.algorithms import compute_advantages, get_algorithm
from learner.data.batch import build_batch, places_of_rows, shuffled_rewards, without_constant_groups
from learner.data.minibatches import minibatches_of, share_of_rank
from learner.parallel.dealing import tokens_of
from learner.run.annotations import step_annotations

MAIN = (prompt([9]), action([1, 2]), observation([7]), action([3]))
SUB_AGENT = Branch((prompt([8, 8]), action([4, 5, 6], versions=2)), (0.0,))
COMPACTED = Branch((prompt([9, 9, 9]), action([10]), observation([7]), action([11, 12])), (0.25, 1.0))
"""What followed a compaction: a reward on the way, and the last one."""


def branched(name: str = "e0", *, group: str | None = None, reward: float = 1.0) -> Episode:
    """An episode of a main chain and two branches; its reward is `reward` + .25."""
    last = msgspec.structs.replace(COMPACTED, turn_rewards=(0.25, reward))
    return episode(MAIN, [0.0, 0.0], name=name, group=group, branches=(SUB_AGENT, last))


def flattened(given: Episode) -> list[Episode]:
    """Its chains as episodes of their own, each with the episode's reward."""
    return [
        msgspec.structs.replace(
            given,
            id=f"{given.id}.{number}",
            segments=chain.segments,
            turn_rewards=(*chain.turn_rewards[:-1], given.reward - sum(chain.turn_rewards[:-1])),
            branches=(),
        )
        for number, chain in enumerate(given.chains)
    ]


def test_every_chain_is_a_row_that_sums_up_to_the_episodes_reward() -> None:
    batch = build_batch([episode([prompt([1]), action([2])], [0.5], name="plain"), branched()])
    assert batch.episodes.tolist() == [0, 1, 1, 1]
    assert batch.episode_ids == ("plain", "e0", "e0", "e0")
    assert batch.rewards.sum(1).tolist() == [0.5, 1.25, 1.25, 1.25]
    assert batch.rewards[3].tolist() == [0, 0, 0, 0.25, 0, 0, 1.0]
    assert batch.action_tokens == 1 + 3 + 3 + 3
    assert batch.turn_ids[3].tolist() == [-1, -1, -1, 0, -1, 1, 1]
    assert batch.group_ids.tolist() == [0, 1, 1, 1]


def test_a_branch_of_a_dropped_episode_is_not_trained_either() -> None:
    cut = msgspec.structs.replace(branched(), stop_reason="truncated_wall_clock")
    batch = build_batch([decode(encode(cut))], truncation="drop")
    assert not batch.action_mask.any()
    assert not batch.rewards.any()


def test_the_record_counts_over_all_chains() -> None:
    given = decode(encode(branched()))
    assert given == branched()
    assert (given.reward, given.action_tokens, len(given.actions), given.oldest_version) == (1.25, 9, 5, 0)
    assert len(token_views(given, None, None)) == tokens_of([given], [0]) == 4 + 1 + 5 + 7


@pytest.mark.parametrize(
    ("branch", "wrong"),
    [
        (Branch((), ()), "the first segment must be the prompt"),
        (Branch((prompt([1]),), ()), "a branch has no action token"),
        (Branch((prompt([1]), action([2])), ()), "branch 0: 0 rewards for 1 actions"),
        (Branch((prompt([1]), msgspec.structs.replace(action([2]), logprobs=())), (0.0,)), "branch 0, segment 1"),
    ],
    ids=["empty", "no action", "no reward", "no log-prob"],
)
def test_a_branch_that_breaks_a_rule_of_the_record_is_refused(branch: Branch, wrong: str) -> None:
    with pytest.raises(EpisodeError, match=wrong):
        validate(episode(MAIN, [0.0, 1.0], branches=(branch,)))


def test_a_branchs_tokens_get_the_gradient_that_they_get_as_an_episode(micro_model: Path, tmp_path: Path) -> None:
    """The same update as if each chain had been an episode: nothing of a branch is left out, nothing counted twice."""
    others = random_episodes(4, seed=3)
    updates = []
    for name, episodes in (("branched", [branched(), *others]), ("flat", [*flattened(branched()), *others])):
        own = build_learner(micro_model, tmp_path / name, learner={"batch_size": len(episodes)})
        seen = Gradients(own.policy)
        own.step(episodes)
        updates.append(seen.updates)
    assert len(updates[0]) == 1
    assert same(updates[0][0], updates[1][0])


def test_a_branchs_tokens_move_the_policy(micro_model: Path, tmp_path: Path) -> None:
    """Without the branch the update is another one."""
    moved = []
    for name, given in (("with", branched()), ("without", msgspec.structs.replace(branched(), branches=()))):
        own = build_learner(micro_model, tmp_path / name, learner={"batch_size": 4})
        own.step([given, *random_episodes(3, seed=3)])
        moved.append(snapshot(own.policy))
    assert not same(*moved)


@pytest.mark.parametrize("name", ["grpo_dis", "rloo"])
def test_group_baselines_count_an_episode_once_however_many_branches_it_has(name: str) -> None:
    algorithm = get_algorithm(name)
    plain = [episode(MAIN, [0.0, r], name=f"p{i}", group="g") for i, r in enumerate((1.25, 0.0, 0.0))]
    alone = build_batch(plain)
    many = build_batch([branched(name="b", group="g"), *plain[1:]])
    wanted = compute_advantages(algorithm, alone.credit_inputs())
    found = compute_advantages(algorithm, many.credit_inputs())
    for row, of in enumerate([0, 0, 0, 1, 2]):
        assert (
            found[row][many.action_mask[row]].unique().tolist() == wanted[of][alone.action_mask[of]].unique().tolist()
        )


def test_an_episode_alone_in_its_group_is_refused_with_branches_too() -> None:
    inputs = build_batch([branched(group="g")]).credit_inputs()
    with pytest.raises(ValueError, match="has one episode"):
        compute_advantages(get_algorithm("grpo_dis"), inputs)


def test_the_running_mean_hears_of_an_episode_once() -> None:
    mean = RunningMeanBaseline(8, per_prompt=False)
    inputs = build_batch([branched("a"), branched("b", reward=0.0)]).credit_inputs(running_mean=mean)
    found = compute_advantages(get_algorithm("sao_running_mean"), inputs)
    assert mean.state_dict()["history"][""] == [1.25, 0.25]
    assert [row.abs().max().item() for row in found] == [1.25] * 3 + [1.0] * 3


def test_a_group_is_constant_by_its_episodes_and_not_by_its_rows() -> None:
    same_reward = [branched("a", group="g", reward=0.1), episode(MAIN, [0.0, 0.1 + 0.25], name="b", group="g")]
    batch, share = without_constant_groups(build_batch(same_reward))
    assert share == 1.0
    assert not batch.action_mask.any()


def test_shuffled_rewards_leave_no_reward_on_a_branch() -> None:
    given = [branched("a"), episode(MAIN, [0.0, 3.0], name="b")]
    found = shuffled_rewards(given, 1)
    assert sorted(e.reward for e in found) == [1.25, 3.0]
    assert [e.turn_rewards[:-1] for e in found] == [(0.0,)] * 2
    assert all(not any(branch.turn_rewards) for e in found for branch in e.branches)


def test_chains_of_an_episode_stay_on_one_rank_and_in_one_minibatch() -> None:
    episodes = [branched(f"e{i}") if i % 3 == 0 else random_episodes(1, seed=i)[0] for i in range(8)]
    episodes = [msgspec.structs.replace(e, id=f"e{i}", group_id=None) for i, e in enumerate(episodes)]
    parts = minibatches_of(episodes, 2)
    ranks = [places_of_rows(episodes, share_of_rank(episodes, parts, rank, 2)) for rank in range(2)]
    batch = build_batch(episodes)
    assert sorted(row for rows in ranks for row in rows) == list(range(batch.size))
    held = [set(batch.episodes[rows].tolist()) for rows in ranks]
    assert not held[0] & held[1]


def test_annotations_are_of_episodes_and_follow_their_chains(micro_model: Path, tmp_path: Path) -> None:
    """`agent.inspect` shows an episode with as many annotations as it has action tokens."""
    episodes = [branched("b"), *random_episodes(3)]
    batch, result = build_learner(micro_model, tmp_path, learner={"batch_size": 4}).step(episodes)
    found = step_annotations(batch, result, 0)
    assert [a.episode_id for a in found] == [e.id for e in episodes]
    assert [len(a.advantages) for a in found] == [e.action_tokens for e in episodes]
    assert result.advantages is not None
    rows = [result.advantages[row][batch.action_mask[row]] for row in range(3)]
    assert found[0].advantages.tolist() == torch.cat(rows).tolist()
    token_views(episodes[0], found[0], None)


def test_updates_are_counted_in_episodes_and_not_in_rows(micro_model: Path, tmp_path: Path) -> None:
    own = build_learner(micro_model, tmp_path, learner={"batch_size": 4})
    own.step([branched("b"), *random_episodes(3)])
    assert own.progress.episodes == 4
