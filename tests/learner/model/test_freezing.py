"""Which parameters of the critic move, by explicit policy."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from learner_tools import build_learner, changed, random_episodes, snapshot
from torch import nn

from learner.model.critic import freeze, new_critic
from learner.model.kinds import FreezingError, parameter_kind
from learner.model.loading import load_body


def trained_names(model: Path, folder: Path, trainable: str) -> tuple[set[str], set[str]]:
    """(names that may move, names that did move) after three real steps."""
    own = build_learner(model, folder, learner={"critic_trainable": trainable})
    assert own.critic is not None
    before = snapshot(own.critic)
    allowed = {name for name, p in own.critic.unwrapped.named_parameters() if p.requires_grad}
    for seed in range(3):
        own.step(random_episodes(8, seed=seed))
    moved = set(changed(before, snapshot(own.critic)))
    frozen_state = [p for g in own.critic.optimizer.param_groups for p in g["params"] if not p.requires_grad]
    assert not frozen_state
    return allowed, moved


def test_frozen_parameters_stay_bit_identical_and_the_experts_move(micro_model: Path, tmp_path: Path) -> None:
    """Case H2."""
    allowed, moved = trained_names(micro_model, tmp_path, "experts")
    assert moved == allowed
    assert {name.split(".")[0] for name in moved} == {"body", "head"}
    body = {name for name in moved if name.startswith("body.")}
    assert body
    assert all(".mlp.experts." in name for name in body)


def test_a_dense_models_mlp_stands_where_experts_would(dense_model: Path, tmp_path: Path) -> None:
    """Case H2."""
    allowed, moved = trained_names(dense_model, tmp_path, "experts")
    assert moved == allowed
    body = {name for name in moved if name.startswith("body.")}
    assert body
    assert all(".mlp." in name for name in body)
    assert trained_names(dense_model, tmp_path, "mlp")[0] == allowed


def test_all_trains_everything(micro_model: Path, tmp_path: Path) -> None:
    own = build_learner(micro_model, tmp_path, learner={"critic_trainable": "all"})
    assert own.critic is not None
    assert all(p.requires_grad for p in own.critic.unwrapped.parameters())


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("layers.0.post_attention_layernorm.weight", "norm"),  # "attention" in its name, and no attention
        ("layers.0.input_layernorm.weight", "norm"),
        ("norm.weight", "norm"),
        ("layers.0.self_attn.q_proj.weight", "attention"),
        ("layers.0.self_attn.o_proj.bias", "attention"),
        ("layers.0.self_attn.q_norm.weight", "attention"),
        ("layers.0.self_attn.k_norm.weight", "attention"),
        ("layers.0.linear_attn.in_proj_qkvz.weight", "attention"),
        ("layers.0.linear_attn.conv1d.weight", "attention"),
        ("layers.0.linear_attn.A_log", "attention"),
        ("layers.0.linear_attn.dt_bias", "attention"),
        ("layers.0.linear_attn.norm.weight", "attention"),
        ("layers.0.mlp.gate.weight", "router"),
        ("layers.0.mlp.gate.e_score_correction_bias", "router"),
        ("layers.0.mlp.router.weight", "router"),
        ("layers.0.mlp.shared_expert_gate.weight", "router"),
        ("layers.0.block_sparse_moe.gate.weight", "router"),
        ("layers.0.mlp.experts.gate_up_proj", "experts"),
        ("layers.0.mlp.experts.3.down_proj.weight", "experts"),
        ("layers.0.mlp.shared_expert.up_proj.weight", "experts"),
        ("layers.0.mlp.shared_experts.gate_proj.weight", "experts"),
        ("layers.0.mlp.gate_proj.weight", "mlp"),  # a dense model's gate is no router
        ("layers.0.mlp.gate_up_proj.weight", "mlp"),
        ("layers.0.mlp.down_proj.weight", "mlp"),
        ("embed_tokens.weight", "embedding"),
        ("wte.weight", "embedding"),
        ("lm_head.weight", "head"),
        ("head.weight", "head"),
    ],
)
def test_every_parameter_is_in_or_out_as_documented(name: str, kind: str) -> None:
    """Case H2."""
    assert parameter_kind(name) == kind
    if kind != "head":
        assert parameter_kind("model." + name) == kind


def test_a_parameter_that_no_rule_knows_is_an_error_not_a_guess() -> None:
    with pytest.raises(FreezingError, match=r"mystery\.weight"):
        parameter_kind("layers.0.mystery.weight")


class OnlyAttention(nn.Module):
    """A body without experts and without an MLP."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.ModuleDict({"self_attn": nn.Linear(4, 4)})])
        self.config: Any = type("Config", (), {"get_text_config": lambda self: type("Text", (), {"hidden_size": 4})})()


@pytest.mark.parametrize("trainable", ["experts", "mlp"])
def test_a_policy_that_matches_nothing_but_the_head_is_an_error(trainable: str) -> None:
    """Case H2."""
    with pytest.raises(FreezingError, match=f"critic_trainable='{trainable}' matches no parameter"):
        freeze(new_critic(OnlyAttention()), trainable)


def test_mlp_on_a_mixture_of_experts_trains_the_experts(micro_model: Path, tmp_path: Path) -> None:
    from learner_tools import micro_recipe

    critic = new_critic(load_body(micro_model, micro_recipe(tmp_path).model))
    assert set(freeze(critic, "mlp")) >= {n for n, _ in critic.named_parameters() if ".experts." in n}


def test_frozen_attention_gets_no_gradient(micro_model: Path, tmp_path: Path) -> None:
    own = build_learner(micro_model, tmp_path)
    assert own.critic is not None
    values, _ = own.critic.module(torch.tensor([[1, 2, 3]]))
    values.sum().backward()
    assert all(p.grad is None for n, p in own.critic.unwrapped.named_parameters() if "self_attn" in n)
