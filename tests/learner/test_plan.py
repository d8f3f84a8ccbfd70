"""A recipe that does not fit its machines must fail at a desk: `learner.plan`, its arithmetic, every recipe."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from run_tools import ROOT
from transformers import AutoModelForCausalLM, Qwen3Config, Qwen3MoeConfig

from learner import memory, plan
from learner.cli import LearnerFault
from learner.config import RecipeError, load_recipe
from learner.memory import GIB, Architecture, Parameters, Usage

RECIPES = sorted((ROOT / "recipes").glob("*.yaml"))
FULL = [path for path in RECIPES if path.stem.endswith(("_30b", "_4b", "_one_gpu"))]
SIZES = st.integers(1, 10**12)
TOKENS = st.integers(1, 200_000)
BYTES = st.sampled_from([2, 4])
SHARDS = st.integers(1, 64)

architectures = st.builds(
    Architecture,
    layers=st.integers(1, 64),
    hidden=st.integers(8, 8192),
    heads=st.integers(8, 64),
    kv_heads=st.integers(1, 8),
    head_dim=st.integers(8, 256),
    mlp_width=st.integers(8, 20_000),
    experts=st.sampled_from([0, 8, 128]),
    experts_per_token=st.integers(1, 8),
    vocabulary=st.integers(100, 200_000),
    max_positions=st.just(10**6),
)
parameters = st.builds(
    Parameters, trained=SIZES, frozen=SIZES, largest_layer=st.integers(1, 10**9), outside_layers=st.integers(1, 10**9)
)


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_every_recipe_parses_and_fits_the_machines_that_it_names(path: Path) -> None:
    """Needs no weights, no hub, and no environment."""
    recipe = load_recipe(path)
    found = plan.make_plan(recipe)
    found.check()
    assert found.room >= 1
    assert recipe.hardware.learner_gpus > 0 or recipe.model.tiny is not None
    for row in found.rows:
        usage = row.usage
        parts = (usage.parameters, usage.optimizer, usage.gradients, usage.activations, usage.kv_cache)
        assert usage.total == pytest.approx(sum(parts))
        assert min(parts) >= 0


@pytest.mark.parametrize(("name", "total", "active"), [("math_30b", 30.5e9, 3.3e9), ("math_4b", 4.0e9, 4.0e9)])
def test_parameter_counts_are_the_published_ones(name: str, total: float, active: float) -> None:
    found = plan.make_plan(load_recipe(ROOT / "recipes" / f"{name}.yaml"))
    assert found.parameters == pytest.approx(total, rel=0.01)
    assert found.active_parameters == pytest.approx(active, rel=0.02)


@pytest.mark.parametrize("path", FULL, ids=lambda path: path.stem)
def test_full_scale_recipes_hold_the_papers_numbers(path: Path) -> None:
    recipe = load_recipe(path)
    learner, algorithm = recipe.learner, recipe.learner.resolve()
    assert (learner.batch_size, algorithm.samples_per_prompt) == (128, 1)
    assert (learner.policy.lr, learner.critic.lr) == (1e-6, 5e-6)
    assert (learner.policy.warmup_steps, learner.critic.warmup_steps) == (10, 10)
    assert algorithm.critic is not None
    assert (algorithm.critic.updates, algorithm.critic.trainable) == (2, "experts")
    assert (algorithm.gamma, algorithm.alpha) == (1.0, 1.5)
    is_swe = path.stem.startswith("swe")
    assert (algorithm.eps_low, algorithm.eps_high) == ((0.8, 3.0) if is_swe else (0.3, 5.0))
    assert recipe.runtime.sampling.temperature == 1.0
    assert recipe.value_pretraining is not None
    if path.stem.startswith("math"):
        assert recipe.sft is not None
        assert recipe.sft.epochs == 3
        assert recipe.env.kwargs["max_turns"] == 50
        assert recipe.evaluation.samples == 16
    if is_swe:
        assert recipe.sft is None
        assert recipe.env.kwargs["max_turns"] == 300
    if path.stem in ("math_30b", "swe_30b"):
        assert recipe.runtime.max_context_tokens == 128 * 1024


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["--gpus", "16"], "activations"),
        (["--memory-gib", "80"], "RL, policy update"),
        (["model.recompute_layers=false"], "set model.recompute_layers"),
        (["--gpus", "256"], "cannot be dealt to 256 processes"),
        (["engine.max_context=400000"], "engine.max_context: 400000"),
        (["model.architecture=gpt9"], "model.architecture: there is no 'gpt9'"),
        (["model.architecture=null"], "model.architecture: there is no config.json"),
        (["hardware.engine_gpus=3", "hardware.gpus_per_engine=2"], "no multiple of gpus_per_engine"),
        (["hardware.gpus_per_engine=8", "engine.count=1", "hardware.memory_gib=3"], "for an engine"),
    ],
)
def test_a_recipe_that_cannot_run_is_exit_code_1_and_one_paragraph(
    words: list[str], named: str, capfd: pytest.CaptureFixture[str]
) -> None:
    assert plan.main([str(ROOT / "recipes" / "math_30b.yaml"), *words]) == 1
    text = capfd.readouterr().err
    assert "Traceback" not in text
    assert "\n\n" not in text.strip()
    assert named in " ".join(text.split())


def test_a_recipe_that_fits_is_exit_code_0_and_a_table(capfd: pytest.CaptureFixture[str]) -> None:
    assert plan.main(["--memory-gib", "8"]) == 0
    text = capfd.readouterr().out
    assert "RL, policy update" in text
    assert "fits" in text
    with pytest.raises(SystemExit):
        plan.main(["--help"])
    assert "python -m learner.plan recipes/math_30b.yaml" in capfd.readouterr().out


def test_the_weights_own_configuration_wins_over_the_recipes(tmp_path: Path) -> None:
    Qwen3Config(num_hidden_layers=3, hidden_size=64, intermediate_size=64, vocab_size=100).save_pretrained(tmp_path)
    recipe = load_recipe(ROOT / "recipes" / "math_4b.yaml", [f"model.path={tmp_path}"])
    assert plan.model_config(recipe).num_hidden_layers == 3
    with pytest.raises(RecipeError, match="known: qwen3-30b-a3b, qwen3-4b"):
        plan.model_config(load_recipe(ROOT / "recipes" / "math_4b.yaml", ["model.architecture=none"]))


def test_frozen_weights_have_no_optimiser_state_and_tied_ones_count_once() -> None:
    recipe = load_recipe(ROOT / "recipes" / "math_4b.yaml")
    policy, body = plan.build_modules(recipe)
    assert all(p.is_meta for p in policy.parameters())
    found, critic = plan.count_parameters(policy), plan.critic_parameters(body, "experts")
    assert found.frozen == 0
    assert critic.trained == 36 * 3 * 2560 * 9728 + 2560 + 1  # the MLPs and the head
    assert critic.total == found.total + 2560 + 1  # the head; the vocabulary's is the embedding
    resting = memory.resting_usage(critic, weight_bytes=4, value_bytes=2, shards=1)
    assert resting.optimizer == 2 * 4 * critic.trained
    assert resting.parameters == 4 * critic.total


def test_sharded_training_is_sixteen_bytes_a_trained_parameter() -> None:
    """float32 weight, gradient and two moments, though the weights were loaded in bfloat16."""
    sizes = Parameters(1000, 200, 10, 10)
    model = Architecture(1, 8, 8, 1, 8, 8, 0, 0, 100, 100)
    usage = memory.update_usage(
        sizes, model, tokens=1, positions=0, weight_bytes=2, value_bytes=2, shards=4, recompute=True
    )
    assert usage.parameters + usage.optimizer + usage.gradients == (16 * 1000 + 2 * 200) / 4


@given(model=architectures, tokens=TOKENS, more=TOKENS, value_bytes=BYTES)
def test_activations_grow_with_length_and_recomputation_never_costs_memory_in_deep_models(
    model: Architecture, tokens: int, more: int, value_bytes: int
) -> None:
    def needed(count: int, recompute: bool) -> int:
        return memory.activation_bytes(model, count, value_bytes=value_bytes, recompute=recompute)

    for recompute in (False, True):
        assert 0 < needed(tokens, recompute) < needed(tokens + more, recompute)
        assert needed(tokens, recompute) + needed(more, recompute) == needed(tokens + more, recompute)
    if model.layers >= 2:
        assert needed(tokens, True) < needed(tokens, False)


@given(sizes=parameters, model=architectures, tokens=TOKENS, weight=BYTES, value=BYTES, shards=SHARDS)
def test_more_devices_never_hold_more_standing_memory_each(
    sizes: Parameters, model: Architecture, tokens: int, weight: int, value: int, shards: int
) -> None:
    def standing(count: int) -> Usage:
        return memory.resting_usage(sizes, weight_bytes=weight, value_bytes=value, shards=count)

    assert standing(2 * shards + 2).total < standing(shards + 1).total
    assert standing(shards + 1).total * (shards + 1) == pytest.approx(standing(2).total * 2)
    whole = memory.update_usage(
        sizes,
        model,
        tokens=tokens,
        positions=10,
        weight_bytes=weight,
        value_bytes=value,
        shards=shards,
        recompute=True,
    )
    assert whole.total >= standing(shards).total
    assert whole.total == sum(vars(whole).values())


@given(model=architectures, tokens=TOKENS, value_bytes=BYTES, parallel=st.sampled_from([1, 2, 4, 8]))
def test_the_cache_grows_with_length_and_is_never_split_below_a_head(
    model: Architecture, tokens: int, value_bytes: int, parallel: int
) -> None:
    one = memory.kv_bytes_per_token(model, value_bytes=value_bytes)
    part = memory.kv_bytes_per_token(model, value_bytes=value_bytes, tensor_parallel=parallel)
    assert part * parallel >= one >= part
    assert part >= 2 * model.layers * model.head_dim * value_bytes
    short, long = (
        memory.engine_usage(1000, model, tokens=n, value_bytes=value_bytes, tensor_parallel=parallel)
        for n in (tokens, tokens + 1)
    )
    assert long.kv_cache - short.kv_cache == part
    assert long.parameters == short.parameters


def test_the_cache_of_the_paper_sized_model_is_96_kib_a_token() -> None:
    found = Architecture.of(plan.model_config(load_recipe(ROOT / "recipes" / "math_30b.yaml")))
    assert memory.kv_bytes_per_token(found, value_bytes=2) == 96 * 1024


@pytest.mark.parametrize("experts", [0, 8])
def test_counted_activations_are_those_that_autograd_keeps(experts: int) -> None:
    """A real model with the proportions of the large ones; weights and masks are not activations."""
    common: dict[str, Any] = {
        "vocab_size": 64,
        "hidden_size": 128,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "intermediate_size": 384,
        "attn_implementation": "sdpa",
    }
    tokens, kept = 256, []
    for layers in (2, 4):
        if experts:
            config = Qwen3MoeConfig(
                num_hidden_layers=layers, num_experts=experts, num_experts_per_tok=4, moe_intermediate_size=96, **common
            )
        else:
            config = Qwen3Config(num_hidden_layers=layers, **common)
        model = AutoModelForCausalLM.from_config(config).eval()
        if experts:
            model.set_experts_implementation("grouped_mm")
        weights = {p.untyped_storage().data_ptr() for p in model.parameters()}
        seen: dict[int, int] = {}
        alive = []

        def keep(tensor: torch.Tensor, seen=seen, weights=weights, alive=alive) -> torch.Tensor:  # type: ignore[no-untyped-def]
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in weights:
                seen[storage.data_ptr()] = storage.nbytes()
                alive.append(tensor)
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            model.base_model(input_ids=torch.zeros(1, tokens, dtype=torch.long), use_cache=False)
        kept.append(sum(seen.values()))
    per_token = (kept[1] - kept[0]) / 2 / tokens
    counted = memory.layer_activation_bytes_per_token(Architecture.of(config), value_bytes=4)
    assert counted == pytest.approx(per_token, rel=0.25), (counted, per_token)


def test_too_much_names_the_phase_the_device_and_the_way_out() -> None:
    row = plan.Row("RL", "learner GPUs", 2, Usage(parameters=9 * GIB, kv_cache=GIB))
    found = plan.Plan(1, 1, (row,), 5 * GIB, 6, 0, 1, ())
    with pytest.raises(LearnerFault, match=r"each of 2 learner GPUs needs 10\.0 GiB and may use 5\.0 of 6; most of it"):
        found.check()
