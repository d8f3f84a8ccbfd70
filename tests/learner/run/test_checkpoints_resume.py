"""A checkpoint holds everything, a killed or refused write costs nothing, and resuming is exact."""

from __future__ import annotations

import json
import math
import multiprocessing
import os
import resource
import signal
import threading
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
from learner_tools import build_learner, changed, moments, random_episodes, same, snapshot, write_micro_model
from torch.distributed.checkpoint import FileSystemReader, FileSystemWriter

from learner.run import checkpoint
from learner.run.checkpoint import CheckpointError, checkpoints, load_progress
from learner.run.learner import Learner

CHUNKS = [random_episodes(8, seed=seed) for seed in range(6)]


def everything(own: Learner) -> dict[str, Any]:
    """Every number that the next step depends on."""
    assert own.critic is not None
    state: dict[str, Any] = {"rng": torch.get_rng_state().clone(), "progress": asdict(own.progress)}
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
    assert {p.name for p in saved.iterdir()} == {"__0_0.distcp", ".metadata", "progress.json"}
    names = FileSystemReader(saved).read_metadata().state_dict_metadata.keys()
    for trainee in ("policy", "critic"):
        assert any(name.startswith(f"{trainee}.weights.") for name in names)
        assert any(name.startswith(f"{trainee}.moments.") and name.endswith(".exp_avg_sq") for name in names)
    assert "rng.0" in names
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


KILLS = {
    "before anything is written": (FileSystemWriter, "write_data", 1),
    "behind the tensors": (FileSystemWriter, "finish", 1),
    "before the last file is safe": (checkpoint, "_sync", 1),
    "before the rename": (checkpoint, "_sync", 2),
    "right behind it": (checkpoint, "_sync", 3),
}


@pytest.mark.parametrize("when", KILLS)
def test_a_write_killed_half_way_leaves_the_previous_checkpoint_usable(
    micro_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    """Case H1, by SIGKILL, in the background of a learner that has gone on meanwhile."""
    own = build_learner(micro_model, tmp_path)
    own.step(CHUNKS[0])
    folder = tmp_path / "checkpoints"
    own.save(folder)
    before = everything(own)
    own.step(CHUNKS[1])
    owner, name, at = KILLS[when]
    plain, calls = getattr(owner, name), 0

    def dying(*arguments: Any, **words: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == at:
            os.kill(os.getpid(), signal.SIGKILL)
        return plain(*arguments, **words)

    def go_on() -> None:
        own.begin_save(folder)
        while True:
            own.step(CHUNKS[2])

    with monkeypatch.context() as patch:
        patch.setattr(owner, name, dying)
        assert in_a_child(go_on) == -signal.SIGKILL
    behind = when == "right behind it"
    assert len(list(folder.glob(".writing*"))) == (not behind)
    assert [p.name for p in checkpoints(folder)] == ["step_00001", "step_00002"][: 1 + behind]
    again = build_learner(micro_model, tmp_path)
    again.resume(checkpoints(folder)[-1])
    equal(everything(again), everything(own) if behind else before)
    again.progress.step = 2
    again.save(folder)
    assert sorted(p.name for p in folder.iterdir()) == ["step_00001", "step_00002"]  # and the remains are swept


@pytest.mark.parametrize("share", [0.0, 0.5, 1.0])
def test_a_full_disk_is_one_paragraph_and_leaves_the_previous_checkpoint(
    micro_model: Path, tmp_path: Path, share: float
) -> None:
    """Case H1: the disk is full (here: a limit on the size of files) at the start, half way, or in the last page."""
    own = build_learner(micro_model, tmp_path)
    own.step(CHUNKS[0])
    folder = tmp_path / "checkpoints"
    size = (own.save(folder) / "__0_0.distcp").stat().st_size
    own.step(CHUNKS[1])

    def refused() -> None:
        # Two checkpoints of one size may differ by a few times 64 bytes, to which tensors are aligned.
        resource.setrlimit(resource.RLIMIT_FSIZE, (int(share * (size - 4096)),) * 2)
        own.begin_save(folder)  # as long as it is not asked for, nothing is said
        own.step(CHUNKS[2])
        try:
            own.finish_save()
        except CheckpointError as error:
            said.send(str(error))

    heard, said = multiprocessing.Pipe(duplex=False)
    assert in_a_child(refused) == 0
    assert heard.poll()
    text = heard.recv()
    assert "\n" not in text
    assert text.startswith(f"cannot write the checkpoint {folder / 'step_00002'}: ")
    assert "File too large" in text
    assert "runs_dir" in text
    assert [p.name for p in folder.iterdir()] == ["step_00001"]
    build_learner(micro_model, tmp_path).resume(folder / "step_00001")


def test_a_folder_that_cannot_be_written_to_is_said_before_the_write(micro_model: Path, tmp_path: Path) -> None:
    own = build_learner(micro_model, tmp_path)
    (tmp_path / "checkpoints").write_text("a file")
    with pytest.raises(CheckpointError, match="cannot write the checkpoint"):
        own.begin_save(tmp_path / "checkpoints")
    assert own.finish_save() is None


def test_what_is_saved_is_of_the_moment_and_not_of_the_steps_meanwhile(
    micro_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A write that read the weights in the background would hold half of one step and half of the next."""
    own = build_learner(micro_model, tmp_path)
    own.step(CHUNKS[0])
    wanted, goes_on = everything(own), threading.Event()
    plain = FileSystemWriter.write_data

    def late(*arguments: Any) -> Any:
        assert goes_on.wait(60)
        return plain(*arguments)

    monkeypatch.setattr(FileSystemWriter, "write_data", late)
    own.begin_save(tmp_path / "c")
    own.progress.claims.append("later")
    own.step(CHUNKS[1])
    goes_on.set()
    saved = own.finish_save()
    assert saved is not None
    again = build_learner(micro_model, tmp_path)
    again.resume(saved)
    equal(everything(again), wanted)


@pytest.mark.parametrize("which", ["policy", "critic", "moments"])
def test_what_is_not_finite_is_never_saved(micro_model: Path, tmp_path: Path, which: str) -> None:
    """Case N1: one NaN in a weight of either model, or in a moment, which would spoil the next step."""
    own = build_learner(micro_model, tmp_path)
    own.step(CHUNKS[0])
    assert own.critic is not None
    good = own.save(tmp_path / "c")
    trainee = own.critic if which == "critic" else own.policy
    parameter = trainee.parameters[-1]
    spoiled = trainee.optimizer.state[parameter]["exp_avg"] if which == "moments" else parameter
    with torch.no_grad():
        spoiled.view(-1)[0] = math.nan
    own.progress.step += 1
    with pytest.raises(CheckpointError, match=r"is not finite after step 2, .* is not written") as raised:
        own.save(tmp_path / "c")
    assert "\n" not in str(raised.value)
    assert [p for p in (tmp_path / "c").iterdir()] == [good]


def test_a_checkpoint_of_another_model_is_refused_by_name(micro_model: Path, dense_model: Path, tmp_path: Path) -> None:
    own = build_learner(micro_model, tmp_path)
    saved = own.save(tmp_path / "c")
    other = build_learner(dense_model, tmp_path)
    before = snapshot(other.policy)
    with pytest.raises(CheckpointError, match=r"step_00000 is of another model: .* missing .*gate_proj") as raised:
        other.resume(saved)
    assert "\n" not in str(raised.value)
    assert same(snapshot(other.policy), before)
    wider = build_learner(write_micro_model(tmp_path / "wider", expert_width=24), tmp_path)
    with pytest.raises(CheckpointError, match=r"of another model: \d+ of another shape \['critic"):
        wider.resume(saved)


def test_a_checkpoint_of_other_trained_parameters_is_refused_by_the_key(micro_model: Path, tmp_path: Path) -> None:
    """Moments would be dropped in silence."""
    own = build_learner(micro_model, tmp_path, learner={"critic_trainable": "all"})
    own.step(CHUNKS[0])
    saved = own.save(tmp_path / "c")
    with pytest.raises(CheckpointError, match=r"learner\.critic_trainable"):
        build_learner(micro_model, tmp_path, learner={"critic_trainable": "experts"}).resume(saved)


def test_a_checkpoint_of_whole_weights_says_that_it_is_of_an_earlier_version(micro_model: Path, tmp_path: Path) -> None:
    folder = tmp_path / "c" / "step_00003"
    folder.mkdir(parents=True)
    for name in ("policy.safetensors", "critic.safetensors", "learner.pt"):
        (folder / name).write_bytes(b"")
    (folder / "progress.json").write_text("{}")
    with pytest.raises(CheckpointError, match="earlier version of this program"):
        build_learner(micro_model, tmp_path).resume(folder)


@pytest.mark.parametrize("file", ["__0_0.distcp", ".metadata", "progress.json"])
@pytest.mark.parametrize("left", [0, 40, None])
def test_a_damaged_checkpoint_is_an_error_that_says_which(
    micro_model: Path, tmp_path: Path, file: str, left: int | None
) -> None:
    """Cut short, empty, or not there at all (None)."""
    own = build_learner(micro_model, tmp_path)
    saved = own.save(tmp_path / "c")
    if left is None:
        (saved / file).unlink()
    else:
        (saved / file).write_bytes((saved / file).read_bytes()[:left])
    with pytest.raises(CheckpointError, match="step_00000") as raised:
        own.resume(saved)
    assert "\n" not in str(raised.value)


def test_saving_the_same_step_twice_replaces_it(micro_model: Path, tmp_path: Path) -> None:
    own = build_learner(micro_model, tmp_path)
    own.save(tmp_path / "c")
    own.progress.version = 3
    saved = own.save(tmp_path / "c")
    assert json.loads((saved / "progress.json").read_text())["version"] == 3
    again = build_learner(micro_model, tmp_path)
    again.resume(saved)
    assert again.progress.version == 3


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
