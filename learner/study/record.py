"""A finished run as a CSV: a line an update, and above them what was run, where, when. It is there or it is not."""

from __future__ import annotations

import csv
import math
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

COLUMNS: Mapping[str, str] = {
    "reward": "rollout/reward",
    "held_out": "evaluation/success",
    "explained_variance": "critic/explained_variance",
    "critic_norm": "critic/gradient_norm",
    "critic_attention": "norms/critic_attention",
    "critic_experts": "norms/critic_experts",
    "critic_mlp": "norms/critic_mlp",
    "policy_norm": "policy/gradient_norm",
    "gated": "gate/share",
    "entropy": "policy/entropy",
    "ratio_kl": "ratio/kl",
    "lag": "lag/mean",
    "turns": "rollout/turns",
    "seconds": "time/step_s",
}
"""Columns of a CSV beside `step`, and the run's figures that they hold."""

Row = Mapping[str, float]


@dataclass(frozen=True)
class Record:
    """A run of `arm` with `seed`: `rows` by update, `facts` (command, machine, date, seconds)."""

    arm: str
    seed: int
    rows: tuple[Row, ...]
    facts: Mapping[str, str]

    def column(self, name: str) -> list[tuple[int, float]]:
        """(update, value) where there is one."""
        return [(int(row["step"]), row[name]) for row in self.rows if not math.isnan(row.get(name, math.nan))]


class RecordError(ValueError):
    """A file that is no CSV of a run; says which."""


def record_path(folder: Path, arm: str, seed: int) -> Path:
    """Where the CSV of a run lies in the folder of its study."""
    return folder / f"{arm}-seed{seed}.csv"


def rows_of(records: Iterable[Mapping[str, Any]]) -> list[dict[str, float]]:
    """Lines of a run's metrics as rows; those that no update was made in (an evaluation alone) add to what is there."""
    rows = []
    for record in records:
        row = {name: record[key] for name, key in COLUMNS.items() if record.get(key) is not None}
        if row:
            rows.append({"step": float(record["step"]), **row})
    return rows


def write_record(path: Path, rows: Sequence[Row], facts: Mapping[str, str]) -> None:
    """Write the CSV; a process that is killed meanwhile leaves none of this name."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f".{path.name}.{os.getpid()}")
    names = ["step", *(name for name in COLUMNS if any(name in row for row in rows))]
    with part.open("w", newline="", encoding="utf-8") as file:
        for key, value in facts.items():
            file.write(f"# {key}: {' '.join(str(value).split())}\n")
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(names)
        for row in rows:
            writer.writerow([f"{row[name]:.6g}" if name in row else "" for name in names])
        file.flush()
        os.fsync(file.fileno())
    part.replace(path)


def read_record(path: Path) -> Record:
    """What `write_record` wrote. Raises `RecordError`."""
    arm, _, seed = path.stem.rpartition("-seed")
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
        facts = dict(line[2:].split(": ", 1) for line in lines if line.startswith("# "))
        table = csv.DictReader(line for line in lines if not line.startswith("#"))
        rows = tuple({key: float(value) for key, value in row.items() if value} for row in table)
        if not rows or any("step" not in row for row in rows):
            raise ValueError("it has no line with a step")
        return Record(arm, int(seed), rows, facts)
    except (OSError, ValueError, TypeError) as error:
        raise RecordError(f"{path} is no CSV of a study's run ({error}); move it away") from error


def read_records(folder: Path, arm: str) -> list[Record]:
    """All finished runs of an arm, by seed."""
    found = [path for path in folder.glob(f"{arm}-seed*.csv") if path.stem.rpartition("-seed")[0] == arm]
    return sorted((read_record(path) for path in found), key=lambda record: record.seed)
