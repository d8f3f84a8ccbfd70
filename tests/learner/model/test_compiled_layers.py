"""Layers that are compiled must compute what they did before, at every length, recomputed and watched ones too."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from learner_tools import random_episodes, write_micro_model

from learner.config import ModelConfig, RecipeError, parse_recipe
from learner.data.batch import build_batch
from learner.model.forward import PolicyForward
from learner.model.loading import compile_layers, load_policy_model, recompute_layers
from learner.model.routing import Routing

EXPERTS = {"mixture": 4, "dense": 0}


@pytest.fixture(scope="module", params=EXPERTS)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp(request.param) / "micro"
    return write_micro_model(folder, seed=3, experts=EXPERTS[request.param])


def gradients(
    folder: Path, backend: str | None, *, recompute: bool = False, watch: bool = False
) -> list[dict[str, torch.Tensor]]:
    """Of two micro-batches of unlike sizes; `backend` None: as it is, without a compiler."""
    loaded = load_policy_model(folder, ModelConfig(path=folder))
    if backend is not None:
        assert compile_layers(loaded, backend) == 2
    if recompute:
        recompute_layers(loaded)
    policy = PolicyForward(loaded)
    if watch:
        policy.routing = Routing(loaded, replay=False)
    found = []
    for count in (2, 4):
        batch = build_batch(random_episodes(count, seed=count))
        logprobs, _ = policy(batch.input_ids, batch.action_mask)
        logprobs.sum().backward()
        found.append({name: p.grad.clone() for name, p in policy.named_parameters() if p.grad is not None})
        policy.zero_grad()
    if watch and policy.routing is not None:
        assert policy.routing.counted(lambda counts: counts)["router/busiest"] > 0
    return found


def assert_same(found: list[dict[str, torch.Tensor]], wanted: list[dict[str, torch.Tensor]]) -> None:
    for own, other in zip(found, wanted, strict=True):
        assert own.keys() == other.keys()
        for name in other:
            torch.testing.assert_close(own[name], other[name], rtol=1e-4, atol=1e-6)


def test_traced_layers_that_are_computed_again_have_the_gradients_of_plain_ones(model: Path) -> None:
    assert_same(gradients(model, "aot_eager", recompute=True), gradients(model, None))


def test_a_router_is_watched_in_a_traced_layer(tmp_path: Path) -> None:
    folder = write_micro_model(tmp_path / "micro", seed=3)
    assert_same(gradients(folder, "aot_eager", watch=True), gradients(folder, None))


@pytest.mark.slow
@pytest.mark.timeout(1200)  # a C++ compiler makes every kernel
def test_compiled_layers_have_the_gradients_of_plain_ones(model: Path) -> None:
    assert_same(gradients(model, "inductor"), gradients(model, None))


def test_a_model_without_layers_to_compile_is_refused() -> None:
    with pytest.raises(RecipeError, match=r"model\.compile"):
        compile_layers(torch.nn.Linear(2, 2))


@pytest.mark.parametrize("key", ["ep", "tp", "context"])
def test_layers_with_exchanges_between_ranks_are_not_compiled(key: str) -> None:
    with pytest.raises(RecipeError, match=rf"model\.compile with hardware\.{key}"):
        parse_recipe({"name": "x", "model": {"tiny": {}, "compile": True}, "hardware": {"fsdp": 2, key: 2}})
