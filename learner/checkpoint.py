"""Checkpoints: all of the learner's state, written atomically, and how a run goes on from one.

A checkpoint is a folder `step_00012/`: policy and critic in Hugging Face format (usable as they are), optimiser
moments, RNG states, counters, running baselines, and the claims whose episodes are in the weights. It is written
beside its place and renamed into it, so a killed write leaves the one before usable.
"""

from __future__ import annotations

import json
import os
import pickle
import random
import re
import shutil
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import nn

_NAME = re.compile(r"step_(\d+)$")
# What safetensors, torch.load and json raise on files that are missing, cut short or of another kind.
_DAMAGED = (OSError, SafetensorError, RuntimeError, ValueError, KeyError, TypeError, EOFError, pickle.UnpicklingError)


class CheckpointError(RuntimeError):
    """A checkpoint that cannot be written or read; the message says which and what to do."""


@dataclass
class Progress:
    """How far a run is. `claims`: the ids whose episodes this state has learned from, since the last checkpoint
    that was followed by commits. `version`: the newest policy version published. `best_score`: the best that published
    weights had in the held-out probe; `dropped`: how many candidates were dropped for it."""

    step: int = 0
    version: int = 0
    episodes: int = 0
    action_tokens: int = 0
    stale_tokens: int = 0
    claims: list[str] = field(default_factory=list)
    baseline: dict[str, Any] | None = None
    best_score: float | None = None
    dropped: int = 0


def checkpoints(folder: Path) -> list[Path]:
    """The complete checkpoints in `folder`, oldest first."""
    if not folder.exists():
        return []
    return sorted((p for p in folder.iterdir() if _NAME.match(p.name)), key=lambda p: int(p.name[5:]))


def save_checkpoint(
    folder: Path, progress: Progress, modules: dict[str, nn.Module], states: dict[str, Any], *, keep: int = 2
) -> Path:
    """Write `folder/step_N` atomically and delete all but the newest `keep`.

    `modules` are saved as safetensors of their trained and frozen parameters; `states` with torch.save.
    """
    target = folder / f"step_{progress.step:05d}"
    scratch = folder / f".writing_{progress.step:05d}_{os.getpid()}"
    for left in folder.glob(".writing_*"):  # of a process that was killed while it wrote
        shutil.rmtree(left, ignore_errors=True)
    try:
        scratch.mkdir(parents=True, exist_ok=True)
        for name, module in modules.items():
            save_weights(module, scratch / f"{name}.safetensors")
        _save_states({"states": states, "rng": rng_state()}, scratch / "learner.pt")
        (scratch / "progress.json").write_text(json.dumps(asdict(progress)))
        for path in scratch.iterdir():
            _sync(path)
        if target.exists():
            shutil.rmtree(target)
        os.replace(scratch, target)
        _sync(folder)
    except (OSError, SafetensorError) as error:
        shutil.rmtree(scratch, ignore_errors=True)
        reason = getattr(error, "strerror", None) or error
        raise CheckpointError(
            f"cannot write the checkpoint {target}: {reason}. Free some space or set runs_dir to "
            "another disk, and run the same command again; the checkpoint before it is untouched"
        ) from error
    for old in checkpoints(folder)[:-keep]:
        shutil.rmtree(old, ignore_errors=True)
    return target


def load_progress(path: Path) -> Progress:
    """Read only the counters of a checkpoint."""
    return Progress(**json.loads((path / "progress.json").read_text()))


def load_checkpoint(path: Path, modules: dict[str, nn.Module]) -> tuple[Progress, dict[str, Any]]:
    """Load the weights into `modules`, restore the RNGs, return counters and the other states.

    Raises `CheckpointError`, naming the checkpoint, where a file is missing, damaged or of another model.
    """
    try:
        for name, module in modules.items():
            load_weights(module, path / f"{name}.safetensors")
        saved = torch.load(path / "learner.pt", weights_only=False)
        progress, states = load_progress(path), saved["states"]
    except CheckpointError:
        raise
    except _DAMAGED as error:
        raise CheckpointError(
            f"cannot read the checkpoint {path}: {str(error).splitlines()[0] if str(error) else type(error).__name__}. "
            "Delete this folder to go on from the checkpoint before it"
        ) from error
    restore_rng(saved["rng"])
    return progress, states


def save_weights(module: nn.Module, path: Path) -> None:
    """All parameters and buffers of a module; tensors that are shared (tied embeddings) once."""
    seen: set[int] = set()
    tensors = {}
    for name, tensor in module.state_dict().items():
        if tensor.data_ptr() not in seen or tensor.numel() == 0:
            tensors[name] = tensor.detach().cpu().contiguous()
            seen.add(tensor.data_ptr())
    save_file(tensors, path, metadata={"format": "pt"})


def load_weights(module: nn.Module, path: Path) -> None:
    """Read what `save_weights` wrote; a name that the module lacks is an error."""
    missing, unexpected = module.load_state_dict(load_file(path), strict=False)
    own = module.state_dict()
    untied = [
        name for name in missing if own[name].data_ptr() not in {own[n].data_ptr() for n in own if n not in missing}
    ]
    if untied or unexpected:
        raise CheckpointError(f"{path} is of another model: missing {untied[:3]}, unknown {unexpected[:3]}")


def _save_states(states: dict[str, Any], path: Path) -> None:
    try:
        torch.save(states, path)
    except RuntimeError as error:  # torch's writer has no other word for a full disk
        raise OSError(str(error).splitlines()[0]) from error


def rng_state() -> dict[str, Any]:
    """The states of every generator the learner draws from."""
    state = {"python": random.getstate(), "numpy": np.random.get_state(), "torch": torch.get_rng_state()}
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state_all()
    return state


def restore_rng(state: dict[str, Any]) -> None:
    """Set every generator back."""
    random.setstate(state["python"])
    np.random.set_state(state["numpy"])
    torch.set_rng_state(state["torch"])
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state_all(state["cuda"])


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
