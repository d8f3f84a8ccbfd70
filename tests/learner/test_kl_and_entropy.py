"""A step with a pull to a reference, with a bonus for entropy, and along a cosine."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from learner_tools import Gradients, build_learner, micro_recipe, random_episodes, snapshot, write_micro_model

from learner.config import OptimizerConfig, RecipeError
from learner.model.trainee import learning_rate
from learner.plan.phases import make_plan
from learner.run.learner import Learner

FAST = {"batch_size": 16, "policy": {"lr": 1e-2, "warmup_steps": 0, "clip_norm": 1e9}}


def learner(model: Path, folder: Path, **changes: Any) -> Learner:
    return build_learner(model, folder, learner={**FAST, **changes})


def gradient(own: Learner, seed: int = 3) -> dict[str, torch.Tensor]:
    recorded = Gradients(own.policy)
    own.step(random_episodes(16, seed=seed, group_size=8))
    return recorded.updates[0]


def most_apart(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> float:
    return max(float((left[name] - right[name]).abs().max()) for name in left)


@pytest.mark.parametrize("form", ["loss", "reward"])
@pytest.mark.parametrize("algorithm", ["sao", "grpo"])
def test_at_the_start_nothing_pulls_and_later_something_does(
    micro_model: Path, tmp_path: Path, algorithm: str, form: str
) -> None:
    kl = {"kl": {"coefficient": 5.0, "form": form}, "algorithm": algorithm}
    plain, pulled = (learner(micro_model, tmp_path, **more) for more in ({"algorithm": algorithm}, kl))
    assert most_apart(gradient(plain), gradient(pulled)) < 1e-5
    assert most_apart(snapshot(plain.policy), snapshot(pulled.policy)) < 1e-4
    assert pulled.reference is not None
    assert not any(p.requires_grad for p in pulled.reference.parameters())
    _, result = pulled.step(random_episodes(16, seed=4, group_size=8))
    assert result.figures["policy/kl"] > 1e-4
    apart = most_apart(gradient(plain, 5), gradient(pulled, 5))
    assert apart > 1e-3


def test_a_pull_in_the_loss_keeps_the_policy_near_its_reference(micro_model: Path, tmp_path: Path) -> None:
    far = []
    for coefficient in (1e-6, 20.0):
        gentle = {"lr": 1e-3, "warmup_steps": 0}
        own = learner(micro_model, tmp_path, algorithm="grpo", policy=gentle, kl={"coefficient": coefficient})
        for _ in range(7):
            _, result = own.step(random_episodes(16, seed=3, group_size=8))
        far.append(result.figures["policy/kl"])
    assert far[1] < 0.25 * far[0]


def test_a_pull_in_the_rewards_is_seen_by_the_critic_too(micro_model: Path, tmp_path: Path) -> None:
    """Rewards of 0 have returns of 0; with the penalty the critic has something to learn."""
    other = write_micro_model(tmp_path / "other", seed=7)
    kl = {"coefficient": 1.0, "form": "reward", "reference": str(other)}
    batch = [e for e in random_episodes(60, seed=1) if e.reward == 0][:16]
    norms = []
    for changes in ({}, {"kl": kl}):
        own = learner(micro_model, tmp_path, **changes)
        _, result = own.step(batch)
        norms.append(result.figures["critic/gradient_norm"])
    assert norms[0] == 0
    assert norms[1] > 0


def test_the_reference_is_the_folder_that_the_recipe_names_and_no_step_moves_it(
    micro_model: Path, tmp_path: Path
) -> None:
    other = write_micro_model(tmp_path / "other", seed=7)
    own = learner(micro_model, tmp_path, algorithm="grpo", kl={"coefficient": 0.1, "reference": str(other)})
    assert own.reference is not None
    before = {name: p.clone() for name, p in own.reference.named_parameters()}
    _, result = own.step(random_episodes(16, seed=3, group_size=8))
    assert result.figures["policy/kl"] > 0
    assert all(torch.equal(p, before[name]) for name, p in own.reference.named_parameters())
    with pytest.raises(RecipeError, match=r"learner\.kl\.reference: .*nowhere holds no model"):
        learner(micro_model, tmp_path, kl={"coefficient": 0.1, "reference": str(tmp_path / "nowhere")})


@pytest.mark.parametrize("kl", [{"coefficient": 0.0}, {"coefficient": 1.0, "form": "both"}, {"form": "loss"}])
def test_a_pull_that_is_none_is_refused(tmp_path: Path, kl: dict[str, Any]) -> None:
    with pytest.raises(RecipeError, match=r"learner\.kl"):
        micro_recipe(tmp_path, learner={"kl": kl})


def test_the_plan_counts_the_reference(tmp_path: Path) -> None:
    without, beside = (make_plan(micro_recipe(tmp_path, learner=more)) for more in ({}, {"kl": {"coefficient": 0.1}}))
    gained = {row.phase: row.usage.parameters for row in beside.rows}
    for row in without.rows:
        expected = 4 * without.parameters if row.phase.startswith("RL, ") else 0
        assert gained[row.phase] - row.usage.parameters == pytest.approx(expected)


@pytest.mark.parametrize("chunk", [3, 8192])
def test_the_bonus_raises_entropy_whatever_the_chunks_of_the_head(
    micro_model: Path, tmp_path: Path, chunk: int
) -> None:
    with_it = learner(micro_model, tmp_path, algorithm="grpo", entropy_bonus=0.5, logprob_chunk=chunk)
    without = learner(micro_model, tmp_path, algorithm="grpo", logprob_chunk=chunk)
    batch = random_episodes(16, seed=3, group_size=8)
    found = []
    for own in (with_it, without):
        recorded = Gradients(own.policy)
        _, result = own.step(batch)
        found.append((recorded.updates[0], result.figures["policy/entropy"]))
    assert found[0][1] == found[1][1]  # figures are of before the update
    part = without.step(batch)[0]
    fresh = learner(micro_model, tmp_path, algorithm="grpo", entropy_bonus=1.0, logprob_chunk=chunk)
    _, entropy = fresh.policy.module(part.input_ids, part.action_mask)
    per_episode = (entropy.sum(1) / part.action_mask.sum(1)).mean()
    assert entropy.requires_grad
    per_episode.backward()
    for name, parameter in fresh.policy.module.named_parameters():
        assert parameter.grad is not None
        added = found[0][0][name] - found[1][0][name]
        torch.testing.assert_close(added, -0.5 * parameter.grad, atol=2e-5, rtol=1e-3)


def test_without_a_bonus_entropy_costs_no_gradient(micro_model: Path, tmp_path: Path) -> None:
    own = learner(micro_model, tmp_path)
    part = own.step(random_episodes(16, seed=3))[0]
    assert not own.policy.module(part.input_ids, part.action_mask)[1].requires_grad


def test_a_cosine_falls_slowly_at_both_ends() -> None:
    own = OptimizerConfig(lr=1.0, warmup_steps=2, schedule="cosine", final_lr_ratio=0.2)
    rates = [learning_rate(own, step, 12) for step in range(15)]
    assert rates[:3] == pytest.approx([0.5, 1.0, 1.0])
    assert rates[2:12] == pytest.approx([0.2 + 0.8 * (1 + math.cos(math.pi * n / 10)) / 2 for n in range(10)])
    assert rates[12:] == pytest.approx([0.2] * 3)
    assert learning_rate(OptimizerConfig(lr=1.0, warmup_steps=0, schedule="cosine"), 10, 10) == pytest.approx(0.0)
    assert learning_rate(OptimizerConfig(lr=1.0, warmup_steps=0), 10, 10) == 1.0
