"""Batches that a run keeps, each with what its update began from, so that `learner.replay` can make it again alone.

    runs/<name>/batches/step_00012.msgpack    one update: its episodes, the version, RNG states

The state that it began from is the checkpoint of the step before, or an older one and the batches since then.
"""

from __future__ import annotations

import re
from pathlib import Path

import msgspec

from agent import episode as records
from agent.episode import Episode
from learner.faults import LearnerFault
from learner.run.state import rng_state

FOLDER = "batches"
"""Where they lie, in a run's folder."""

_NAME = re.compile(r"step_(\d+)\.msgpack")


class RecordedBatch(msgspec.Struct, frozen=True):
    """What update `step` was given. `version`: the policy's, when it began; `weights`: the checkpoint that held the
    state then, by name, or "start"; `rng`: the main process's generators; `episodes` are encoded."""

    step: int
    version: int
    weights: str
    rng: bytes
    episodes: list[bytes]

    def decoded(self) -> list[Episode]:
        """The episodes, in the order of the claim."""
        return [records.decode(data) for data in self.episodes]


def first_needed(step: int, *, keep: int, checkpoint_every: int) -> int:
    """The oldest batch that the last `keep` updates up to `step` need: the first one behind a checkpoint."""
    oldest = max(step - keep, 0)  # the state that the oldest of them began from
    return oldest - oldest % checkpoint_every + 1


def record(run: Path, step: int, version: int, episodes: list[bytes], *, keep: int, checkpoint_every: int) -> Path:
    """Keep the batch that update `step` is about to learn from; older ones than are needed go."""
    folder = run / FOLDER
    folder.mkdir(exist_ok=True)
    before = step - 1 - (step - 1) % checkpoint_every
    weights = f"checkpoints/step_{before:05d}" if before else "start"
    entry = RecordedBatch(step, version, weights, rng_state(), episodes)
    target = folder / f"step_{step:05d}.msgpack"
    scratch = folder / f".{target.name}"
    scratch.write_bytes(msgspec.msgpack.encode(entry))
    scratch.replace(target)
    needed = first_needed(step, keep=keep, checkpoint_every=checkpoint_every)
    for number, path in recorded(run).items():
        if number < needed:
            path.unlink()
    return target


def recorded(run: Path) -> dict[int, Path]:
    """The batches of a run by their update, oldest first."""
    folder = run / FOLDER
    found = {int(name.group(1)): path for path in folder.glob("*") if (name := _NAME.fullmatch(path.name))}
    return dict(sorted(found.items()))


def forget_after(run: Path, step: int) -> None:
    """Remove what a session has recorded after `step`, where the next one goes on: that was lost, and comes again."""
    for number, path in recorded(run).items():
        if number > step:
            path.unlink()


def read(path: Path) -> RecordedBatch:
    """One that `record` wrote. Raises `LearnerFault` where it is damaged."""
    try:
        return msgspec.msgpack.decode(path.read_bytes(), type=RecordedBatch)
    except (OSError, msgspec.MsgspecError) as error:
        raise LearnerFault(f"cannot read the recorded batch {path}: {error}. Replay another update") from error
