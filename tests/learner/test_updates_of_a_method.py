"""Several updates a batch, schedules that count steps, and what is shown of each method's own gate."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from learner_tools import Gradients, action, build_learner, episode, prompt, random_episodes

from agent.episode import Episode
from learner.config import LearnerConfig
from learner.data.minibatches import minibatches_of, places, share_of_rank
from learner.losses import dis_gate
from learner.run.annotations import step_annotations
from learner.run.learner import Learner

GROUPS = {"batch_size": 16, "policy": {"lr": 1e-2, "warmup_steps": 0}}


def gradients(model: Path, folder: Path, episodes: Sequence[Episode], **changes: Any) -> list[dict[str, torch.Tensor]]:
    own = build_learner(model, folder, learner={**GROUPS, **changes})
    recorded = Gradients(own.policy)
    own.step(list(episodes))
    return recorded.updates


def test_one_update_a_batch_makes_grpo_and_gspo_the_same_and_several_make_them_two(
    micro_model: Path, tmp_path: Path
) -> None:
    """Case N5: with one update the ratio is 1, and nothing is left that could tell them apart."""
    batch = random_episodes(16, seed=3, group_size=8)
    one, same = (gradients(micro_model, tmp_path, batch, algorithm=name) for name in ("grpo", "gspo"))
    assert len(one) == len(same) == 1
    assert all(torch.equal(one[0][name], same[0][name]) for name in one[0])
    wide = {"policy_epochs": 2, "eps_low": 0.9, "eps_high": 9.0}  # or GSPO would have clipped all by then
    several = [gradients(micro_model, tmp_path, batch, algorithm=n, **wide) for n in ("grpo", "gspo")]
    assert [len(updates) for updates in several] == [2, 2]
    assert all(torch.equal(several[0][0][name], one[0][name]) for name in one[0])
    apart = [(several[0][1][name] - several[1][1][name]).abs().max() for name in one[0]]
    assert max(apart) > 0.01 * max(gradient.abs().max() for gradient in one[0].values())


@pytest.mark.parametrize("name", ["sao", "ppo", "vapo", "grpo", "icepop", "grpo_dis"])
def test_minibatches_are_updates_and_their_old_policy_is_that_of_the_start(
    micro_model: Path, tmp_path: Path, name: str
) -> None:
    changes = {**GROUPS, "algorithm": name, "policy_epochs": 3, "policy_minibatches": 2}
    own, fresh = build_learner(micro_model, tmp_path, learner=changes), build_learner(micro_model, tmp_path)
    recorded = Gradients(own.policy)
    part, result = own.step(random_episodes(16, seed=3, group_size=8))
    start = fresh.policy.module(part.input_ids, part.action_mask)[0]
    assert len(recorded.updates) == own.policy.updates == 6
    assert result.logprobs is not None
    torch.testing.assert_close(result.logprobs, start.detach(), atol=1e-5, rtol=0)
    assert result.figures["policy/updates"] == 6
    assert result.figures["policy/gradient_norm"] > 0


def test_several_updates_clip_where_one_could_not(micro_model: Path, tmp_path: Path) -> None:
    batch = random_episodes(16, seed=3, group_size=8)
    shares = []
    for epochs in (1, 4):
        own = build_learner(micro_model, tmp_path, learner={**GROUPS, "algorithm": "ppo", "policy_epochs": epochs})
        shares.append(own.step(batch)[1].figures["gate/share"])
    assert shares[0] == 0 < shares[1]


@pytest.mark.parametrize("name", ["rloo", "impala"])
@pytest.mark.parametrize("key", ["policy_epochs", "policy_minibatches"])
def test_without_a_ratio_a_batch_is_learned_from_once(name: str, key: str) -> None:
    with pytest.raises(ValueError, match=rf"{key} is 2, and '{name}' has no ratio"):
        LearnerConfig.model_validate({"algorithm": name, key: 2})


def test_a_prompt_is_never_split_so_there_are_no_more_minibatches_than_prompts() -> None:
    with pytest.raises(ValueError, match="policy_minibatches 3 is more than the 2 prompts"):
        LearnerConfig.model_validate({"algorithm": "grpo", "batch_size": 16, "policy_minibatches": 3})


@given(
    lengths=st.lists(st.integers(1, 40), min_size=8, max_size=40),
    count=st.integers(1, 4),
    world=st.integers(1, 2),
    size=st.sampled_from([1, 2]),
)
@settings(max_examples=60, deadline=None)
def test_minibatches_hold_whole_groups_and_are_the_same_however_many_ranks_share_them(
    lengths: list[int], count: int, world: int, size: int
) -> None:
    batch = [
        episode([prompt([1]), action([2] * n)], [0.0], name=f"e{i}", group=f"g{i // size}")
        for i, n in enumerate(lengths)
    ]
    groups = -(-len(batch) // size)
    if groups < count * world:
        return
    parts = minibatches_of(batch, count)
    assert sorted(row for rows in parts for row in rows) == list(range(len(batch)))
    held = [{batch[row].group_id for row in rows} for rows in parts]
    assert sum(len(names) for names in held) == groups
    assert max(map(len, held)) - min(map(len, held)) <= 1
    shares = [share_of_rank(batch, parts, rank, world) for rank in range(world)]
    assert sorted(row for rows in shares for row in rows) == list(range(len(batch)))
    for number, part in enumerate(parts):  # the union over ranks of a minibatch is that minibatch
        found = [rows[index] for rows in shares for index in places(rows, parts)[number]]
        assert sorted(found) == part


def rates_of(own: Learner, steps: int) -> tuple[list[float], list[float]]:
    """The rates of every update of policy and critic over so many steps."""
    seen: tuple[list[float], list[float]] = ([], [])
    for rates, trainee in zip(seen, (own.policy, own.critic), strict=True):
        if trainee is not None:
            hook = lambda optimizer, *_, rates=rates: rates.append(optimizer.param_groups[0]["lr"])  # noqa: E731
            trainee.optimizer.optimizer.register_step_pre_hook(hook)
    for number in range(steps):
        own.step(random_episodes(16, seed=number, group_size=8))
    return seen


def test_a_schedule_counts_the_steps_that_its_model_has(micro_model: Path, tmp_path: Path) -> None:
    """Case N10: the policy ended at .6 of its rate, and the critic's warm-up was over after half its steps."""
    falling = {"lr": 0.01, "warmup_steps": 0, "final_lr_ratio": 0.0}
    own = build_learner(
        micro_model,
        tmp_path,
        learner={
            "steps": 10,
            "critic_only_steps": 5,
            "policy": falling,
            "critic": {**falling, "warmup_steps": 4},
        },
    )
    policy, critic = rates_of(own, 10)
    assert policy == pytest.approx([0.01, 0.008, 0.006, 0.004, 0.002])
    steps = [0.0025, 0.005, 0.0075, 0.01, 0.01, *(0.01 * (1 - n / 6) for n in range(1, 6))]
    assert critic == pytest.approx([rate for rate in steps for _ in range(2)])


def test_the_updates_of_a_step_have_one_rate(micro_model: Path, tmp_path: Path) -> None:
    changes = {"policy": {"lr": 0.01, "warmup_steps": 2}, "policy_epochs": 2, "policy_minibatches": 2}
    own = build_learner(micro_model, tmp_path, learner={**GROUPS, "algorithm": "grpo", **changes})
    assert rates_of(own, 3)[0] == pytest.approx([0.005] * 4 + [0.01] * 8)


def noted(own: Learner, batch: list[Episode]) -> list[list[int]]:
    part, result = own.step(batch)
    return [list(note.gated) for note in step_annotations(part, result, 0)]


def sampled_elsewhere(batch: list[Episode], shift: float) -> list[Episode]:
    """The same episodes, as if another policy had sampled them: log mu moved by `shift` on every token."""
    return [
        msgspec.structs.replace(
            e,
            segments=tuple(
                msgspec.structs.replace(s, logprobs=tuple(p + shift for p in s.logprobs)) for s in e.segments
            ),
        )
        for e in batch
    ]


@pytest.mark.parametrize(
    ("name", "codes"),
    [("sao", {1}), ("grpo_dis", {1}), ("icepop", {1}), ("rloo", {0}), ("gspo", {0}), ("grpo", {0}), ("ppo", {0}),
     ("impala", {0})],
)  # fmt: skip
def test_what_is_shown_as_gated_is_what_the_methods_own_rule_left_out(
    micro_model: Path, tmp_path: Path, name: str, codes: set[int]
) -> None:
    """Case N12: every method was shown with the gate of DIS. Here pi / mu is far above every interval."""
    batch = sampled_elsewhere(random_episodes(16, seed=3, group_size=8), -6.0)
    own = build_learner(micro_model, tmp_path, learner={**GROUPS, "algorithm": name})
    assert {code for row in noted(own, batch) for code in row} == codes


def test_gspo_is_shown_to_gate_whole_episodes(micro_model: Path, tmp_path: Path) -> None:
    own = build_learner(micro_model, tmp_path, learner={**GROUPS, "algorithm": "gspo", "policy_minibatches": 2})
    rows = noted(own, random_episodes(16, seed=3, group_size=8))
    assert all(len(set(row)) == 1 for row in rows)
    assert {row[0] for row in rows} > {0}


@pytest.mark.parametrize("aggregation", ["token_mean", "sequence_mean"])
def test_the_listings_denominator_is_that_of_the_whole_batch_however_it_is_cut(
    micro_model: Path, tmp_path: Path, aggregation: str
) -> None:
    """Case N7: `learner.denominator` acts, in micro-batches as in one piece."""
    moved = {"lr": 1e-2, "warmup_steps": 0, "clip_norm": 1e9}
    batch = random_episodes(16, seed=3, group_size=8)
    batch[:5] = sampled_elsewhere(batch[:5], -6.0)  # gated

    def of(**changes: Any) -> dict[str, torch.Tensor]:
        options = {"algorithm": "grpo_dis", "policy": moved, "aggregation": aggregation, **changes}
        return gradients(micro_model, tmp_path, batch, **options)[0]

    by_action, whole = of(), of(denominator="trusted")
    cut = of(denominator="trusted", micro_batch_tokens=40)
    for name in whole:
        torch.testing.assert_close(cut[name], whole[name], atol=1e-6, rtol=1e-4)
    assert max((whole[name] - by_action[name]).abs().max() for name in whole) > 1e-3
    if aggregation == "token_mean":
        own = build_learner(micro_model, tmp_path, learner={**GROUPS, "algorithm": "grpo_dis"})
        part, result = own.step(batch)
        assert result.logprobs is not None
        gate = dis_gate(result.logprobs, part.rollout_logprobs, part.action_mask, eps_low=0.3, eps_high=5.0)
        scale = part.action_tokens / int(gate.trusted.sum())
        for name in whole:
            torch.testing.assert_close(whole[name], by_action[name] * scale, atol=1e-6, rtol=1e-4)
