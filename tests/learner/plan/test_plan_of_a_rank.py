"""What the plan once left out: copies, 8-bit moments, a reference, recorded experts, a publication, the processes."""

from __future__ import annotations

from typing import Any

import pytest
from run_tools import ROOT

from learner.config import Recipe, load_recipe, parse_recipe
from learner.plan import memory, phases, shapes
from learner.plan.memory import GIB, Usage


def changed(recipe: Recipe, **sections: Any) -> Recipe:
    """The recipe with some keys of sections changed."""
    data = recipe.model_dump(mode="json")
    for name, section in sections.items():
        data[name] |= section
    return parse_recipe(data)


def rows(recipe: Recipe, processes: int | None = None) -> dict[str, Usage]:
    """What the learner's processes hold, by phase."""
    return {
        row.phase.removeprefix("RL, "): row.usage
        for row in phases.make_plan(recipe, processes).rows
        if row.kind != "engine GPUs"
    }


def test_a_checkpoints_copy_stands_beside_every_phase_on_a_cpu_and_in_the_hosts_memory_beside_a_gpu() -> None:
    """It is written while the next step is made: at the end of that step a rank has its state twice."""
    recipe = load_recipe(None, ["hardware.fsdp=2"])
    policy, body = shapes.build_modules(recipe)
    sizes = [shapes.count_parameters(policy), shapes.critic_parameters(body, "experts")]
    state = sum(memory.resting_usage(size, weight_bytes=4, shards=2).total for size in sizes)
    found = rows(recipe)
    for phase in ("rollouts", "critic update", "policy update", "checkpoint", "publication"):
        assert found[phase].copies >= state, phase
    assert found["checkpoint"].copies == pytest.approx(state)
    assert found["loading"].copies == 0
    large = phases.make_plan(load_recipe(ROOT / "recipes" / "math_30b.yaml"))
    assert all(row.usage.copies == 0 for row in large.rows if row.phase == "RL, policy update")
    resting = next(row.usage for row in large.rows if row.phase == "RL, rollouts" and row.kind == "learner GPUs")
    assert large.host > resting.total


def test_moments_of_eight_bits_are_counted_as_such() -> None:
    recipe = load_recipe(None, ["hardware.fsdp=2"])
    small = changed(recipe, learner={"policy": {"lr": 1e-6, "kind": "adamw_8bit"}})
    policy, _ = shapes.build_modules(recipe)
    trained = shapes.count_parameters(policy).trained
    wide, narrow = (rows(chosen)["policy update"].optimizer for chosen in (recipe, small))
    assert wide - narrow == pytest.approx(2 * trained * (4 - 1 - 4 / 256) / 2)


def test_the_reference_is_cut_as_the_policy_is() -> None:
    for words, parts in (([], 1), (["hardware.fsdp=2"], 2), (["hardware.context=2"], 2), (["hardware.tp=2"], 2)):
        recipe = load_recipe(None, words)
        pulled = changed(recipe, learner={"kl": {"coefficient": 0.1}})
        total = phases.make_plan(recipe).parameters
        for phase in ("loading", "policy update", "critic update"):
            gained = rows(pulled)[phase].parameters - rows(recipe)[phase].parameters
            assert gained == pytest.approx(4 * total / parts), (words, phase)


def test_recorded_experts_are_counted_where_the_batch_lies() -> None:
    recipe = load_recipe(ROOT / "recipes" / "math_30b.yaml")
    model = memory.Architecture.of(shapes.model_config(recipe))
    tokens = recipe.learner.batch_size * recipe.runtime.max_context_tokens
    plain, watched = (
        phases.make_plan(changed(recipe, learner={"routing": routing})).host for routing in ("own", "watched")
    )
    assert watched - plain == pytest.approx(2 * tokens * model.layers * model.experts_per_token)
    assert watched - plain > 10 * GIB


def test_a_publication_puts_one_layer_together_and_never_the_model() -> None:
    recipe = load_recipe(ROOT / "recipes" / "math_30b.yaml")
    found, parameters = rows(recipe), phases.make_plan(recipe).parameters
    copies = found["publication"].copies
    policy, _ = shapes.build_modules(recipe)
    assert copies >= 4 * shapes.count_parameters(policy).largest_layer
    assert copies < 0.1 * 4 * parameters


def test_processes_on_a_cpu_are_counted_before_any_weight_is() -> None:
    recipe = load_recipe(None)
    found = phases.make_plan(recipe, 4)
    loading = next(row for row in found.rows if row.phase == "RL, loading")
    assert loading.devices == 4
    assert loading.needed >= 5 * memory.PROCESS_BYTES  # and the engine
    assert loading.beside.process * 4 == memory.PROCESS_BYTES
    assert all(row.usage.process == 0 for row in phases.make_plan(load_recipe(ROOT / "recipes" / "math_30b.yaml")).rows)
