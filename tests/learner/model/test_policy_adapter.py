"""A policy that is a frozen base and an adapter: what moves, by how much, what is kept of it, what is written."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from learner_tools import (
    MICRO,
    Gradients,
    build_learner,
    changed,
    micro_recipe,
    moments,
    random_episodes,
    same,
    snapshot,
    write_micro_model,
)
from peft import PeftModel
from safetensors.torch import load_file
from torch.distributed.checkpoint import FileSystemReader
from torch.func import functional_call
from transformers import AutoModelForCausalLM

from learner.config import AdapterConfig, RecipeError, parse_recipe
from learner.data.batch import build_batch
from learner.faults import LearnerFault
from learner.losses import dis_policy_loss
from learner.model.adapter import add_adapter, switched_off
from learner.model.forward import PolicyForward
from learner.model.layers import whole_layers
from learner.run.checkpoint import CheckpointError
from learner.run.learner import Learner

LR = 1e-2
FAST = {"policy": {"lr": LR, "warmup_steps": 0, "clip_norm": 1e9}, "critic": {"lr": 1e-2, "warmup_steps": 0}}
EXPERTS = {"rank": 3, "alpha": 12.0, "targets": "attention", "experts": True, "publish": "merged"}
DENSE = {"rank": 3, "alpha": 12.0}
KINDS = pytest.mark.parametrize("kind", ["dense", "moe"])


def adapted_learner(
    source: Path, folder: Path, kind: str, adapter: dict[str, Any] | None = None, dtype: str = "float32", **learner: Any
) -> Learner:
    """A learner on the micro model `source`, its adapter's B not at zero any more: all of it has a gradient."""
    chosen = (EXPERTS if kind == "moe" else DENSE) if adapter is None else adapter
    model = {"tiny": MICRO, "dtype": dtype, "policy_adapter": chosen}
    own = build_learner(source, folder, model=model, learner={**FAST, **learner})
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for name, parameter in own.policy.unwrapped.named_parameters():
            if "lora_B" in name:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.05)
    return own


@pytest.fixture
def source(kind: str, micro_model: Path, dense_model: Path) -> Path:
    return micro_model if kind == "moe" else dense_model


def trained(own: Learner) -> dict[str, torch.Tensor]:
    return {name: p for name, p in own.policy.unwrapped.named_parameters() if p.requires_grad}


def logprobs_of(model: Any, batch: Any) -> torch.Tensor:
    with torch.no_grad():
        found: torch.Tensor = PolicyForward(model)(batch.input_ids, batch.action_mask)[0]
    return found


@KINDS
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_fresh_adapter_leaves_every_logprob_as_the_base_has_it(source: Path, kind: str, dtype: str) -> None:
    model = AutoModelForCausalLM.from_pretrained(source, dtype=getattr(torch, dtype)).eval()
    batch = build_batch(random_episodes(4))
    before, weights = logprobs_of(model, batch), dict(whole_layers(model))
    names = add_adapter(model, AdapterConfig(**(EXPERTS if kind == "moe" else DENSE)))
    assert names == [name for name, p in model.named_parameters() if p.requires_grad]
    assert all("lora_" in name for name in names)
    assert {model.get_parameter(name).dtype for name in names} == {torch.float32}
    assert torch.equal(logprobs_of(model, batch), before)
    assert same(dict(whole_layers(model)), weights)


def weight_of(name: str) -> str:
    """The base's parameter that an A belongs to."""
    path = name.removesuffix(".lora_A.default.weight")
    if ".experts" not in path:
        return f"{path}.weight"
    inner = "gate_up_proj" if path.endswith(".base_layer") else "down_proj"
    return f"{path.removesuffix('.base_layer')}.{inner}"


def added(a: torch.Tensor, b: torch.Tensor, weight: torch.Tensor, config: dict[str, Any]) -> torch.Tensor:
    """alpha / rank x B A, for each expert its own B and A."""
    scale = config["alpha"] / config["rank"]
    if weight.ndim == 2:
        return scale * b @ a
    experts = weight.shape[0]
    return scale * torch.stack(
        [b[:, e::experts] @ a[e * config["rank"] : (e + 1) * config["rank"]] for e in range(experts)]
    )


@KINDS
def test_a_step_is_what_the_adapters_equation_makes_of_the_loss(source: Path, kind: str, tmp_path: Path) -> None:
    """By hand: W + alpha/rank B A put into a plain model, the loss on it, autograd to A and B, AdamW."""
    own, config = adapted_learner(source, tmp_path, kind), EXPERTS if kind == "moe" else DENSE
    episodes = random_episodes(8)
    start = {name: p.detach().clone().requires_grad_() for name, p in trained(own).items()}
    base = {name: p for name, p in snapshot(own.policy).items() if name not in start}
    recorded = Gradients(own.policy)
    _, result = own.step(episodes)
    assert result.policy_moved
    assert result.advantages is not None

    plain = AutoModelForCausalLM.from_pretrained(source).eval()
    weights = dict(plain.named_parameters())
    for name, a in start.items():
        if ".lora_A." in name:
            key = weight_of(name.removeprefix("model."))
            b = start[name.replace(".lora_A.", ".lora_B.")]
            weights[key] = weights[key].detach() + added(a, b, weights[key], config)
    batch, algorithm = build_batch(episodes), own.algorithm
    logits = functional_call(plain, weights, (batch.input_ids,)).logits
    logprobs = torch.zeros(batch.input_ids.shape).index_put(
        (torch.arange(len(logits))[:, None], torch.arange(1, logits.shape[1])[None]),
        logits[:, :-1].log_softmax(-1).gather(-1, batch.input_ids[:, 1:, None]).squeeze(-1),
    )
    loss = dis_policy_loss(
        logprobs,
        batch.rollout_logprobs,
        result.advantages,
        batch.action_mask,
        eps_low=algorithm.eps_low,
        eps_high=algorithm.eps_high,
    )
    loss.loss.backward()
    [gradients] = recorded.updates
    assert gradients.keys() == start.keys()
    for name, parameter in start.items():
        assert parameter.grad is not None
        largest = float(parameter.grad.abs().max())
        assert largest > 0, name
        torch.testing.assert_close(gradients[name], parameter.grad, atol=1e-4 * largest, rtol=1e-3, msg=name)
        parameter.grad = gradients[name]  # AdamW's first step is all but the sign: of the same numbers, then
    torch.optim.AdamW(start.values(), lr=LR, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.0).step()
    assert not list(changed(base, snapshot(own.policy)))
    for name, parameter in trained(own).items():
        torch.testing.assert_close(parameter.detach(), start[name].detach(), atol=1e-7, rtol=1e-5, msg=name)


def test_updates_of_a_millionth_are_kept_beside_a_base_in_bfloat16(dense_model: Path, tmp_path: Path) -> None:
    own = adapted_learner(dense_model, tmp_path, "dense", dtype="bfloat16", policy={"lr": 1e-6, "warmup_steps": 0})
    before = {name: p.detach().clone() for name, p in trained(own).items()}
    assert own.step(random_episodes(8))[1].policy_moved
    for name, parameter in trained(own).items():
        moved = (parameter.detach() - before[name]).abs()
        assert 0 < float(moved.max()) < 2e-6, name
        assert float((moved > 0).float().mean()) > 0.5, name


@KINDS
def test_a_checkpoint_holds_the_adapter_alone_and_a_run_goes_on_from_it_bit_for_bit(
    source: Path, kind: str, tmp_path: Path
) -> None:
    whole, first = (adapted_learner(source, tmp_path, kind) for _ in range(2))
    for own in (whole, first):
        own.step(random_episodes(8, seed=1))
    saved = first.save(tmp_path / "checkpoints")
    names = [n for n in FileSystemReader(saved).read_metadata().state_dict_metadata if n.startswith("policy.weights.")]
    assert len(names) == len(trained(first))
    assert all(".lora_" in name for name in names)
    second = build_learner(source, tmp_path, model=whole.recipe.model.model_dump(), learner=FAST)
    second.resume(saved)
    for own in (whole, second):
        own.step(random_episodes(8, seed=2))
    assert same(snapshot(whole.policy), snapshot(second.policy))
    assert all(torch.equal(a, b) for a, b in zip(moments(whole.policy), moments(second.policy), strict=True))
    other = adapted_learner(source, tmp_path, kind, {**(EXPERTS if kind == "moe" else DENSE), "rank": 4})
    with pytest.raises(CheckpointError, match="of another model"):
        other.resume(saved)


def test_what_a_dropped_step_did_to_the_adapter_is_taken_back(dense_model: Path, tmp_path: Path) -> None:
    own = adapted_learner(dense_model, tmp_path, "dense")
    own.step(random_episodes(8, seed=1))
    before, state = snapshot(own.policy), moments(own.policy)
    own.remember()
    assert own._remembered is not None
    assert own._remembered["policy"]["weights"].keys() == trained(own).keys()
    own.step(random_episodes(8, seed=2))
    assert set(changed(before, snapshot(own.policy))) == set(trained(own))
    own.roll_back()
    assert same(before, snapshot(own.policy))
    assert all(torch.equal(a, b) for a, b in zip(state, moments(own.policy), strict=True))


@KINDS
def test_the_pull_to_the_start_is_to_the_base_and_needs_no_second_model(
    source: Path, kind: str, tmp_path: Path
) -> None:
    gradients, figures = [], []
    for reference in ("start", str(source)):
        own = adapted_learner(source, tmp_path, kind, kl={"coefficient": 3.0, "reference": reference})
        assert own.reference is not None
        assert (reference == "start") == (not list(own.reference.parameters()))
        recorded = Gradients(own.policy)
        figures.append(own.step(random_episodes(8))[1].figures["policy/kl"])
        gradients.append(recorded.updates[0])
        assert len(recorded.updates[0]) == len(trained(own)) > 0  # they are trained after the reference was read
    assert figures[0] == pytest.approx(figures[1], rel=1e-5)
    assert figures[0] > 1e-4
    for name, gradient in gradients[0].items():
        torch.testing.assert_close(gradient, gradients[1][name], atol=1e-6, rtol=1e-4)


@KINDS
def test_what_is_exported_is_the_policy_whole_and_as_an_adapter(source: Path, kind: str, tmp_path: Path) -> None:
    own, batch = adapted_learner(source, tmp_path, kind), build_batch(random_episodes(4))
    wanted = logprobs_of(own.policy.unwrapped.model, batch)
    whole = AutoModelForCausalLM.from_pretrained(own.export(tmp_path / "whole", as_trained=True)).eval()
    torch.testing.assert_close(logprobs_of(whole, batch), wanted, atol=1e-5, rtol=1e-5)
    folder = own.export_adapter(tmp_path / "adapter")
    assert json.loads((folder / "adapter_config.json").read_text())["base_model_name_or_path"] == str(source)
    assert (folder / "tokenizer.json").exists()
    base = AutoModelForCausalLM.from_pretrained(source).eval()
    read = PeftModel.from_pretrained(base, folder).eval().base_model.model
    torch.testing.assert_close(logprobs_of(read, batch), wanted, atol=1e-5, rtol=1e-5)
    with switched_off(own.policy.unwrapped.model):
        assert not torch.allclose(logprobs_of(own.policy.unwrapped.model, batch), wanted, atol=1e-3)


def test_weights_that_are_streamed_or_merged_have_the_names_and_the_dtype_of_a_snapshot(
    micro_model: Path, tmp_path: Path
) -> None:
    own = adapted_learner(micro_model, tmp_path, "moe", dtype="bfloat16")
    found, start = dict(own.weights()), load_file(micro_model / "model.safetensors")
    assert {name: tuple(t.shape) for name, t in found.items()} == {n: tuple(t.shape) for n, t in start.items()}
    assert {tensor.dtype for tensor in found.values()} == {torch.bfloat16}


def test_an_adapter_that_is_not_finite_is_not_written(dense_model: Path, tmp_path: Path) -> None:
    own = adapted_learner(dense_model, tmp_path, "dense")
    with torch.no_grad():
        next(iter(trained(own).values())).view(-1)[0] = float("nan")
    with pytest.raises(LearnerFault, match="are not finite, so they are neither published"):
        own.export_for_engines(tmp_path / "adapter")
    assert not (tmp_path / "adapter").exists()
    assert not (tmp_path / ".adapter").exists()


def test_an_adapter_of_the_critic_is_in_float32_and_its_checkpoint_holds_no_base(
    dense_model: Path, tmp_path: Path
) -> None:
    own = adapted_learner(dense_model, tmp_path, "dense", dtype="bfloat16", critic_trainable="lora")
    assert own.critic is not None
    own.step(random_episodes(8, seed=1))
    weights = {n: p for n, p in own.critic.unwrapped.named_parameters() if p.requires_grad}
    assert {p.dtype for p in weights.values()} == {torch.float32}
    saved = own.save(tmp_path / "checkpoints")
    stored = FileSystemReader(saved).read_metadata().state_dict_metadata
    assert {n.removeprefix("critic.weights.") for n in stored if n.startswith("critic.weights.")} == weights.keys()


@pytest.mark.parametrize(
    ("adapter", "sections", "words"),
    [
        ({"targets": ()}, {}, "nothing would be trained"),
        ({"experts": True}, {}, "write publish: merged"),
        ({}, {"hardware": {"fsdp": 2}}, "hardware.fsdp 2: the base model of model.policy_adapter is whole"),
        ({}, {"hardware": {"context": 2}}, "hardware.context 2: the base"),
        ({}, {"learner": {"freeze_router": True}}, "no router is trained; write false"),
        (
            {},
            {"engine": {"transfer": "broadcast", "launch": "vllm"}, "hardware": {"engine_gpus": 1}},
            "publish: merged",
        ),
        ({"rang": 3}, {}, "policy_adapter.rang"),
    ],
)
def test_what_does_not_go_with_an_adapter_is_said_before_anything_starts(
    adapter: dict[str, Any], sections: dict[str, Any], words: str
) -> None:
    data = json.loads(micro_recipe(Path("runs")).model_dump_json())
    data["model"]["policy_adapter"] = adapter
    for name, section in sections.items():
        data[name] |= section
    with pytest.raises(RecipeError, match=words):
        parse_recipe(data)


@pytest.mark.parametrize(
    ("adapter", "words"),
    [
        ({"targets": ("q_proj", "lm_head")}, "'lm_head' does not suit this model: lm_head is its head"),
        ({"targets": ("query",)}, "'query' does not suit this model: no layer's name ends on it"),
        ({"experts": True, "publish": "merged"}, "this model has no fused experts; write false"),
    ],
)
def test_targets_that_the_model_has_not_are_named(dense_model: Path, adapter: dict[str, Any], words: str) -> None:
    model = AutoModelForCausalLM.from_pretrained(dense_model)
    with pytest.raises(RecipeError, match=words):
        add_adapter(model, AdapterConfig(**adapter))


def test_named_targets_are_the_layers_that_end_on_them(tmp_path: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(write_micro_model(tmp_path / "model", experts=0))
    names = add_adapter(model, AdapterConfig(targets=("q_proj", "mlp.up_proj")))
    assert {name.split(".lora_")[0].split(".", 3)[3] for name in names} == {"self_attn.q_proj", "mlp.up_proj"}
