"""Finished runs as CSV files, so that a comparison can be made in parts and is never made twice."""

from __future__ import annotations

import csv
import dataclasses
import math
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from agent.simulate.recovery import Interaction, mean_reward

_KINDS = {"index": int, "step": int, "version": int, "quality": int, "reward": float, "seconds": float}


@dataclass(frozen=True)
class Run:
    """One method, one seed, one learning rate of the policy."""

    method: str
    seed: int
    lr: float

    @property
    def name(self) -> str:
        """The run's name, and its file's."""
        return f"{self.method}-lr{self.lr:g}-seed{self.seed}"

    def path(self, folder: Path) -> Path:
        """Its file in `folder`; it is there if the run is finished."""
        return folder / f"{self.name}.csv"


def write_csv(path: Path, interactions: Iterable[Interaction]) -> None:
    """Write a finished run; a process that is killed meanwhile leaves no file of this name."""
    part = path.with_name(f".{path.name}.{os.getpid()}")
    names = [field.name for field in dataclasses.fields(Interaction)]
    with part.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(names)
        for interaction in interactions:
            writer.writerow([f"{v:.4f}" if isinstance(v, float) else v for v in dataclasses.astuple(interaction)])
        file.flush()
        os.fsync(file.fileno())
    part.replace(path)


def read_csv(path: Path) -> list[Interaction]:
    """What `write_csv` wrote; `ValueError` for a file of another kind."""
    with path.open(newline="", encoding="utf-8") as file:
        try:
            return [Interaction(**{k: _KINDS.get(k, str)(v) for k, v in row.items()}) for row in csv.DictReader(file)]
        except (TypeError, ValueError) as error:
            raise ValueError(f"{path} is no CSV of a simulated run ({error}); move it away") from error


def best_rate(folder: Path, method: str, seed: int, grid: Sequence[float], steps: int) -> float | None:
    """The rate of `grid` whose run of `seed` has the highest mean reward; None until all of them are finished."""
    runs = [Run(method, seed, lr) for lr in grid]
    if not all(run.path(folder).is_file() for run in runs):
        return None
    scores = {run.lr: mean_reward(read_csv(run.path(folder)), 0, steps) for run in runs}
    return max(scores, key=lambda lr: -math.inf if math.isnan(scores[lr]) else scores[lr])
