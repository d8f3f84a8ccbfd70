"""A checkpoint holds everything, a killed or refused write costs nothing, and resuming is exact."""

from __future__ import annotations

import json
import multiprocessing
import os
import resource
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from learner_tools import build_learner, changed, moments, random_episodes, same, snapshot

from learner import checkpoint
from learner.checkpoint import CheckpointError, checkpoints, load_checkpoint, load_progress
from learner.learner import Learner

CHUNKS = [random_episodes(8, seed=seed) for seed in range(6)]


def everything(own: Learner) -> dict[str, Any]:
    """Every number that the next step depends on."""
    assert own.critic is not None
    state: dict[str, Any] = {"rng": torch.get_rng_state().clone(), "progress": vars(own.progress).copy()}
    for name, trainee in (("policy", own.policy), ("critic", own.critic)):
        state[name] = snapshot(trainee)
        state[name + " moments"] = moments(trainee)
        state[name + " updates"] = trainee.updates
    return state


def equal(left: dict[str, Any], right: dict[str, Any]) -> None:
    for name in ("policy", "critic"):
        assert not list(changed(left[name], right[name])), name
        pairs = list(zip(left[name + " moments"], right[name + " moments"], strict=True))
        assert pairs
        assert all(torch.equal(a, b) for a, b in pairs), name
        assert left[name + " updates"] == right[name + " updates"]
    assert torch.equal(left["rng"], right["rng"])
    assert left["progress"] == right["progress"]


def test_resuming_gives_the_uninterrupted_run_bit_for_bit(micro_model: Path, tmp_path: Path) -> None:
    """Case H1: N steps, a restart and M steps are N+M steps: weights, moments, RNG, counters."""
    whole = build_learner(micro_model, tmp_path)
    whole.progress.version = 7
    for chunk in CHUNKS[:3]:
        whole.step(chunk)
        torch.rand(1)  # something that draws
    wanted = everything(whole)
    first = build_learner(micro_model, tmp_path)
    first.progress.version = 7
    for chunk in CHUNKS[:2]:
        first.step(chunk)
        torch.rand(1)
    saved = first.save(tmp_path / "checkpoints")
    del first
    torch.manual_seed(77)
    second = build_learner(micro_model, tmp_path)
    lines = second.resume(saved)
    assert lines == [f"going on from {saved}, step 2"]
    second.step(CHUNKS[2])
    torch.rand(1)
    equal(everything(second), wanted)


def test_the_running_mean_goes_on_where_it_was(micro_model: Path, tmp_path: Path) -> None:
    """Case H1: the running baselines are part of a checkpoint."""
    settings = {"algorithm": "sao_running_mean"}
    whole, first = (build_learner(micro_model, tmp_path, learner=settings) for _ in range(2))
    for own in (whole, first):
        own.step(CHUNKS[0])
    saved = first.save(tmp_path / "checkpoints")
    second = build_learner(micro_model, tmp_path, learner=settings)
    fresh = build_learner(micro_model, tmp_path, learner=settings)
    second.resume(saved)
    results = [own.step(CHUNKS[0])[1].advantages for own in (whole, second, fresh)]
    assert all(r is not None for r in results)
    assert torch.equal(results[0], results[1])  # type: ignore[arg-type]
    assert not torch.equal(results[0], results[2])  # type: ignore[arg-type]


def test_a_changed_learning_rate_in_the_recipe_wins_and_this_is_said(micro_model: Path, tmp_path: Path) -> None:
    """Case H1: neither silently the old one nor silently the new one; betas and decay follow the recipe too."""
    first = build_learner(micro_model, tmp_path)
    first.step(CHUNKS[0])
    saved = first.save(tmp_path / "checkpoints")
    changes = {"policy": {"lr": 3e-3, "warmup_steps": 0, "weight_decay": 0.5, "betas": [0.5, 0.6]}}
    second = build_learner(micro_model, tmp_path, learner=changes)
    lines = second.resume(saved)
    assert any("policy learning rate" in line and "0.003" in line and "0.01" in line for line in lines)
    assert not any("critic learning rate" in line for line in lines)
    seen = []
    second.policy.optimizer.optimizer.register_step_pre_hook(lambda o, *_: seen.append(dict(o.param_groups[0])))
    second.step(CHUNKS[1])
    assert seen[0]["lr"] == pytest.approx(3e-3)
    assert seen[0]["weight_decay"] == 0.5
    assert tuple(seen[0]["betas"]) == (0.5, 0.6)


def test_a_checkpoint_holds_both_models_both_optimisers_rng_counters_and_claims(
    micro_model: Path, tmp_path: Path
) -> None:
    """Case H1."""
    own = build_learner(micro_model, tmp_path)
    own.step(CHUNKS[0])
    own.progress.claims.append("claim-1")
    saved = own.save(tmp_path / "checkpoints")
    assert {p.name for p in saved.iterdir()} == {
        "policy.safetensors",
        "critic.safetensors",
        "learner.pt",
        "progress.json",
    }
    content = torch.load(saved / "learner.pt", weights_only=False)
    assert content["states"].keys() == {"policy", "critic"}
    assert {"python", "numpy", "torch"} <= content["rng"].keys()
    progress = load_progress(saved)
    assert (progress.step, progress.claims, progress.episodes) == (1, ["claim-1"], 8)


def test_only_the_newest_checkpoints_are_kept(micro_model: Path, tmp_path: Path) -> None:
    own = build_learner(micro_model, tmp_path, learner={"keep_checkpoints": 2})
    for step in range(9, 13):
        own.progress.step = step
        own.save(tmp_path / "c")
    assert [p.name for p in checkpoints(tmp_path / "c")] == ["step_00011", "step_00012"]


def in_a_child(body: Callable[[], object]) -> int:
    """Run `body` in a real process of its own, a fork of this one; its exit code, negative for a signal."""
    process = multiprocessing.get_context("fork").Process(target=body)
    process.start()
    process.join(60)
    assert process.exitcode is not None
    return process.exitcode


@pytest.mark.parametrize(("name", "at"), [("save_weights", 2), ("rng_state", 1), ("_sync", 4), ("_sync", 5)])
def test_a_write_killed_half_way_leaves_the_previous_checkpoint_usable(
    micro_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, at: int
) -> None:
    """Case H1, by SIGKILL: between two files, before the last one, before the rename, and right behind it."""
    own = build_learner(micro_model, tmp_path)
    own.step(CHUNKS[0])
    folder = tmp_path / "checkpoints"
    own.save(folder)
    before = everything(own)
    own.step(CHUNKS[1])
    plain, calls = getattr(checkpoint, name), 0

    def dying(*arguments: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == at:
            os.kill(os.getpid(), signal.SIGKILL)
        return plain(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(checkpoint, name, dying)
        assert in_a_child(lambda: own.save(folder)) == -signal.SIGKILL
    behind = at == 5
    assert len(list(folder.glob(".writing*"))) == (not behind)
    assert [p.name for p in checkpoints(folder)] == ["step_00001", "step_00002"][: 1 + behind]
    again = build_learner(micro_model, tmp_path)
    again.resume(checkpoints(folder)[-1])
    equal(everything(again), everything(own) if behind else before)
    again.progress.step = 2
    again.save(folder)
    assert sorted(p.name for p in folder.iterdir()) == ["step_00001", "step_00002"]  # and the remains are swept


@pytest.mark.parametrize("file", ["policy.safetensors", "learner.pt"])
def test_a_full_disk_is_one_paragraph_and_leaves_the_previous_checkpoint(
    micro_model: Path, tmp_path: Path, file: str
) -> None:
    """Case H1: the disk is full (here: a limit on the size of files) at the first file, or at the last."""
    own = build_learner(micro_model, tmp_path)
    own.step(CHUNKS[0])
    folder = tmp_path / "checkpoints"
    sizes = {p.name: p.stat().st_size for p in own.save(folder).iterdir()}
    assert sizes["learner.pt"] > max(sizes["policy.safetensors"], sizes["critic.safetensors"])
    own.step(CHUNKS[1])

    def refused() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (sizes[file] - 100,) * 2)
        try:
            own.save(folder)
        except CheckpointError as error:
            (tmp_path / "said").write_text(str(error))

    assert in_a_child(refused) == 0
    said = (tmp_path / "said").read_text()
    assert "\n" not in said
    assert said.startswith(f"cannot write the checkpoint {folder / 'step_00002'}")
    assert "runs_dir" in said
    assert [p.name for p in folder.iterdir()] == ["step_00001"]
    build_learner(micro_model, tmp_path).resume(folder / "step_00001")


def test_a_checkpoint_of_another_model_is_refused_by_name(micro_model: Path, dense_model: Path, tmp_path: Path) -> None:
    own = build_learner(micro_model, tmp_path)
    saved = own.save(tmp_path / "c")
    other = build_learner(dense_model, tmp_path)
    with pytest.raises(CheckpointError, match=r"policy\.safetensors is of another model"):
        other.resume(saved)


@pytest.mark.parametrize("file", ["policy.safetensors", "learner.pt", "progress.json"])
def test_a_damaged_checkpoint_is_an_error_that_says_which(micro_model: Path, tmp_path: Path, file: str) -> None:
    own = build_learner(micro_model, tmp_path)
    saved = own.save(tmp_path / "c")
    (saved / file).write_bytes((saved / file).read_bytes()[:40])
    with pytest.raises(CheckpointError, match="step_00000"):
        own.resume(saved)


def test_saving_the_same_step_twice_replaces_it(micro_model: Path, tmp_path: Path) -> None:
    own = build_learner(micro_model, tmp_path)
    own.save(tmp_path / "c")
    own.progress.version = 3
    saved = own.save(tmp_path / "c")
    assert json.loads((saved / "progress.json").read_text())["version"] == 3
    modules = {"policy": own.policy.unwrapped}
    assert load_checkpoint(saved, modules)[0].version == 3


def test_an_exported_policy_is_whole_and_the_oldest_go(micro_model: Path, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    own = build_learner(micro_model, tmp_path)
    own.step(CHUNKS[0])
    for version in range(8, 13):
        folder = own.export(tmp_path / "weights" / f"v{version}")
    assert sorted(p.name for p in (tmp_path / "weights").iterdir()) == ["v10", "v11", "v12"]
    loaded = AutoModelForCausalLM.from_pretrained(folder)
    ours = own.policy.unwrapped.model.named_parameters()
    assert same({n: p.detach() for n, p in loaded.named_parameters()}, {n: p.detach() for n, p in ours})
    assert AutoTokenizer.from_pretrained(folder).chat_template
