"""What a body does not compute changes no number that is read: padding, what stands behind the last action, and the
last layer's MLP where no action is predicted."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from learner_tools import Gradients, action, build_learner, episode, micro_recipe, observation, prompt, random_episodes
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import (
    AttentionInterface,
    AttentionMaskInterface,
    AutoModelForCausalLM,
    GptOssConfig,
    LlamaConfig,
    Qwen3NextConfig,
)

from agent.episode import Episode
from learner.config import ModelConfig, RecipeError
from learner.data.batch import build_batch
from learner.data.buckets import fill_with_rows
from learner.model.forward import CriticForward, PolicyForward
from learner.model.loading import load_policy_model
from learner.model.tokens import LastLayer, packs_rows

NO_CLIP = {"policy": {"lr": 1e-2, "clip_norm": 1e9}, "critic": {"lr": 1e-2, "clip_norm": 1e9}}
TINY: dict[str, Any] = {
    "vocab_size": 300,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
}


def uneven(count: int = 12) -> list[Episode]:
    """Episodes of many lengths; every third ends with an observation that leads to nothing, one is a single token."""
    found = random_episodes(count - 1)
    for i in range(0, count - 1, 3):
        tail = observation(range(50, 60 + i))
        found[i] = episode([*found[i].segments, tail], found[i].turn_rewards, name=f"e{i}", group=found[i].group_id)
    return [*found, episode([prompt([7]), action([9])], [1.0], name="short")]


def stepped(model: Path, folder: Path, episodes: list[Episode], **learner: Any) -> dict[str, Any]:
    """One step: the gradients of policy and critic, and what was computed of every action token."""
    settings = {**NO_CLIP, "batch_size": len(episodes), "micro_batch_tokens": 64, **learner}
    attention = settings.pop("attention", "sdpa")
    own = build_learner(
        model, folder, model={"path": str(model), "attention_implementation": attention}, learner=settings
    )
    assert own.critic is not None
    with torch.no_grad():  # a head at zero would send no gradient into the critic's body
        own.critic.unwrapped.head.weight.normal_(generator=torch.Generator().manual_seed(1))
    seen = {"policy": Gradients(own.policy), "critic": Gradients(own.critic)}
    batch, result = own.step(episodes)
    mask = batch.action_mask
    read = {name: getattr(result, name)[mask] for name in ("logprobs", "values", "advantages")}
    gradients = {name: kept.updates for name, kept in seen.items()}
    return {"read": read, "gradients": gradients, "figures": result.figures, "learner": own}


def assert_same_step(left: dict[str, Any], right: dict[str, Any]) -> None:
    for name, tensor in left["read"].items():
        torch.testing.assert_close(right["read"][name], tensor, atol=1e-5, rtol=1e-5, msg=name)
    for who, updates in left["gradients"].items():
        assert len(updates) == len(right["gradients"][who]) > 0
        for one, other in zip(updates, right["gradients"][who], strict=True):
            assert one.keys() == other.keys()
            scale = max(float(g.abs().max()) for g in one.values())
            for name in one:
                torch.testing.assert_close(other[name], one[name], atol=1e-5 * scale, rtol=1e-5, msg=f"{who} {name}")
    for name, figure in left["figures"].items():
        assert right["figures"][name] == pytest.approx(figure, rel=1e-4, abs=1e-5, nan_ok=True), name


def varlen(module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, **options: Any) -> Any:
    """What a flash kernel does with `cu_seq_lens_q`: every row of a packed one looks at itself."""
    assert mask is None
    ends = options["cu_seq_lens_q"].tolist() if "cu_seq_lens_q" in options else [0, query.shape[2]]
    scale, grouped = options["scaling"], query.shape[1] != key.shape[1]
    found = []
    for start, end in pairwise(ends):
        q, k, v = (t[:, :, start:end] for t in (query, key, value))
        found.append(scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=grouped))
    return torch.cat(found, dim=2).transpose(1, 2), None


AttentionInterface.register("test_varlen", varlen)
AttentionMaskInterface.register("test_varlen", lambda **options: None)


@pytest.mark.parametrize("attention", ["sdpa", "eager", "test_varlen"])
@pytest.mark.parametrize("kind", ["moe", "dense"])
def test_a_step_on_packed_rows_is_the_step_on_padded_ones(
    micro_model: Path, tmp_path: Path, kind: str, attention: str
) -> None:
    """Log-probs, values, advantages, losses' figures and every gradient, the critic's through frozen attention too;
    with masks of blocks, and with the ends of rows that a flash kernel is given."""
    model = micro_model
    if kind == "dense":
        torch.manual_seed(0)
        AutoModelForCausalLM.from_config(LlamaConfig(**TINY, initializer_range=0.2)).save_pretrained(tmp_path / "dense")
        model = tmp_path / "dense"
    padded = stepped(model, tmp_path, uneven(), packing="buckets")
    packed = stepped(model, tmp_path, uneven(), packing="packed", attention=attention)
    assert packed["learner"].policy.unwrapped.packed
    assert packed["learner"].critic.unwrapped.packed
    assert not padded["learner"].policy.unwrapped.packed
    assert_same_step(padded, packed)


def test_a_packed_step_pulls_to_the_reference_as_a_padded_one(micro_model: Path, tmp_path: Path) -> None:
    """The reference runs the same micro-batches; unpacked, it would run them with all of their padding."""
    settings = {"kl": {"coefficient": 0.5}, "algorithm": "sao", "policy_epochs": 2}
    padded, packed = (stepped(micro_model, tmp_path, uneven(), packing=p, **settings) for p in ("buckets", "packed"))
    assert packed["learner"].reference.packed
    assert_same_step(padded, packed)


def test_packed_rows_fill_a_micro_batch_and_the_body_sees_no_padding(micro_model: Path, tmp_path: Path) -> None:
    own = build_learner(micro_model, tmp_path, learner={"packing": "packed"})
    seen: list[int] = []
    own.policy.unwrapped.model.base_model.register_forward_pre_hook(
        lambda _, args, kwargs: seen.append(kwargs["input_ids"].numel()), with_kwargs=True
    )
    episodes = random_episodes(8)
    own.step(episodes)
    assert seen == [sum(len(s.token_ids) for e in episodes for s in e.segments)]
    rows = fill_with_rows([5, 9, 30, 1, 4, 6], max_tokens=10)
    assert rows == [[2], [1, 3], [5, 4], [0]]


def test_what_stands_behind_the_last_action_is_not_computed(micro_model: Path, tmp_path: Path) -> None:
    """An observation at the end, and episodes that are dropped, cost nothing and change nothing."""
    whole = build_batch(uneven())
    ends = [int(row.nonzero().max()) + 1 for row in whole.action_mask]
    assert whole.up_to_last_actions().lengths.tolist() == ends
    assert sum(ends) < int(whole.lengths.sum())
    nothing = replace(whole, action_mask=torch.zeros_like(whole.action_mask)).up_to_last_actions()
    assert set(nothing.lengths.tolist()) == {2}
    shorter = [
        episode([s for s in e.segments if s.token_ids[0] != 50], e.turn_rewards, name=e.id, group=e.group_id)
        for e in uneven()
    ]
    assert_same_step(stepped(micro_model, tmp_path, shorter), stepped(micro_model, tmp_path, uneven()))


@pytest.mark.parametrize("packing", ["buckets", "packed"])
def test_the_last_layers_experts_compute_what_is_read_and_nothing_else_changes(
    micro_model: Path, tmp_path: Path, packing: str
) -> None:
    """Log-probs and gradients are those of a forward that computes all, and the MLP saw the read tokens alone."""
    episodes = uneven()
    batch = build_batch(episodes).up_to_last_actions()
    own = build_learner(micro_model, tmp_path, learner={"packing": packing})
    policy = own.policy.unwrapped
    seen: list[int] = []
    policy.model.base_model.layers[-1].mlp.gate.register_forward_hook(lambda _, a, out: seen.append(a[0].shape[-2]))

    def read() -> tuple[Tensor, list[Tensor]]:
        logprobs, _ = policy(batch.input_ids, batch.action_mask, lengths=batch.lengths)
        gradients = torch.autograd.grad((logprobs * torch.linspace(-1, 1, batch.width)).sum(), own.policy.parameters)
        return logprobs, list(gradients)

    logprobs, gradients = read()
    last, policy.last_layer = policy.last_layer, None
    whole, all_gradients = read()
    tokens = int(batch.lengths.sum()) if packing == "packed" else batch.input_ids.numel()
    assert seen == [batch.action_tokens, tokens]
    assert last is not None
    assert last.places is None
    torch.testing.assert_close(logprobs, whole, atol=1e-5, rtol=1e-5)
    for one, other in zip(gradients, all_gradients, strict=True):
        torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-5)
    none = torch.zeros_like(batch.action_mask)
    policy.last_layer = last
    policy(batch.input_ids, none)[0].sum().backward()  # a micro-batch without an action still uses every weight
    assert all(p.grad is not None and not p.grad.any() for p in own.policy.parameters)


def test_an_mlp_that_answers_more_than_hidden_states_is_spared_too() -> None:
    torch.manual_seed(0)
    options = {"num_local_experts": 4, "num_experts_per_tok": 2, "initializer_range": 0.2}
    model = AutoModelForCausalLM.from_config(GptOssConfig(**TINY, **options), attn_implementation="eager").eval()
    forward = PolicyForward(model)
    batch = build_batch(random_episodes(3))
    whole = forward(batch.input_ids, batch.action_mask)[0]
    forward.last_layer = LastLayer.of(model.base_model)
    assert forward.last_layer is not None
    torch.testing.assert_close(forward(batch.input_ids, batch.action_mask)[0], whole, atol=1e-5, rtol=1e-5)


class Smeared(nn.Module):
    """An MLP that looks at the token before."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))

    def forward(self, hidden: Tensor) -> Tensor:
        return 20.0 * self.weight * hidden.roll(1, dims=1)


def test_an_mlp_that_looks_at_other_tokens_or_is_computed_again_is_left_as_it_is(micro_model: Path) -> None:
    model = load_policy_model(micro_model, ModelConfig(path=micro_model))
    model.base_model.layers[-1].mlp = Smeared()
    ids = torch.arange(12)[None]
    before = model(input_ids=ids).logits
    assert LastLayer.of(model.base_model) is None
    assert torch.equal(model(input_ids=ids).logits, before)
    again = load_policy_model(micro_model, ModelConfig(path=micro_model, recompute_layers=True))
    assert LastLayer.of(again.base_model) is None


def test_a_watched_router_still_sees_every_token_of_the_last_layer(micro_model: Path, tmp_path: Path) -> None:
    figures = [
        build_learner(micro_model, tmp_path, learner={"routing": "watched", "packing": packing})
        .step(random_episodes(8))[1]
        .figures
        for packing in ("buckets", "packed")
    ]
    assert figures[0]["router/busiest"] > 1
    assert figures[1]["router/busiest"] == pytest.approx(figures[0]["router/busiest"])


def test_models_whose_rows_cannot_be_told_apart_are_refused_by_key_or_stay_in_buckets(tmp_path: Path) -> None:
    kinds = {"layer_types": ["linear_attention", "full_attention"], "num_experts": 0, "mlp_only_layers": [0, 1]}
    linear = Qwen3NextConfig(**TINY, **kinds)
    rope = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
    stretched = LlamaConfig(**TINY, rope_parameters=rope, max_position_embeddings=512)
    for config, reason in ((linear, "linear_attention"), (stretched, "positions depend")):
        forward = PolicyForward(AutoModelForCausalLM.from_config(config).eval())
        with pytest.raises(RecipeError, match=rf"learner\.packing: packed.*{reason}.*learner\.packing=buckets"):
            forward.pack_rows()
        assert not forward.packed


def test_a_model_that_mixes_packed_rows_is_found_by_trying(micro_model: Path) -> None:
    """An attention that knows nothing of where rows end."""

    def blind(module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Any, **options: Any) -> Any:
        return varlen(module, query, key, value, None, scaling=options["scaling"])

    AttentionInterface.register("test_blind", blind)
    AttentionMaskInterface.register("test_blind", lambda **options: None)
    config = ModelConfig(path=micro_model, attention_implementation="test_blind")
    critic = CriticForward(load_policy_model(micro_model, config).base_model, 16)
    with pytest.raises(RecipeError, match=r"learner\.packing: packed, Qwen3MoeModel computes something else"):
        critic.pack_rows()
    assert not critic.packed


def test_the_default_packs_where_attention_knows_where_rows_end(tmp_path: Path) -> None:
    assert packs_rows(None, "flash_attention_2")
    assert not packs_rows(None, "sdpa")
    assert packs_rows("packed", "sdpa")
    assert not packs_rows("buckets", "flash_attention_2")
    with pytest.raises(RecipeError, match=r"learner\.packing 'packed' with hardware\.context"):
        micro_recipe(tmp_path, learner={"packing": "packed"}, hardware={"context": 2})
