"""The table of algorithms says what the papers say, and its rows do different things."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any, get_args

import pytest
import torch
from torch import Tensor

from learner.advantages import (
    CreditInputs,
    group_advantages,
    skip_observation_gae,
    spread_over_actions,
    step_level_gae,
    turn_counts,
    vtrace,
)
from learner.algorithms import (
    ALGORITHMS,
    BASELINES,
    RATIO_RULES,
    Algorithm,
    Baseline,
    CriticSettings,
    RatioRule,
    RunningMeanSettings,
    compute_advantages,
    compute_value_targets,
    get_algorithm,
    policy_loss,
)
from learner.losses import LossInputs

NAMES = [
    "sao",
    "sao_k1",
    "sao_full_critic",
    "sao_dis_only",
    "sao_step_average",
    "sao_step_last",
    "sao_running_mean",
    "vapo",
    "ppo",
    "grpo",
    "grpo_dis",
    "rloo",
    "gspo",
    "icepop",
    "flash_reinforce",
    "impala",
    "agentrl",
]

# What each source says, one column a claim. Samples: how many rollouts a prompt needs; critic: updates and what moves.
PAPERS: dict[str, dict[str, Any]] = {
    "sao": dict(baseline="critic", ratio="dis", granularity="token", samples_per_prompt=1, lam=None, alpha=1.5,
                critic=CriticSettings(2, "experts"), aggregation="token_mean", eps_low=0.3, eps_high=5.0, gamma=1.0),
    "sao_k1": dict(ratio="dis", critic=CriticSettings(1, "experts")),
    "sao_full_critic": dict(ratio="dis", critic=CriticSettings(2, "all")),
    "sao_dis_only": dict(ratio="dis", critic=CriticSettings(1, "all")),
    "sao_step_average": dict(granularity="step_average", critic=CriticSettings(2, "experts")),
    "sao_step_last": dict(granularity="step_last", critic=CriticSettings(2, "experts")),
    "sao_running_mean": dict(baseline="running_mean", ratio="dis", critic=None, samples_per_prompt=1,
                             running_mean=RunningMeanSettings(8, True, False)),
    "vapo": dict(baseline="critic", ratio="ppo_clip", lam=None, samples_per_prompt=1, aggregation="token_mean"),
    "ppo": dict(baseline="critic", ratio="ppo_clip", aggregation="sequence_mean", eps_low=0.2, eps_high=0.2),
    "grpo": dict(baseline="group", ratio="ppo_clip", samples_per_prompt=8, critic=None, normalize_group=True,
                 eps_low=0.2, eps_high=0.28),
    "grpo_dis": dict(baseline="group", ratio="dis", samples_per_prompt=8, critic=None, eps_low=0.3, eps_high=5.0),
    "rloo": dict(baseline="leave_one_out", ratio="none", samples_per_prompt=8, critic=None, aggregation="token_mean"),
    "gspo": dict(baseline="group", ratio="gspo", aggregation="sequence_mean", eps_low=3e-4, eps_high=4e-4),
    "icepop": dict(baseline="group", ratio="icepop", mismatch=(0.5, 5.0), samples_per_prompt=8),
    "flash_reinforce": dict(baseline="batch_mean", ratio="sequence_trust", samples_per_prompt=1, critic=None,
                            aggregation="sequence_mean", max_divergence=3e-3),
    "impala": dict(baseline="vtrace", ratio="none", samples_per_prompt=1, rho_bar=1.0, c_bar=1.0),
    "agentrl": dict(baseline="group", normalize_task=True, samples_per_prompt=8, critic=None),
}  # fmt: skip


def test_the_table_holds_the_methods() -> None:
    assert list(ALGORITHMS) == NAMES == list(PAPERS)
    assert all(algorithm.name == name for name, algorithm in ALGORITHMS.items())


@pytest.mark.parametrize("name", NAMES)
def test_a_preset_is_what_its_source_describes(name: str) -> None:
    algorithm = get_algorithm(name)
    assert {key: getattr(algorithm, key) for key in PAPERS[name]} == PAPERS[name]


def test_an_unknown_name_lists_the_known_ones() -> None:
    with pytest.raises(ValueError, match=r"unknown algorithm 'soa'; there are sao, .*agentrl"):
        get_algorithm("soa")


def test_no_two_presets_are_the_same_under_two_names() -> None:
    bare = {n: dataclasses.replace(a, name="x", source="") for n, a in ALGORITHMS.items()}
    assert [pair for pair in itertools.combinations(bare, 2) if bare[pair[0]] == bare[pair[1]]] == []


@pytest.mark.parametrize("ablation", ["sao_k1", "sao_full_critic", "sao_step_average", "sao_step_last"])
def test_an_ablation_differs_from_sao_in_one_thing(ablation: str) -> None:
    sao, other = get_algorithm("sao"), get_algorithm(ablation)
    fields = {f.name for f in dataclasses.fields(Algorithm)} - {"name", "source"}
    assert len([f for f in fields if getattr(sao, f) != getattr(other, f)]) == 1


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (dict(critic=None), "critic settings"),
        (dict(baseline="running_mean", running_mean=RunningMeanSettings()), "no use for critic"),
        (dict(baseline="running_mean", critic=None), "running_mean settings"),
        (dict(baseline="group", critic=None), "at least 2"),
        (dict(samples_per_prompt=8), "needs only 1"),
        (dict(baseline="vtrace", granularity="step_last"), "granularity"),
        (dict(ratio="none", denominator="trusted"), "denominator"),
        (dict(eps_low=-1.0), "eps_low"),
        (dict(lam=1.5), "lam"),
        (dict(gamma=2.0), "gamma"),
        (dict(max_divergence=-1.0), "max_divergence"),
    ],
)
def test_an_impossible_combination_is_named(change: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        dataclasses.replace(get_algorithm("sao"), **change)
    with pytest.raises(ValueError, match=r"critic\.updates"):
        CriticSettings(0)


def batch() -> dict[str, Any]:
    """Two prompts of four episodes, three turns at most, observations poisoned."""
    generator = torch.Generator().manual_seed(3)
    mask = torch.tensor([[1, 1, 0, 1, 1, 0, 1], [1, 0, 1, 1, 1, 0, 0], [1, 1, 1, 1, 0, 0, 0], [0, 1, 1, 0, 1, 1, 1]])
    mask = torch.cat([mask, mask.flip(0)]).bool()
    turns = ((~mask).long().cumsum(1)).masked_fill(~mask, -1)

    def numbers(shift: float = 0.0) -> Tensor:
        drawn = torch.randn(mask.shape, generator=generator, dtype=torch.float64) * 0.3 + shift
        return drawn.masked_fill(~mask, torch.nan)

    rewards = torch.zeros(mask.shape, dtype=torch.float64).masked_fill(~mask, torch.nan)
    for b, reward in enumerate((1.0, 0.0, 1.0, 0.0, 0.5, 0.0, 0.0, 1.0)):
        rewards[b, int(mask[b].nonzero()[-1])] = reward
    return {
        "rewards": rewards,
        "values": numbers(0.5),
        "action_mask": mask,
        "turn_ids": turns,
        "logprobs": numbers(-1.0),
        "rollout_logprobs": numbers(-1.0),
        "old_logprobs": numbers(-1.0),
        "group_ids": ["a"] * 4 + ["b"] * 4,
        "prompt_ids": [f"p{b}" for b in range(8)],
        "task_ids": ["math", "math", "shell", "shell"] * 2,
    }


def advantages_of(algorithm: Algorithm, data: dict[str, Any]) -> Tensor:
    inputs = {key: value for key, value in data.items() if key != "old_logprobs"}
    running = algorithm.running_mean.build() if algorithm.running_mean else None
    return compute_advantages(algorithm, CreditInputs(**inputs, running_mean=running))


def gradient_of(algorithm: Algorithm, data: dict[str, Any]) -> Tensor:
    leaf = data["logprobs"].clone().requires_grad_()
    advantages = advantages_of(algorithm, data)
    inputs = LossInputs(
        logprobs=leaf,
        rollout_logprobs=data["rollout_logprobs"],
        old_logprobs=data["old_logprobs"],
        advantages=advantages,
        action_mask=data["action_mask"],
    )
    policy_loss(algorithm, inputs).loss.backward()
    assert leaf.grad is not None
    return leaf.grad


def test_every_name_of_a_baseline_or_ratio_rule_has_its_function_and_no_function_lacks_a_name() -> None:
    assert set(BASELINES) == set(get_args(Baseline))
    assert set(RATIO_RULES) == set(get_args(RatioRule))


@pytest.mark.parametrize("name", NAMES)
def test_every_preset_runs_and_never_reads_an_observation(name: str) -> None:
    data, algorithm = batch(), get_algorithm(name)
    if algorithm.ratio == "sequence_trust":  # at its own bound it leaves out all that this batch holds
        algorithm = dataclasses.replace(algorithm, max_divergence=0.1)
    advantages, gradient = advantages_of(algorithm, data), gradient_of(algorithm, data)
    mask = data["action_mask"]
    for out in (advantages, gradient):
        assert out.isfinite().all()
        assert not out[~mask].any()
        assert out[mask].any()
    assert not advantages.requires_grad


def test_presets_that_differ_in_mathematics_differ_in_gradient() -> None:
    """Those that differ in the critic's training alone are the same update, given the same values."""
    data = batch()
    gradients = {name: gradient_of(algorithm, data) for name, algorithm in ALGORITHMS.items()}
    same = {
        pair for pair in itertools.combinations(gradients, 2) if torch.equal(gradients[pair[0]], gradients[pair[1]])
    }
    assert same == set(itertools.combinations(["sao", "sao_k1", "sao_full_critic", "sao_dis_only"], 2))


def test_the_dispatchers_use_the_parts_they_name() -> None:
    data = batch()
    mask, values, rewards = data["action_mask"], data["values"], data["rewards"]
    lam = 1 - 1 / (1.5 * mask.sum(1))
    expected, _ = skip_observation_gae(rewards, values, mask, lam=lam)
    torch.testing.assert_close(advantages_of(get_algorithm("sao"), data), expected, atol=1e-6, rtol=0)
    expected, _ = skip_observation_gae(rewards, values, mask, lam=0.95)
    torch.testing.assert_close(advantages_of(get_algorithm("ppo"), data), expected)
    totals = torch.tensor([1.0, 0.0, 1.0, 0.0, 0.5, 0.0, 0.0, 1.0], dtype=torch.float64)
    expected = spread_over_actions(group_advantages(totals, data["group_ids"]), mask)
    torch.testing.assert_close(advantages_of(get_algorithm("grpo"), data), expected)
    vs, policy = vtrace(data["logprobs"], data["rollout_logprobs"], rewards, values, mask)
    torch.testing.assert_close(advantages_of(get_algorithm("impala"), data), policy)
    inputs = CreditInputs(rewards, mask, values, logprobs=data["logprobs"], rollout_logprobs=data["rollout_logprobs"])
    torch.testing.assert_close(compute_value_targets(get_algorithm("impala"), inputs), vs)


def test_a_step_preset_counts_its_turns() -> None:
    data, algorithm = batch(), get_algorithm("sao_step_last")
    turns = turn_counts(data["action_mask"], data["turn_ids"])
    assert turns.tolist() == [3, 2, 1, 2, 2, 1, 2, 3]
    inputs = [data[key] for key in ("rewards", "values", "action_mask", "turn_ids")]
    expected = step_level_gae(*inputs, gamma=1.0, lam=1 - 1 / (1.5 * turns), pooling="last")
    torch.testing.assert_close(advantages_of(algorithm, data), expected, atol=1e-6, rtol=0)
    one_turn = {**data, "turn_ids": torch.zeros_like(data["turn_ids"])}
    advantages = advantages_of(algorithm, one_turn)
    for b in range(8):
        here = data["action_mask"][b]
        assert advantages[b][here].unique().numel() == 1


def test_critic_targets_have_lambda_one_and_follow_the_values_only_with_a_bootstrap() -> None:
    """Case A15: the call is made again before each of the K updates."""
    sao, data = get_algorithm("sao"), batch()
    data["values"].requires_grad_()
    inputs = CreditInputs(data["rewards"], data["action_mask"], data["values"])
    targets = compute_value_targets(sao, inputs)
    assert not targets.requires_grad
    moved = dataclasses.replace(inputs, values=data["values"] + 1)
    torch.testing.assert_close(compute_value_targets(sao, moved), targets)
    later = compute_value_targets(sao, dataclasses.replace(inputs, bootstrap=torch.full((8,), 0.25)))
    torch.testing.assert_close(later, torch.where(data["action_mask"], targets + 0.25, 0.0).detach())
    with pytest.raises(ValueError, match="grpo has no critic"):
        compute_value_targets(get_algorithm("grpo"), inputs)


@pytest.mark.parametrize(
    ("name", "missing"),
    [("sao", "values"), ("sao_step_last", "turn_ids"), ("impala", "logprobs"), ("impala", "rollout_logprobs"),
     ("grpo", "group_ids"), ("rloo", "group_ids"), ("agentrl", "task_ids")],
)  # fmt: skip
def test_a_missing_input_is_named(name: str, missing: str) -> None:
    with pytest.raises(ValueError, match=f"{name} needs {missing}"):
        advantages_of(get_algorithm(name), {**batch(), missing: None})


@pytest.mark.parametrize("name", ["ppo", "gspo", "icepop"])
def test_a_method_with_an_old_policy_says_so(name: str) -> None:
    assert get_algorithm(name).needs_old_logprobs
    with pytest.raises(ValueError, match=f"{name} needs old_logprobs"):
        gradient_of(get_algorithm(name), {**batch(), "old_logprobs": None})


def test_the_running_mean_moves_with_every_episode_in_row_order() -> None:
    data, algorithm = batch(), get_algorithm("sao_running_mean")
    running = RunningMeanSettings().build()
    inputs = CreditInputs(data["rewards"], data["action_mask"], running_mean=running, prompt_ids=["p"] * 8)
    first = compute_advantages(algorithm, inputs)
    totals = [first[b][data["action_mask"][b]][0].item() for b in range(8)]
    rewards = [1.0, 0.0, 1.0, 0.0, 0.5, 0.0, 0.0, 1.0]
    expected = [r - (sum(rewards[:b]) / b if b else 0.0) for b, r in enumerate(rewards)]
    assert totals == pytest.approx(expected)
    with pytest.raises(ValueError, match="prompt_ids has 1 entries"):
        compute_advantages(algorithm, dataclasses.replace(inputs, prompt_ids=["p"]))
    with pytest.raises(ValueError, match="needs running_mean"):
        compute_advantages(algorithm, dataclasses.replace(inputs, running_mean=None))


def test_group_methods_and_only_they_keep_a_barrier() -> None:
    """Case A21."""
    barrier = {name for name, algorithm in ALGORITHMS.items() if algorithm.needs_groups}
    assert barrier == {"grpo", "grpo_dis", "rloo", "gspo", "icepop", "agentrl"}
    assert barrier == {name for name, algorithm in ALGORITHMS.items() if algorithm.samples_per_prompt > 1}


def test_the_listings_denominator_is_not_silently_undone_by_a_normalizer() -> None:
    """Case A3, at the table: the option either acts or says that it cannot."""
    data = batch()
    listing = dataclasses.replace(get_algorithm("sao"), eps_high=0.1, denominator="trusted")
    ones = torch.ones_like(data["logprobs"])
    inputs = LossInputs(data["logprobs"], data["rollout_logprobs"], ones, data["action_mask"])
    by_action = policy_loss(dataclasses.replace(listing, denominator="action"), inputs)
    by_trusted = policy_loss(listing, inputs)
    counts = by_action.metrics
    trusted = counts["action_tokens"] - counts["gated_low"] - counts["gated_high"]
    assert 0 < trusted < counts["action_tokens"]
    assert by_trusted.loss.item() == pytest.approx(by_action.loss.item() * counts["action_tokens"] / trusted)
    with pytest.raises(ValueError, match="takes no normalizer"):
        policy_loss(listing, dataclasses.replace(inputs, normalizer=10))
