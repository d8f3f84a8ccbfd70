"""Which episodes count, and with whom they are compared."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from learner_tools import action, build_learner, episode, micro_recipe, prompt, random_episodes

from agent.episode import Episode, SamplingParams, StopReason
from learner.advantages import RunningMeanBaseline
from learner.algorithms import ALGORITHMS, compute_advantages, get_algorithm
from learner.data.batch import SamplingMismatch, build_batch, family_of, without_constant_groups
from learner.faults import LearnerFault
from learner.run.learner import Learner

GROUPED = [name for name, algorithm in ALGORITHMS.items() if algorithm.needs_groups]


def group(rewards: list[float], *, dropped: tuple[int, ...] = (), name: str = "g") -> list[Episode]:
    return [
        episode(
            [prompt([1]), action([2, 3])],
            [reward],
            name=f"{name}{i}",
            group=name,
            stop=StopReason.TRUNCATED_TURNS if i in dropped else StopReason.TERMINATED,
        )
        for i, reward in enumerate(rewards)
    ]


def advantages(name: str, episodes: list[Episode], truncation: str = "drop", **computed: Any) -> list[float]:
    batch = build_batch(episodes, truncation=truncation)
    return compute_advantages(get_algorithm(name), batch.credit_inputs(**computed))[:, -1].tolist()


@pytest.mark.parametrize("name", GROUPED)
def test_a_dropped_episode_is_in_no_mean_of_its_group(name: str) -> None:
    """Case N9: it counted as a reward of 0, and gave the others .378."""
    assert advantages(name, group([1.0] * 8, dropped=(5,))) == [0.0] * 8
    full = group([1.0, 0.0, 1.0, 0.0, 1.0, 0.0, 0.0, 1.0], dropped=(5,))
    without = advantages(name, [e for i, e in enumerate(full) if i != 5])
    assert advantages(name, full) == pytest.approx([*without[:5], 0.0, *without[5:]])
    assert advantages(name, full, "terminal") != pytest.approx([*without[:5], 0.0, *without[5:]])


@pytest.mark.parametrize("name", GROUPED)
def test_who_is_left_alone_has_nobody_to_be_compared_with(name: str) -> None:
    """No crash in the middle of a run; a group that came with one episode stays the error that it is."""
    assert advantages(name, group([1.0, 0.0, 1.0], dropped=(0, 1))) == [0.0] * 3
    assert advantages(name, group([1.0, 0.0], dropped=(0, 1))) == [0.0] * 2
    with pytest.raises(ValueError, match="has one episode: a group baseline needs at least 2"):
        advantages(name, [*group([1.0, 0.0]), *group([1.0], name="alone")])


def test_a_dropped_episode_is_in_no_history() -> None:
    mean = RunningMeanBaseline(8, per_prompt=False)
    found = advantages("sao_running_mean", group([1.0, 1.0, 0.0], dropped=(1,)), running_mean=mean)
    assert found == [1.0, 0.0, -1.0]
    assert mean.state_dict()["history"] == {"": [1.0, 0.0]}


def test_a_task_is_a_family_of_problems_and_not_the_environment() -> None:
    """Case N17: the whole batch of an environment was one task."""
    named = [
        episode([prompt([1]), action([2])], [float(reward)], name=f"{family}{i}", group=family,
                metrics={"family": family} if family else {})
        for family, rewards in (("algebra", (0, 1)), ("", (0, 5)), ("sums", (3, 9)))
        for i, reward in enumerate(rewards)
    ]  # fmt: skip
    assert [family_of(e) for e in named[::2]] == [
        "sao/PythonTIR-v0: algebra", "sao/PythonTIR-v0", "sao/PythonTIR-v0: sums",
    ]  # fmt: skip
    assert build_batch(named).rows([2, 5]).families == ("sao/PythonTIR-v0", "sao/PythonTIR-v0: sums")
    lengths = [  # a long task and a short one: each comes out with mean 0 and deviation 1 over its own tokens
        episode([prompt([1]), action([2] * size)], [float(i == 0)], name=f"{family}{i}", group=family,
                metrics={"family": family})
        for family, sizes in (("long", (9, 3)), ("short", (1, 1)))
        for i, size in enumerate(sizes)
    ]  # fmt: skip
    batch = build_batch(lengths)
    found = compute_advantages(get_algorithm("agentrl"), batch.credit_inputs())
    for family in ("long", "short"):
        rows = [i for i, name in enumerate(batch.families) if name.endswith(family)]
        chosen = found[rows][batch.action_mask[rows]]
        assert chosen.mean().item() == pytest.approx(0.0, abs=1e-5)
        assert chosen.std(correction=0).item() == pytest.approx(1.0, abs=1e-4)


@pytest.mark.parametrize(
    "used",
    [
        SamplingParams(temperature=0.5, top_p=0.9),
        SamplingParams(temperature=0.5),
        SamplingParams(temperature=1.01),
        SamplingParams(temperature=0.0),
        SamplingParams(top_p=0.9),
        SamplingParams(top_k=20),
    ],
    ids=str,
)
def test_an_episode_that_was_sampled_otherwise_is_refused(micro_model: Path, tmp_path: Path, used: Any) -> None:
    """Case N8, A19: one among many is enough, and nothing has moved by then."""
    own = build_learner(micro_model, tmp_path)
    batch = random_episodes(8, seed=1)
    batch[6] = msgspec.structs.replace(batch[6], sampling=used, worker="elsewhere")
    with pytest.raises(SamplingMismatch, match=r"episode e6 of elsewhere was sampled at temperature") as caught:
        own.step(batch)
    assert isinstance(caught.value, LearnerFault)  # one paragraph and exit code 1, as all faults that end a run
    assert "runtime.sampling" in str(caught.value)
    assert own.progress.step == own.policy.updates == 0


def test_what_does_not_change_the_distribution_is_no_reason(micro_model: Path, tmp_path: Path) -> None:
    recipe = {"runtime": {"sampling": {"temperature": 0.5}, "max_context_tokens": 400}}
    own = build_learner(micro_model, tmp_path, **recipe)
    used = SamplingParams(temperature=0.5, top_k=0, max_tokens=7, seed=3, stop_token_ids=(1,))
    batch = [msgspec.structs.replace(e, sampling=used) for e in random_episodes(8, seed=1)]
    assert own.step(batch)[1].policy_moved
    with pytest.raises(SamplingMismatch):
        own.step(random_episodes(8, seed=1))


def test_groups_without_variance_count_in_no_denominator_where_the_recipe_says_so(
    micro_model: Path, tmp_path: Path
) -> None:
    rng = random_episodes(24, seed=3, group_size=8)
    rewards = [[1.0] * 8, [1.0, 0.0] * 4, [0.0] * 8]
    batch = [
        msgspec.structs.replace(e, turn_rewards=(*[0.0] * (len(e.turn_rewards) - 1), rewards[i // 8][i % 8]))
        for i, e in enumerate(rng)
    ]

    def learner(**changes: Any) -> Learner:
        return build_learner(micro_model, tmp_path, learner={"algorithm": "grpo", "batch_size": 24, **changes})

    kept, share = without_constant_groups(build_batch(batch))
    assert share == pytest.approx(2 / 3)
    assert kept.action_mask.any(1).tolist() == [False] * 8 + [True] * 8 + [False] * 8
    whole, skipping = learner(), learner(skip_constant_groups=True)
    (_, all_of), (_, some) = whole.step(batch), skipping.step(batch)
    assert some.figures["rollout/constant_groups"] == pytest.approx(2 / 3)
    assert "rollout/constant_groups" not in all_of.figures
    # Their advantages were 0 already; it is the mean over episodes that is three times as large.
    assert some.figures["policy/gradient_norm"] == pytest.approx(3 * all_of.figures["policy/gradient_norm"], rel=1e-3)
    before = {k: v.clone() for k, v in skipping.policy.unwrapped.state_dict().items()}
    _, nothing = skipping.step([msgspec.structs.replace(e, turn_rewards=(0.0,) * len(e.turn_rewards)) for e in batch])
    assert not nothing.policy_moved
    assert all(torch.equal(v, before[k]) for k, v in skipping.policy.unwrapped.state_dict().items())


def test_a_dropped_episode_gives_a_group_no_variance() -> None:
    batch = build_batch([*group([1.0, 1.0, 0.0], dropped=(2,)), *group([1.0, 0.0], name="h")], truncation="drop")
    kept, share = without_constant_groups(batch)
    assert share == 0.5
    assert kept.action_mask.any(1).tolist() == [False, False, False, True, True]


def test_a_filter_on_groups_is_refused_where_there_are_none(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="skip_constant_groups has no effect with 'sao'"):
        micro_recipe(tmp_path, learner={"skip_constant_groups": True})
