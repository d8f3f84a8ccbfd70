"""Checkpoints: all of the learner's state, written by all ranks while they go on, and how a run goes on from one.

A checkpoint is a folder `step_00012/` of torch.distributed.checkpoint's files, one a rank, and `progress.json`. It
holds policy and critic, optimiser moments, RNG states, counters, running baselines, and the claims whose episodes are
in the weights. Any layout of processes reads what any other wrote. It is written beside its place and renamed into it,
so a killed write leaves the one before usable.
"""

from __future__ import annotations

import json
import os
import pickle
import re
import shutil
import threading
import warnings
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from accelerate import Accelerator
from accelerate.utils import gather_object
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner

from learner.model.finite import first_not_finite
from learner.model.trainee import Trainee
from learner.run.state import Arrival, differences, host_copy, restore_rng, rng_state, state_of

_NAME = re.compile(r"step_(\d+)$")
_SCRATCH = ".writing_*"
# What torch's reader and json raise on files that are missing, cut short or of another kind.
_DAMAGED = (OSError, RuntimeError, ValueError, KeyError, TypeError, EOFError, AttributeError, pickle.UnpicklingError)
_WRITE_LIMIT_S = 3600.0  # how much longer than the first rank the last one may write

# One process is what it says there is.
warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable or uninitialized")


class CheckpointError(RuntimeError):
    """A checkpoint that cannot be written or read; the message says which and what to do."""


@dataclass
class Progress:
    """How far a run is. `claims`: the ids whose episodes this state has learned from, and which may not be committed
    yet. `version`: the newest policy version published. `best_score`: the best that published weights had in the
    held-out probe; `dropped`: how many candidates were dropped for it."""

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


def load_progress(path: Path) -> Progress:
    """Read only the counters of a checkpoint."""
    return _progress(_counters(path))


def _counters(path: Path) -> dict[str, Any]:
    return dict(json.loads((path / "progress.json").read_text()))


def _progress(saved: Mapping[str, Any]) -> Progress:
    return Progress(**{field.name: saved[field.name] for field in fields(Progress) if field.name in saved})


class Checkpoints:
    """Writes and reads the checkpoints of one learner, which each rank has one of. One write at a time:

        idle ──begin──▶ writing (a thread; the learner goes on) ──▶ written or failed ──finish──▶ idle

    `begin` and `load` are collectives: every rank calls them, in the same order as all else that ranks do together.
    What the threads of the ranks agree on meanwhile goes through a group of their own, so that no message of a step is
    ever taken for one of theirs. Files are complete on all ranks before the main one renames the folder.
    """

    def __init__(self, accelerator: Accelerator, *, keep: int) -> None:
        self._accelerator, self._keep = accelerator, keep
        self._own_group: Any = None
        self._thread: threading.Thread | None = None
        self._target: Path | None = None
        self._failure: BaseException | None = None

    def begin(self, folder: Path, progress: Progress, trainees: Mapping[str, Trainee]) -> None:
        """Copy the state to this machine's memory and begin to write it as `folder/step_N`.

        Raises `CheckpointError`, on the main process, where the state is not finite or nothing can be written there.
        """
        self.wait()
        target = folder / f"step_{progress.step:05d}"
        scratch = folder / f".writing_{progress.step:05d}"
        state = state_of(trainees)
        wrong = first_not_finite(state.items())
        trouble = [_not_finite(wrong, target)] if wrong else []
        if self._accelerator.is_main_process and not trouble:
            try:
                _sweep(folder)
                scratch.mkdir(parents=True)
            except OSError as error:
                trouble = [_not_written(target, error)]
        # Gathered, so that no rank writes where the main one still sweeps, or alone.
        if found := gather_object(trouble):
            if self._accelerator.is_main_process:
                shutil.rmtree(scratch, ignore_errors=True)
                raise CheckpointError(found[0])
            return
        snapshot: dict[str, Any] = dict(host_copy(state))
        snapshot[f"rng.{self._accelerator.process_index}"] = rng_state()
        counters = {which: {"updates": t.updates, "lr": t.config.lr} for which, t in trainees.items()}
        about = json.dumps(asdict(progress) | {"trainees": counters})
        self._group()  # made here, where all ranks are
        self._target, self._failure = target, None
        self._thread = threading.Thread(
            target=self._write, args=(snapshot, about, scratch, target), name=f"write {target.name}"
        )
        self._thread.start()

    def wait(self) -> None:
        """Until nothing is being written."""
        if (thread := self._thread) is not None:
            thread.join()

    def finish(self) -> Path | None:
        """Wait for the write that was begun last; its folder, None where there was none.

        Raises `CheckpointError` where it failed, on the disk of any rank.
        """
        self.wait()
        self._thread, target, failure = None, self._target, self._failure
        self._target = self._failure = None
        if failure is not None:
            assert target is not None
            raise CheckpointError(_not_written(target, failure)) from failure
        return target

    def load(self, path: Path, trainees: Mapping[str, Trainee]) -> tuple[Progress, dict[str, dict[str, Any]]]:
        """Fill weights and moments from a checkpoint of any layout and restore the RNGs; its counters, and by trainee
        its number of updates and its rate.

        Raises `CheckpointError`, naming the checkpoint, where a file is missing, damaged or of another model.
        """
        if (path / "learner.pt").exists():
            raise CheckpointError(
                f"{path} is of an earlier version of this program, which wrote whole weights; this one does not read "
                f"them. Go on with that version, or give this run another name (name=...) and start it from the "
                f"newest folder in {path.parent.parent / 'weights'} (model.path=..., sft=null)"
            )
        try:
            about = _counters(path)
            progress, counters = _progress(about), about["trainees"]
            reader = dcp.FileSystemReader(path)
            saved = reader.read_metadata().state_dict_metadata
            if other := differences(trainees, saved):
                raise CheckpointError(
                    f"{path} is of another model: {', '.join(other)}. Give this run another name (name=...), or its "
                    "recipe the model back that the run began with"
                )
            arrival = Arrival(trainees, saved)
            if arrival.homeless:
                raise CheckpointError(
                    f"{path} has moments of parameters that this recipe does not train, {arrival.homeless[:3]}: is "
                    "learner.critic_trainable another one than before? Set it back, or give this run another name"
                )
            own = f"rng.{self._accelerator.process_index}"
            own = own if own in saved else "rng.0"  # a rank that was not there before
            wanted = _by_part({**arrival.tensors, own: b""})
            dcp.load(
                wanted,
                storage_reader=reader,
                planner=DefaultLoadPlanner(),
                process_group=self._group(),
                no_dist=not self._shared,
            )
            arrival.settle()
            restore_rng(wanted["rng"][own.removeprefix("rng.")])
        except CheckpointError:
            raise
        except (*_DAMAGED, CheckpointException) as error:
            raise CheckpointError(
                f"cannot read the checkpoint {path}: {_reason(error)}. "
                "Delete this folder to go on from the checkpoint before it"
            ) from error
        return progress, counters

    def close(self) -> None:
        """Wait for the write under way, and let the group of the ranks' threads go."""
        self.wait()
        self._own_group = None

    @property
    def _shared(self) -> bool:
        return self._accelerator.num_processes > 1

    def _group(self) -> Any:
        if self._shared and self._own_group is None:
            self._own_group = dist.new_group(backend="gloo", timeout=timedelta(seconds=_WRITE_LIMIT_S))
        return self._own_group

    def _write(self, snapshot: dict[str, Any], about: str, scratch: Path, target: Path) -> None:
        main = self._accelerator.is_main_process
        try:
            dcp.save(
                _by_part(snapshot),
                storage_writer=dcp.FileSystemWriter(scratch),  # which writes through to the disk
                process_group=self._own_group,
                no_dist=not self._shared,
            )
            if main:
                self._complete(about, scratch, target)
        except BaseException as error:  # whatever it is, it is for `finish`
            self._failure = error
            if main:
                shutil.rmtree(scratch, ignore_errors=True)

    def _complete(self, about: str, scratch: Path, target: Path) -> None:
        (scratch / "progress.json").write_text(about)
        _sync(scratch / "progress.json")
        _sync(scratch)
        if target.exists():
            shutil.rmtree(target)
        os.replace(scratch, target)
        _sync(target.parent)
        for old in checkpoints(target.parent)[: -self._keep]:
            shutil.rmtree(old, ignore_errors=True)


def _by_part(state: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """The same names, nested by their first word: torch keeps a log of each of the outermost."""
    parts: dict[str, dict[str, Any]] = {}
    for name, value in state.items():
        part, rest = name.split(".", 1)
        parts.setdefault(part, {})[rest] = value
    return parts


def _sweep(folder: Path) -> None:
    for left in folder.glob(_SCRATCH):  # of a process that was killed while it wrote
        shutil.rmtree(left)


def _not_written(target: Path, error: BaseException) -> str:
    return (
        f"cannot write the checkpoint {target}: {_reason(error)}. Free some space or set runs_dir to another disk, and "
        "run the same command again; the checkpoint before it is untouched"
    )


def _not_finite(name: str, target: Path) -> str:
    return (
        f"{name} is not finite after step {int(target.name[5:])}, so the checkpoint {target} is not written; the one "
        "before it is untouched. Run the same command again to go on from there, with a lower learning rate if it "
        "happens again"
    )


def _reason(error: BaseException) -> str:
    if isinstance(error, CheckpointException) and error.failures:
        rank, (cause, _) = sorted(error.failures.items())[0]
        return _reason(cause) + (f" (rank {rank})" if len(error.failures) == 1 and rank else "")
    said = str(getattr(error, "strerror", None) or error).splitlines()
    return said[0] if said and said[0] else type(error).__name__


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
