"""What large models need (recomputed layers, small pieces of a cold-start batch) must not change what is learned."""

from __future__ import annotations

import gc
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from accelerate import Accelerator
from learner_tools import MICRO, Gradients, random_episodes, write_micro_model
from run_tools import ROOT

from learner.config import ModelConfig, OptimizerConfig, RecipeError, SFTConfig, parse_recipe
from learner.data.batch import build_batch
from learner.model.forward import PolicyForward
from learner.model.loading import load_policy_model, recompute_layers
from learner.model.trainee import Trainee
from learner.run.display import Display
from learner.sft import _prepare, fit, micro_batches, run_sft, short_enough


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_micro_model(tmp_path_factory.mktemp("model") / "micro", seed=3)


def gradients(model: Path, recompute: bool) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    config = ModelConfig(path=model, recompute_layers=recompute)
    policy = PolicyForward(load_policy_model(model, config))
    batch = build_batch(random_episodes(4))
    logprobs, _ = policy(batch.input_ids, batch.action_mask)
    logprobs.sum().backward()
    return logprobs, {name: p.grad for name, p in policy.named_parameters() if p.grad is not None}


def test_recomputed_layers_give_the_same_gradients_bit_for_bit(model: Path) -> None:
    plain, recomputed = gradients(model, False), gradients(model, True)
    assert torch.equal(plain[0], recomputed[0])
    assert plain[1].keys() == recomputed[1].keys()
    assert all(torch.equal(plain[1][name], recomputed[1][name]) for name in plain[1])


def test_recomputed_layers_keep_less_in_eval_mode(model: Path) -> None:
    kept = []
    for recompute in (False, True):
        policy = load_policy_model(model, ModelConfig(path=model, recompute_layers=recompute))
        count = []
        with torch.autograd.graph.saved_tensors_hooks(lambda t, count=count: count.append(t.numel()) or t, lambda t: t):
            policy.base_model(input_ids=torch.arange(64)[None], use_cache=False)
        kept.append(sum(count))
    assert kept[1] < kept[0] / 3


def test_a_model_without_layers_to_recompute_is_refused() -> None:
    with pytest.raises(RecipeError, match=r"model\.recompute_layers"):
        recompute_layers(torch.nn.Linear(2, 2))


@pytest.mark.parametrize("size", [1, 2, 3, 8])
def test_a_cold_start_batch_in_pieces_has_the_gradient_of_the_whole(model: Path, size: int) -> None:
    batch = build_batch(random_episodes(6))
    examples = [
        (ids[:n], mask[:n]) for ids, mask, n in zip(batch.input_ids, batch.action_mask, batch.lengths, strict=True)
    ]
    found = []
    for rows in (None, size):
        policy = Trainee.prepare(
            PolicyForward(load_policy_model(model, ModelConfig(path=model))),
            OptimizerConfig(lr=1e-3),
            Accelerator(cpu=True),
            total_steps=1,
        )
        recorded, losses = Gradients(policy), []
        fit(
            policy,
            examples,
            steps=1,
            batch_size=6,
            seed=0,
            progress=lambda _, loss, losses=losses: losses.append(loss),
            micro_batch_rows=rows,
        )
        found.append((recorded.updates[0], losses))
    (whole, losses), (pieces, others) = found
    assert others == pytest.approx(losses, rel=1e-5)
    for name in whole:
        torch.testing.assert_close(pieces[name], whole[name], rtol=1e-4, atol=1e-7)


def test_every_rank_gets_as_many_pieces_as_the_one_with_most_rows() -> None:
    ids, mask = torch.ones(3, 9, dtype=torch.long), torch.zeros(3, 9, dtype=torch.bool)
    mask[0, 4], mask[1, 8] = True, True
    pieces = micro_batches(ids, mask, rows=5, size=1)
    assert len(pieces) == 5
    assert [part.shape[1] for part, _ in pieces] == [5, 9, 2, 2, 2]  # as wide as needed, no more
    assert sum(int(part.sum()) for _, part in pieces) == 2


def test_epochs_become_updates_and_need_traces_of_ones_own(tmp_path: Path, model: Path) -> None:
    traces = tmp_path / "traces.jsonl"
    line = {"messages": [{"role": "user", "content": "1 + 1?"}, {"role": "assistant", "content": "2"}]}
    traces.write_text("\n".join([json.dumps(line)] * 10))
    config = SFTConfig(traces=traces, epochs=3, batch_size=4, imperfect_steps=0)
    recipe = parse_recipe({"name": "x", "runs_dir": str(tmp_path), "model": {"path": str(model)}})
    [(found, steps)] = _prepare(recipe, config, tmp_path / "scratch", Display("x"))
    assert (len(found), steps) == (10, 8)  # 30 traces in batches of 4
    with pytest.raises(RecipeError, match=r"sft: epochs counts passes over `traces`"):
        parse_recipe({"name": "x", "model": {"tiny": MICRO}, "sft": {"epochs": 3}})


def test_the_cold_starts_weights_and_moments_are_gone_when_it_is_over(tmp_path: Path, model: Path) -> None:
    """One accelerator serves all stages, and remembers what it prepares."""
    traces = tmp_path / "traces.jsonl"
    line = {"messages": [{"role": "user", "content": "1 + 1?"}, {"role": "assistant", "content": "2"}]}
    traces.write_text(json.dumps(line))
    section = {"traces": str(traces), "epochs": 2, "batch_size": 1, "imperfect_steps": 0}
    model_section = {"path": str(model), "recompute_layers": True}
    recipe = parse_recipe({"name": "x", "runs_dir": str(tmp_path), "model": model_section, "sft": section})
    gc.collect()
    before = {id(found) for found in gc.get_objects() if issubclass(type(found), PolicyForward | torch.optim.Optimizer)}
    accelerator = Accelerator(cpu=True)
    assert (run_sft(recipe, Display("x"), accelerator) / "config.json").exists()
    gc.collect()
    left = [found for found in gc.get_objects() if issubclass(type(found), PolicyForward | torch.optim.Optimizer)]
    assert not [type(found) for found in left if id(found) not in before]


def test_traces_that_are_too_long_are_left_out_and_never_all_of_them() -> None:
    examples = [(torch.zeros(n, dtype=torch.long), torch.ones(n, dtype=torch.bool)) for n in (3, 9, 5)]
    assert [len(ids) for ids, _ in short_enough(examples, 5)] == [3, 5]
    assert len(short_enough(examples, None)) == 3
    with pytest.raises(RecipeError, match=r"sft\.max_trace_tokens"):
        short_enough(examples, 2)


MIXED = """
import sys, torch
from pathlib import Path
from learner.config import load_recipe
from learner.model.forward import PolicyForward
from learner.model.loading import load_policy_model
from learner.parallel.ranks import make_accelerator
from learner.model.trainee import Trainee

model, dtype, compute = Path(sys.argv[1]), *sys.argv[2:]
section = f"model={{path: {model}, dtype: {dtype}, compute_dtype: {compute}}}"
recipe = load_recipe(None, [section, "learner.tracker=null"])
accelerator = make_accelerator(recipe)
config = recipe.learner.policy.model_copy(update={"lr": 1e-6, "warmup_steps": 0})
policy = Trainee.prepare(PolicyForward(load_policy_model(model, recipe.model)), config, accelerator, total_steps=1)
before = [p.detach().clone() for p in policy.parameters]
ids = torch.arange(1, 33)[None]
logprobs, _ = policy.module(ids, torch.ones_like(ids, dtype=torch.bool))
accelerator.backward(-logprobs.sum())
policy.step()
moved = sum(int((p != old).sum()) for p, old in zip(policy.parameters, before))
print(accelerator.mixed_precision, policy.parameters[0].dtype, moved / sum(p.numel() for p in policy.parameters))
"""


def test_small_updates_are_kept_by_float32_weights_that_compute_in_bfloat16(model: Path) -> None:
    """At the paper's rate of 1e-6 a bfloat16 weight mostly stays where it is."""

    def trained(dtype: str, compute: str) -> list[str]:
        done = subprocess.run(
            [sys.executable, "-c", MIXED, str(model), dtype, compute],
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=100,
        )
        assert done.returncode == 0, done.stderr[-2000:]
        return done.stdout.split()

    mixed, narrow = trained("float32", "bfloat16"), trained("bfloat16", "bfloat16")
    assert mixed[:2] == ["bf16", "torch.float32"]
    assert narrow[:2] == ["bf16", "torch.bfloat16"]
    assert float(narrow[2]) < 0.5 * float(mixed[2])
