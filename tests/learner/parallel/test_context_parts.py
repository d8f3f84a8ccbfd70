"""Ranks that each compute a part of every row's tokens learn what one rank learns from whole rows."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from context_worker import COMPLETION, MODELS, STEPS, build, cold_start, routed, rows, trained
from learner_tools import write_micro_model
from run_tools import run_ranks

from learner.probes.parity_report import trainer_logprobs

WORKER = Path(__file__).parents[1] / "context_worker.py"
LAYOUTS = [
    pytest.param((1, 2), id="2 parts"),
    pytest.param((1, 4), id="4 parts", marks=pytest.mark.slow),
    pytest.param((2, 2), id="2 copies of 2 parts", marks=pytest.mark.slow),
]


def write_models(folder: Path) -> Path:
    """Dense (one key-value head: fewer than parts), a mixture of experts, and one whose attention has a window."""
    write_micro_model(folder / "dense", experts=0, heads=4, kv_heads=1)
    write_micro_model(folder / "moe", heads=4, kv_heads=2)
    sliding = write_micro_model(folder / "sliding", experts=0, heads=4, kv_heads=4)
    config = json.loads((sliding / "config.json").read_text())
    config |= {"use_sliding_window": True, "sliding_window": 3, "max_window_layers": 1}
    config["layer_types"] = ["full_attention", "sliding_attention"]
    (sliding / "config.json").write_text(json.dumps(config))
    return folder


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_models(tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="module")
def one_rank(models: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("whole")
    own = {name: build(models / name, folder) for name in MODELS}
    found: dict[str, Any] = {name: trained(learner, rows()) for name, learner in own.items()}
    found["probe"] = trainer_logprobs(own[MODELS[-1]].policy.unwrapped, [1, 2, 3, 4], COMPLETION)
    found["routed"] = routed(models / "moe", folder)
    found["sft"] = cold_start(models / "moe", Accelerator(cpu=True))
    return found


@pytest.fixture(scope="module", params=LAYOUTS)
def in_parts(
    request: pytest.FixtureRequest, models: Path, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, int, int]:
    """Where the ranks of a layout left what they made, all cases in one group of processes."""
    folder, (replicate, context) = tmp_path_factory.mktemp("parts"), request.param
    words = [str(WORKER), str(models), str(folder), str(replicate), str(context)]
    run_ranks(replicate * context, words, within_s=400)
    return folder, replicate, context


def close(found: dict[str, torch.Tensor], whole: dict[str, torch.Tensor], what: str) -> None:
    assert found.keys() == whole.keys()
    for name, tensor in whole.items():
        torch.testing.assert_close(found[name], tensor, atol=1e-5, rtol=1e-5, msg=lambda m, n=name: f"{what} {n}: {m}")


@pytest.mark.timeout(450)
@pytest.mark.parametrize("model", MODELS)
def test_gradients_and_three_steps_are_those_of_one_rank(
    in_parts: tuple[Path, int, int], one_rank: dict[str, Any], model: str
) -> None:
    folder, replicate, context = in_parts
    whole, ranks = one_rank[model], [torch.load(folder / f"{model}_{r}.pt") for r in range(replicate * context)]
    for trainee, updates in (("policy", STEPS), ("critic", 2 * STEPS)):
        assert len(whole[trainee]["gradients"]) == updates
        for found in ranks:
            for number, gradient in enumerate(whole[trainee]["gradients"]):
                close(found[trainee]["gradients"][number], gradient, f"{trainee} gradient {number}")
            close(found[trainee]["weights"], whole[trainee]["weights"], f"{trainee} weights")
            assert all(torch.equal(w, ranks[0][trainee]["weights"][n]) for n, w in found[trainee]["weights"].items())
        assert max(float(g.abs().max()) for g in whole[trainee]["gradients"][0].values()) > 1e-3  # far above


@pytest.mark.timeout(450)
@pytest.mark.parametrize("model", MODELS)
def test_what_is_known_of_each_token_is_whole_on_every_rank(
    in_parts: tuple[Path, int, int], one_rank: dict[str, Any], model: str
) -> None:
    """Log-probs, values (a border's are those of the part before it) and advantages; figures count shared rows once."""
    folder, replicate, context = in_parts
    for rank in range(replicate * context):
        found = torch.load(folder / f"{model}_{rank}.pt")
        for own, whole in zip(found["steps"], one_rank[model]["steps"], strict=True):
            if replicate == 1:
                assert own["ids"] == whole["ids"]
            row_of = [whole["ids"].index(name) for name in own["ids"]]
            for name, tensor in own["tokens"].items():
                expected = whole["tokens"][name][row_of, : tensor.shape[1]]
                counts = own["mask"][:, : tensor.shape[1]]  # behind a row's end a value is that of its micro-batch
                torch.testing.assert_close(tensor[counts], expected[counts], atol=1e-5, rtol=1e-5, msg=name)
            shared = {n: f for n, f in whole["figures"].items() if not n.startswith(("ratio/", "norms/"))}
            assert {n: own["figures"][n] for n in shared} == pytest.approx(shared, rel=1e-4, abs=1e-5, nan_ok=True)


@pytest.mark.timeout(450)
def test_the_cold_start_is_that_of_one_rank(in_parts: tuple[Path, int, int], one_rank: dict[str, Any]) -> None:
    folder, replicate, context = in_parts
    for rank in range(replicate * context):
        close(torch.load(folder / f"sft_{rank}.pt"), one_rank["sft"], "weights")


@pytest.mark.timeout(450)
def test_replayed_experts_are_cut_with_their_tokens_and_counted_once(
    in_parts: tuple[Path, int, int], one_rank: dict[str, Any]
) -> None:
    folder, replicate, context = in_parts
    for rank in range(replicate * context):
        found = torch.load(folder / f"routed_{rank}.pt")
        assert found["figures"] == pytest.approx(one_rank["routed"]["figures"], abs=1e-12)
        close(found["weights"], one_rank["routed"]["weights"], "weights")


@pytest.mark.timeout(450)
def test_a_probe_of_one_rank_alone_waits_for_nobody(in_parts: tuple[Path, int, int], one_rank: dict[str, Any]) -> None:
    torch.testing.assert_close(torch.load(in_parts[0] / "probe.pt"), one_rank["probe"], atol=1e-4, rtol=1e-5)


@pytest.mark.timeout(450)
def test_a_model_that_computes_something_else_in_parts_is_refused_on_every_rank(
    in_parts: tuple[Path, int, int],
) -> None:
    folder, replicate, context = in_parts
    for rank in range(replicate * context):
        said = json.loads((folder / f"refused_{rank}.json").read_text())
        assert said.startswith(f"hardware.context: cut into {context} parts, Qwen3Model computes something else")
