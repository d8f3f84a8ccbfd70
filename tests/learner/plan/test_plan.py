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

from learner.config import HardwareConfig, HeldOutProbeConfig, RecipeError, load_recipe
from learner.faults import LearnerFault
from learner.plan import memory, phases, shapes
from learner.plan.__main__ import main
from learner.plan.memory import GIB, Architecture, Parameters, Usage
from learner.plan.start import check_start

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
    found = phases.make_plan(recipe)
    found.check()
    assert found.room >= 1
    assert recipe.hardware.learner_gpus > 0 or recipe.model.tiny is not None
    for row in found.rows:
        usage = row.usage
        parts = vars(usage).values()
        assert usage.total == pytest.approx(sum(parts))
        assert min(parts) >= 0
        assert min(vars(row.beside).values()) >= 0
        assert all(size <= parts for size, parts in zip(vars(row.beside).values(), parts, strict=True))


@pytest.mark.parametrize(("name", "total", "active"), [("math_30b", 30.5e9, 3.3e9), ("math_4b", 4.0e9, 4.0e9)])
def test_parameter_counts_are_the_published_ones(name: str, total: float, active: float) -> None:
    found = phases.make_plan(load_recipe(ROOT / "recipes" / f"{name}.yaml"))
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
    assert main([str(ROOT / "recipes" / "math_30b.yaml"), *words]) == 1
    text = capfd.readouterr().err
    assert "Traceback" not in text
    assert "\n\n" not in text.strip()
    assert named in " ".join(text.split())


def test_a_recipe_that_fits_is_exit_code_0_and_a_table(capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["--memory-gib", "8"]) == 0
    text = capfd.readouterr().out
    assert "RL, policy update" in text
    assert "fits" in text
    with pytest.raises(SystemExit):
        main(["--help"])
    assert "python -m learner.plan recipes/math_30b.yaml" in capfd.readouterr().out


def test_the_weights_own_configuration_wins_over_the_recipes(tmp_path: Path) -> None:
    Qwen3Config(num_hidden_layers=3, hidden_size=64, intermediate_size=64, vocab_size=100).save_pretrained(tmp_path)
    recipe = load_recipe(ROOT / "recipes" / "math_4b.yaml", [f"model.path={tmp_path}"])
    assert shapes.model_config(recipe).num_hidden_layers == 3
    with pytest.raises(RecipeError, match="known: qwen3-30b-a3b, qwen3-4b"):
        shapes.model_config(load_recipe(ROOT / "recipes" / "math_4b.yaml", ["model.architecture=none"]))


def test_frozen_weights_have_no_optimiser_state_and_tied_ones_count_once() -> None:
    recipe = load_recipe(ROOT / "recipes" / "math_4b.yaml")
    policy, body = shapes.build_modules(recipe)
    assert all(p.is_meta for p in policy.parameters())
    found, critic = shapes.count_parameters(policy), shapes.critic_parameters(body, "experts")
    assert found.frozen == 0
    assert critic.trained == 36 * 3 * 2560 * 9728 + 2560 + 1  # the MLPs and the head
    assert critic.total == found.total + 2560 + 1  # the head; the vocabulary's is the embedding
    resting = memory.resting_usage(critic, weight_bytes=4, shards=1)
    assert resting.optimizer == 2 * 4 * critic.trained
    assert resting.parameters == 4 * critic.total


def test_sharded_training_is_sixteen_bytes_a_trained_parameter() -> None:
    """float32 weight, gradient and two moments; a frozen one is its weight alone."""
    sizes = Parameters(1000, 200, 10, 10)
    model = Architecture(1, 8, 8, 1, 8, 8, 0, 0, 100, 100)
    usage = memory.update_usage(
        sizes, model, tokens=1, positions=0, weight_bytes=4, value_bytes=2, shards=4, recompute=True
    )
    assert usage.parameters + usage.optimizer + usage.gradients == (16 * 1000 + 4 * 200) / 4


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
        return memory.resting_usage(sizes, weight_bytes=weight, shards=count)

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
    found = Architecture.of(shapes.model_config(load_recipe(ROOT / "recipes" / "math_30b.yaml")))
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
    row = phases.Row("RL", "learner GPUs", 2, Usage(parameters=9 * GIB, kv_cache=GIB))
    found = phases.Plan(1, 1, (row,), 5 * GIB, 6, 0, 1, ())
    with pytest.raises(LearnerFault, match=r"each of 2 learner GPUs needs 10\.0 GiB and may use 5\.0 of 6; most of it"):
        found.check()


@pytest.mark.parametrize("name", ["math_30b", "swe_30b", "style_shift_30b"])
def test_a_large_recipe_on_whole_bfloat16_weights_is_refused(name: str) -> None:
    """Case N14: .9 % of the weights moved, in silence."""
    words = ["model.dtype=bfloat16", "hardware.fsdp=1", "hardware.ep=1"]
    with pytest.raises(LearnerFault, match=r"model\.dtype: at learner\.policy\.lr 1e-06 nearly all updates") as raised:
        phases.make_plan(load_recipe(ROOT / "recipes" / f"{name}.yaml", words)).check()
    assert "GPUs needs" in str(raised.value)  # and does not fit either


@pytest.mark.parametrize(
    ("words", "processes", "named"),
    [
        ([], 1, r"hardware: fsdp 32, ep 8 is for 32 processes, and this was started in 1; .* --num_processes 32"),
        (["hardware.fsdp=1", "hardware.ep=1"], 8, r"hardware\.learner_gpus: the recipe is for 32 GPUs.* started in 8"),
        (["hardware.ep=3"], 32, r"hardware: .*ep 3 does not divide"),
        (["hardware.fsdp=16"], 16, r"hardware: .*learner_gpus 32 is not what fsdp 16, ep 8 makes: 16"),
        (["hardware.tp=2", "hardware.context=2"], 32, r"hardware: .*tp 2 and context 2 do not go together"),
    ],
)
def test_a_run_is_refused_in_a_world_that_is_not_its_recipes(words: list[str], processes: int, named: str) -> None:
    with pytest.raises(RecipeError, match=named):
        check_start(load_recipe(ROOT / "recipes" / "math_30b.yaml", words), processes)


def test_training_asks_the_plan(tmp_path: Path) -> None:
    """Case N14: two processes with whole copies do not fit where two with halves do."""
    words = [f"runs_dir={tmp_path}", "model.tiny.hidden_size=512", "model.tiny.expert_width=4096"]
    words += ["sft.micro_batch_rows=1", "learner.micro_batch_tokens=512"]

    def start(processes: int, *more: str) -> None:
        check_start(load_recipe(None, [*words, *more]), processes)

    whole, halves = (phases.make_plan(load_recipe(None, [*words, *more]), 2).rows for more in ([], ["hardware.fsdp=2"]))
    needed = max(row.needed for row in halves) / GIB / 0.94 + 0.01
    assert needed < 0.8 * max(row.needed for row in whole) / GIB
    start(2, "hardware.fsdp=2", f"hardware.memory_gib={needed}")
    with pytest.raises(LearnerFault, match=r"each of 2 processes on the CPU needs .* together, and may use"):
        start(2, f"hardware.memory_gib={needed}")


@pytest.mark.parametrize(
    ("name", "keys", "named"),
    [
        ("math_4b", {"ep": 2, "fsdp": 2}, "hardware.ep 2: this model (qwen3) has no experts"),
        ("math_30b", {"ep": 3, "fsdp": 3}, "hardware.ep 3 does not divide the model's 128 experts"),
        ("math_30b", {"tp": 8}, "hardware.tp 8 does not divide the model's 4 key and value heads"),
        ("math_4b", {"tp": 3}, "hardware.tp 3 does not divide the model's 32 attention heads"),
    ],
)
def test_a_layout_that_does_not_divide_the_model_names_its_key(name: str, keys: dict[str, int], named: str) -> None:
    recipe = load_recipe(ROOT / "recipes" / f"{name}.yaml")
    hardware = HardwareConfig(memory_gib=1e6, **keys)
    found = phases.make_plan(recipe.model_copy(update={"hardware": hardware}))
    assert any(problem.startswith(named) for problem in found.problems), found.problems


def test_a_step_that_may_be_taken_back_counts_its_copy() -> None:
    """`learner.held_out_probe`: weights and moments once more, on each rank its parts."""
    recipe = load_recipe(None, ["hardware.fsdp=2"])
    learner = recipe.learner.model_copy(update={"held_out_probe": HeldOutProbeConfig()})
    plain, careful = (
        phases.make_plan(chosen).rows[-1].usage for chosen in (recipe, recipe.model_copy(update={"learner": learner}))
    )
    policy, body = shapes.build_modules(recipe)
    sizes = [shapes.count_parameters(policy), shapes.critic_parameters(body, "experts")]
    copies = [memory.resting_usage(size, weight_bytes=4, shards=2) for size in sizes]
    assert careful.total - plain.total == pytest.approx(sum(copy.total for copy in copies))


@pytest.mark.parametrize(("name", "gib"), [("math_4b_lora", 24), ("math_8b_lora", 80)])
def test_an_adapter_fits_where_whole_weights_do_not(name: str, gib: int) -> None:
    """Base in its own dtype; adapter, moments and gradients in float32. Whole weights in training take 16."""
    path = ROOT / "recipes" / "adapters" / f"{name}.yaml"
    recipe = load_recipe(path)
    found = phases.make_plan(recipe)
    found.check()
    assert found.memory_gib == gib
    update = next(row.usage for row in found.rows if row.phase == "RL, policy update")
    adapter = update.gradients / 4
    assert 1e7 < adapter < 1e8
    assert update.optimizer >= 8 * adapter
    whole = load_recipe(path, ["model.policy_adapter=null", "model.dtype=float32", "model.compute_dtype=bfloat16"])
    with pytest.raises(LearnerFault, match="RL, policy update"):
        phases.make_plan(whole).check()


def test_an_adapters_start_is_its_base_so_a_pull_to_it_takes_no_memory() -> None:
    path = ROOT / "recipes" / "adapters" / "math_4b_lora.yaml"
    plain, pulled, elsewhere = (
        phases.make_plan(load_recipe(path, words)).rows[-1].usage.total
        for words in (
            [],
            ["learner.kl.coefficient=0.1"],
            ["learner.kl.coefficient=0.1", "learner.kl.reference=models/x"],
        )
    )
    assert plain == pulled
    assert elsewhere - plain == pytest.approx(2 * 4.02e9, rel=0.01)
