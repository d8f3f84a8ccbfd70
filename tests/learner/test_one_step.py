"""One SAO step through the real trainees: what moves, and that micro-batches change nothing."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from learner_tools import (
    Gradients,
    action,
    build_learner,
    episode,
    micro_recipe,
    moments,
    prompt,
    random_episodes,
    same,
    snapshot,
)
from msgspec.structs import replace
from rich.console import Console
from torch import Tensor

from agent.episode import Episode, StopReason
from learner.advantages import skip_observation_gae
from learner.algorithms import compute_advantages
from learner.config import OptimizerConfig
from learner.data.batch import build_batch
from learner.faults import LearnerFault
from learner.maths.statistics import explained_variance
from learner.model.critic import new_critic
from learner.model.loading import load_body
from learner.model.trainee import learning_rate
from learner.pretrain_value import fit_critic
from learner.run.display import Display
from learner.run.learner import Learner

NO_CLIP = {"policy": {"lr": 1e-2, "clip_norm": 1e9}, "critic": {"lr": 1e-2, "clip_norm": 1e9}}


def gated_row(name: str, logprob: float = 8.0) -> Episode:
    """An episode that is longer than others, so that it makes a micro-batch of its own, every token gated."""
    return episode([prompt(range(20)), action(range(40, 60), logprob)], [1.0], name=name)


def one_step(model: Path, folder: Path, episodes: list[Episode], tokens: int, **learner: Any) -> dict[str, Any]:
    own = build_learner(model, folder, learner={**NO_CLIP, **learner, "micro_batch_tokens": tokens})
    policy, critic = Gradients(own.policy), None
    if own.critic is not None:
        with torch.no_grad():  # a head at zero would send no gradient into the critic's body
            own.critic.unwrapped.head.weight.normal_(generator=torch.Generator().manual_seed(1))
        critic = Gradients(own.critic)
    _, result = own.step(episodes)
    return {"policy": policy.updates, "critic": critic.updates if critic else None, "figures": result.figures}


def close(left: list[dict[str, Tensor]], right: list[dict[str, Tensor]]) -> None:
    assert len(left) == len(right) > 0
    for a, b in zip(left, right, strict=True):
        assert a.keys() == b.keys()
        scale = max(float(g.abs().max()) for g in a.values())
        assert scale > 0
        for name in a:
            torch.testing.assert_close(a[name], b[name], atol=2e-5 * scale, rtol=1e-3, msg=name)


@pytest.mark.parametrize("algorithm", ["sao", "ppo", "gspo", "impala"])
def test_micro_batches_change_no_gradient_even_where_one_is_all_gated(
    micro_model: Path, tmp_path: Path, algorithm: str
) -> None:
    """Case A4: the same gradients whatever `micro_batch_tokens`, for token means and sequence means."""
    episodes = random_episodes(14, group_size=7)
    episodes += [in_group(gated_row("a"), "g0"), in_group(gated_row("b"), "g1")]
    changes: dict[str, Any] = {"algorithm": algorithm, "batch_size": 16}
    whole = one_step(micro_model, tmp_path, episodes, 100_000, max_padding=0.99, **changes)
    for tokens, padding in ((1, 0.05), (60, 0.5)):
        parts = one_step(micro_model, tmp_path, episodes, tokens, max_padding=padding, **changes)
        close(whole["policy"], parts["policy"])
        if whole["critic"]:
            close(whole["critic"][:1], parts["critic"][:1])
        for name, figure in whole["figures"].items():
            assert parts["figures"][name] == pytest.approx(figure, rel=2e-3, abs=1e-4, nan_ok=True), name


def in_group(own: Episode, name: str) -> Episode:
    return episode(own.segments, own.turn_rewards, name=own.id, group=name, task=name)


def test_explained_variance_is_that_of_the_global_batch_through_any_micro_batches(
    micro_model: Path, tmp_path: Path
) -> None:
    """Case A16: never a mean of micro-batch figures, which is undefined where a micro-batch's returns are constant."""
    episodes = random_episodes(12)
    own = build_learner(micro_model, tmp_path, learner={"micro_batch_tokens": 1})
    assert own.critic is not None
    with torch.no_grad():
        own.critic.unwrapped.head.weight.normal_(generator=torch.Generator().manual_seed(1))
        batch = build_batch(episodes)
        values = own.critic.module(batch.input_ids)[0]
    _, returns = skip_observation_gae(batch.rewards, values, batch.action_mask, lam=1.0)
    _, result = own.step(episodes)
    wanted = explained_variance(returns, values, batch.action_mask)
    assert result.figures["critic/explained_variance"] == pytest.approx(wanted, abs=1e-5)


def test_constant_returns_leave_explained_variance_undefined_not_zero(micro_model: Path, tmp_path: Path) -> None:
    """Case A16."""
    episodes = [episode([prompt([i]), action([i, 3])], [1.0], name=f"e{i}") for i in range(8)]
    _, result = build_learner(micro_model, tmp_path).step(episodes)
    assert math.isnan(result.figures["critic/explained_variance"])


@pytest.mark.parametrize("updates", [1, 2, 3])
def test_values_are_read_again_after_all_critic_updates(micro_model: Path, tmp_path: Path, updates: int) -> None:
    """Case A15: with the real critic, the advantages use what it says after update K, not before and not K-1."""
    episodes = random_episodes(8)
    own = build_learner(micro_model, tmp_path, learner={"critic_updates": updates})
    assert own.critic is not None
    batch = build_batch(episodes)

    def read() -> Tensor:
        with torch.no_grad():
            return own.critic.module(batch.input_ids)[0]  # type: ignore[union-attr]

    seen = [read()]
    own.critic.optimizer.optimizer.register_step_post_hook(lambda *_: seen.append(read()))
    _, result = own.step(episodes)
    assert len(seen) == updates + 1
    assert own.critic.updates == updates
    assert result.values is not None
    assert result.advantages is not None
    on = batch.action_mask
    torch.testing.assert_close(result.values[on], seen[-1][on], atol=1e-6, rtol=1e-5)
    for earlier in seen[:-1]:
        assert not torch.allclose(earlier[on], seen[-1][on], atol=1e-4)
    wanted = compute_advantages(own.algorithm, batch.credit_inputs(values=seen[-1]))
    torch.testing.assert_close(result.advantages[on], wanted[on], atol=1e-5, rtol=1e-4)


def nudged(learner: Learner) -> Learner:
    """After one ordinary step: optimisers have momentum that a careless step of zero gradient would spend."""
    learner.step(random_episodes(8, seed=99))
    return learner


def test_a_batch_without_an_action_token_moves_neither_optimiser(micro_model: Path, tmp_path: Path) -> None:
    """Case A22: no momentum, no decay, no schedule; the step is counted and the claim can be committed."""
    own = nudged(build_learner(micro_model, tmp_path))
    assert own.critic is not None
    before = [(snapshot(t), moments(t), t.updates) for t in (own.policy, own.critic)]
    dropped = [episode(e.segments, e.turn_rewards, name=e.id, stop=StopReason.ABORTED) for e in random_episodes(8)]
    _, result = own.step(dropped)
    assert not result.policy_moved
    assert not result.critic_moved
    assert own.progress.step == 2
    for trainee, (weights, state, updates) in zip((own.policy, own.critic), before, strict=True):
        assert same(snapshot(trainee), weights)
        assert all(torch.equal(a, b) for a, b in zip(moments(trainee), state, strict=True))
        assert trainee.updates == updates


@pytest.mark.parametrize("logprob", [8.0, -60.0, -math.inf], ids=["below", "above", "nonfinite"])
def test_a_batch_whose_tokens_are_all_gated_trains_the_critic_alone(
    micro_model: Path, tmp_path: Path, logprob: float
) -> None:
    """Case A22: policy, its optimiser and its schedule stay as they are; `policy_moved` is False: no version."""
    own = nudged(build_learner(micro_model, tmp_path))
    assert own.critic is not None
    policy, state, updates = snapshot(own.policy), moments(own.policy), own.policy.updates
    critic, critic_updates = snapshot(own.critic), own.critic.updates
    _, result = own.step([gated_row(f"g{i}", logprob) for i in range(8)])
    assert not result.policy_moved
    assert result.critic_moved
    assert same(snapshot(own.policy), policy)
    assert all(torch.equal(a, b) for a, b in zip(moments(own.policy), state, strict=True))
    assert own.policy.updates == updates
    assert not same(snapshot(own.critic), critic)
    assert own.critic.updates == critic_updates + 2
    side = {8.0: "gate/low_share", -60.0: "gate/high_share"}.get(logprob)
    assert result.figures["gate/nonfinite"] == (0 if side else 160)
    if side:
        assert result.figures[side] == 1.0
    # The gradients of the discarded step are gone: the next one equals that of a learner that never saw the batch.
    assert all(p.grad is None for p in own.policy.module.parameters())


def test_critic_only_steps_leave_the_policy_alone_and_then_end(micro_model: Path, tmp_path: Path) -> None:
    own = build_learner(micro_model, tmp_path, learner={"critic_only_steps": 1})
    before = snapshot(own.policy)
    _, result = own.step(random_episodes(8))
    assert not result.policy_moved
    assert same(snapshot(own.policy), before)
    _, result = own.step(random_episodes(8, seed=1))
    assert result.policy_moved
    assert not same(snapshot(own.policy), before)


def test_advantages_divided_by_their_standard_deviation_have_deviation_one(micro_model: Path, tmp_path: Path) -> None:
    own = build_learner(micro_model, tmp_path, learner={"advantage_scale": "std"})
    batch, result = own.step(random_episodes(8))
    assert result.advantages is not None
    assert float(result.advantages[batch.action_mask].double().std(correction=0)) == pytest.approx(1.0, abs=1e-5)
    assert not result.advantages[~batch.action_mask].any()


def test_shuffled_rewards_keep_their_sum_and_leave_their_episodes(micro_model: Path, tmp_path: Path) -> None:
    """The control run: each reward goes to another episode's last action token."""
    own = build_learner(micro_model, tmp_path, learner={"shuffle_rewards": True})
    episodes = random_episodes(16)
    plain = build_batch(episodes)
    batch, _ = own.step(episodes)
    assert float(batch.rewards.sum()) == float(plain.rewards.sum())
    assert batch.rewards.sum(-1).tolist() != plain.rewards.sum(-1).tolist()
    assert not batch.rewards[~batch.action_mask].any()


@pytest.mark.parametrize(
    ("algorithm", "groups"), [("grpo", 8), ("grpo_dis", 8), ("rloo", 8), ("icepop", 8), ("sao_running_mean", 1)]
)
def test_presets_without_a_critic_take_a_step(micro_model: Path, tmp_path: Path, algorithm: str, groups: int) -> None:
    own = build_learner(micro_model, tmp_path, learner={"algorithm": algorithm, "batch_size": 16})
    before = snapshot(own.policy)
    _, result = own.step(random_episodes(16, group_size=groups))
    assert own.critic is None
    assert result.policy_moved
    assert not same(snapshot(own.policy), before)
    assert math.isfinite(result.figures["policy/gradient_norm"])


@pytest.mark.parametrize("algorithm", ["sao_full_critic", "sao_step_average", "sao_step_last", "vapo", "agentrl"])
def test_presets_with_a_critic_take_a_step(micro_model: Path, tmp_path: Path, algorithm: str) -> None:
    own = build_learner(micro_model, tmp_path, learner={"algorithm": algorithm, "batch_size": 16})
    groups = own.algorithm.samples_per_prompt
    _, result = own.step(random_episodes(16, group_size=groups))
    assert result.policy_moved


def test_the_learning_rate_warms_up_then_falls_as_the_recipe_says() -> None:
    own = OptimizerConfig(lr=1.0, warmup_steps=4, final_lr_ratio=0.5)
    rates = [learning_rate(own, step, 14) for step in range(20)]
    assert rates[:4] == pytest.approx([0.25, 0.5, 0.75, 1.0])
    assert rates[4] == pytest.approx(1.0)
    assert rates[14:] == pytest.approx([0.5] * 6)
    assert rates == sorted(rates[:4]) + sorted(rates[4:], reverse=True)


def test_the_warm_up_reaches_the_optimiser(micro_model: Path, tmp_path: Path) -> None:
    own = build_learner(micro_model, tmp_path, learner={"policy": {"lr": 1e-2, "warmup_steps": 4}})
    seen = []
    own.policy.optimizer.optimizer.register_step_pre_hook(lambda o, *_: seen.append(o.param_groups[0]["lr"]))
    for seed in range(3):
        own.step(random_episodes(8, seed=seed))
    assert seen == pytest.approx([0.0025, 0.005, 0.0075])


def test_gradients_are_clipped_and_the_norm_before_is_reported(micro_model: Path, tmp_path: Path) -> None:
    own = build_learner(micro_model, tmp_path, learner={"policy": {"lr": 1e-2, "clip_norm": 1e-3}})
    recorded = Gradients(own.policy)
    _, result = own.step(random_episodes(8))
    norm = math.sqrt(sum(float(g.double().square().sum()) for g in recorded.updates[0].values()))
    assert norm == pytest.approx(1e-3, rel=1e-2)
    assert result.figures["policy/gradient_norm"] > 1e-2


@pytest.mark.parametrize("algorithm", ["sao", "impala"])
def test_every_critic_is_pretrained_on_the_returns(micro_model: Path, tmp_path: Path, algorithm: str) -> None:
    """V-trace's own targets want log-probs, which a critic that learns alone has not."""
    sections: dict[str, Any] = {
        "learner": {"algorithm": algorithm},
        "value_pretraining": {"episodes": 24, "held_out_episodes": 8, "steps": 30, "batch_size": 24},
    }
    recipe = micro_recipe(tmp_path, **sections)
    critic = new_critic(load_body(micro_model, recipe.model))
    episodes = random_episodes(32)
    display = Display("value", console=Console(quiet=True))
    with display:
        _, figures = fit_critic(critic, episodes[:24], episodes[:8], recipe, display, Accelerator(cpu=True))
    assert figures["explained_variance_held_out"] > figures["explained_variance_before"] + 0.2


def test_value_pretraining_drops_what_the_recipe_drops(micro_model: Path, tmp_path: Path) -> None:
    """Case N13: with truncation=drop, truncated episodes change nothing; else the critic learns what they end in."""
    whole = random_episodes(16)
    cut = [replace(e, stop_reason=StopReason.TRUNCATED_TURNS) for e in random_episodes(16, seed=1)]
    settings = {"episodes": 16, "held_out_episodes": 8, "steps": 2, "batch_size": 8}

    def fitted(train: list[Episode], held_out: list[Episode], truncation: str) -> tuple[dict[str, Tensor], float]:
        recipe = micro_recipe(tmp_path, learner={"truncation": truncation}, value_pretraining=settings)
        critic = new_critic(load_body(micro_model, recipe.model))
        with Display("value", console=Console(quiet=True)) as display:
            trainee, figures = fit_critic(critic, train, held_out, recipe, display, Accelerator(cpu=True))
        return snapshot(trainee), figures["explained_variance_held_out"]

    held_out = random_episodes(8, seed=2)
    alone, score = fitted(whole, held_out, "drop")
    mixed, mixed_score = fitted([e for pair in zip(cut, whole, strict=True) for e in pair], held_out + cut, "drop")
    assert same(alone, mixed)
    assert score == mixed_score
    terminal, _ = fitted(cut, held_out, "terminal")
    bootstrapped, _ = fitted(cut, held_out, "bootstrap")
    assert not same(terminal, bootstrapped)
    with pytest.raises(LearnerFault, match=r"every episode was truncated, and learner\.truncation=drop"):
        fitted(cut, held_out, "drop")


def test_norms_by_kind_of_parameter_add_up_to_the_gradient_norm(micro_model: Path, tmp_path: Path) -> None:
    """A frozen critic has no norm of its attention, and a policy has one of every kind it trains."""
    found = one_step(micro_model, tmp_path, random_episodes(8, seed=4), 400)["figures"]
    for who, trains_attention in (("critic", False), ("policy", True)):
        own = {name: value for name, value in found.items() if name.startswith(f"norms/{who}_")}
        assert (f"norms/{who}_attention" in own) == trains_attention
        assert math.hypot(*own.values()) == pytest.approx(found[f"{who}/gradient_norm"], rel=1e-4)


def test_flash_reinforce_steps_without_a_critic_and_with_one_rollout_a_prompt(
    micro_model: Path, tmp_path: Path
) -> None:
    learner = build_learner(micro_model, tmp_path, learner={"algorithm": "flash_reinforce", "max_divergence": 1e9})
    _, result = learner.step(random_episodes(8, seed=4))
    assert learner.critic is None
    assert result.policy_moved
    assert result.advantages is not None
    assert len({round(float(a), 5) for row in result.advantages for a in row if a}) <= 8  # one an episode
