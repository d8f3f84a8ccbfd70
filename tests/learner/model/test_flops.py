"""An MFU is only worth something if its operations are those that are done: held against torch's own counter."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from learner_tools import write_micro_model, write_untied_copy
from torch import nn
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoConfig

from learner.config import ModelConfig
from learner.model.critic import freeze, freeze_router, new_critic
from learner.model.flops import Passes, StepFlops, Work, module_flops
from learner.model.forward import PolicyForward
from learner.model.loading import load_body, load_policy_model

ROWS, WIDTH = 3, 40
LENGTHS = [WIDTH] * ROWS
SHAPE = {"hidden_size": 32, "heads": 4, "kv_heads": 2, "head_dim": 16, "layers": 3, "expert_width": 48}


def config(folder: Path, **changes: Any) -> ModelConfig:
    """A model whose products all are ones that torch's counter knows."""
    return ModelConfig(path=folder, attention_implementation="eager", experts_implementation="eager", **changes)


def counted(module: nn.Module, *inputs: torch.Tensor) -> tuple[float, float]:
    """Operations of a forward, and of the backward pass behind it."""
    with FlopCounterMode(display=False) as forward:
        output = module(*inputs)[0]
    with FlopCounterMode(display=False) as backward:
        output.sum().backward()
    return float(forward.get_total_flops()), float(backward.get_total_flops())


def unseen(work: Work) -> tuple[float, float]:
    """What eager attention computes of pairs that a token may not see, forward and backward."""
    pairs = sum(n * n - n * (n + 1) / 2 for n in LENGTHS)
    return 2 * pairs * sum(a.size for a in work.attention), 2 * pairs * sum(a.backward for a in work.attention)


@pytest.fixture(scope="module", params=["dense", "moe", "moe untied"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("flops")
    experts = 0 if request.param == "dense" else 4
    write_micro_model(place / "model", experts=experts, **SHAPE)
    return write_untied_copy(place / "model", place / "untied") if "untied" in request.param else place / "model"


def inputs() -> tuple[torch.Tensor, torch.Tensor, list[int]]:
    torch.manual_seed(0)
    mask = torch.zeros(ROWS, WIDTH, dtype=torch.bool)
    mask[:, 10:25] = True
    return torch.randint(5, 300, (ROWS, WIDTH)), mask, mask.sum(1).tolist()


def test_a_policys_count_is_what_is_done(folder: Path) -> None:
    module = PolicyForward(load_policy_model(folder, config(folder)))
    ids, mask, actions = inputs()
    work = Work.of(module, module.model.config)
    forward, backward = counted(module, ids, mask)
    more = unseen(work)
    assert work.forward(LENGTHS, actions) + more[0] == pytest.approx(forward, rel=0.01)
    assert work.backward(LENGTHS, actions) + more[1] == pytest.approx(backward, rel=0.01)


@pytest.mark.parametrize("trainable", ["experts", "all"])
def test_a_critics_count_leaves_out_gradients_that_nobody_asks_for(folder: Path, trainable: str) -> None:
    """With frozen attention nothing flows below the first layer's experts, and frozen weights have no gradient."""
    critic = new_critic(load_body(folder, config(folder)))
    nn.init.normal_(critic.head.weight)
    freeze(critic, trainable)
    work = Work.of(critic, critic.body.config)
    forward, backward = counted(critic, inputs()[0])
    more = unseen(work)
    assert work.forward(LENGTHS, LENGTHS) + more[0] == pytest.approx(forward, rel=0.01)
    assert work.backward(LENGTHS, LENGTHS) + more[1] == pytest.approx(backward, rel=0.01)


def test_a_frozen_router_has_no_gradient_of_its_own(tmp_path: Path) -> None:
    folder = write_micro_model(tmp_path / "model", **SHAPE)
    module = PolicyForward(load_policy_model(folder, config(folder)))
    whole = Work.of(module, module.model.config)
    freeze_router(module.model)
    frozen = Work.of(module, module.model.config)
    ids, mask, actions = inputs()
    _, backward = counted(module, ids, mask)
    assert frozen.backward(LENGTHS, actions) < whole.backward(LENGTHS, actions)
    assert frozen.backward(LENGTHS, actions) + unseen(frozen)[1] == pytest.approx(backward, rel=0.01)


def test_layers_that_are_computed_again_are_counted_apart(folder: Path) -> None:
    module = PolicyForward(load_policy_model(folder, config(folder, recompute_layers=True)), chunk=4)
    ids, mask, actions = inputs()
    work = Work.of(module, module.model.config)
    found = module_flops(work, Passes(1, 0), LENGTHS, actions, recompute_layers=True, logits_again=sum(actions))
    more = unseen(work)
    assert found.model + found.again + 2 * more[0] + more[1] == pytest.approx(sum(counted(module, ids, mask)), rel=0.01)
    plain = module_flops(work, Passes(1, 0), LENGTHS, actions)
    assert plain == StepFlops(found.model, 0.0)


def test_reads_cost_a_forward_each_and_padding_costs_nothing(folder: Path) -> None:
    module = PolicyForward(load_policy_model(folder, config(folder)))
    work = Work.of(module, module.model.config)
    reads = module_flops(work, Passes(0, 2), [7, 20], [3, 4])
    assert reads == StepFlops(2 * (work.forward([7], [3]) + work.forward([20], [4])), 0.0)


def test_a_window_bounds_the_pairs_and_linear_attention_has_none(tmp_path: Path) -> None:
    folder = write_micro_model(tmp_path / "model", experts=0, **SHAPE)
    module = PolicyForward(load_policy_model(folder, config(folder)))
    text = AutoConfig.from_pretrained(folder)
    whole = Work.of(module, text)
    text.layer_types, text.sliding_window = ["full_attention", "sliding_attention", "linear_attention"], 4
    part = Work.of(module, text)
    size = 2 * whole.attention[0].size
    full, window = 10 * 11 / 2, 1 + 2 + 3 + 4 * 7
    assert whole.forward([10], [0]) - part.forward([10], [0]) == pytest.approx(size * (2 * full - window))
