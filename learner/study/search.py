"""Search with the same budget for every method: six settings a preset, on seeds of its own, by mean reward.

What is found lies in `search.json` beside the studies, with all that was tried. Arms read it: the settings of a preset
hold for every arm of it, under what the arm itself changes.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from learner.study.arms import RECIPE, Arm, Job, Study, search_grid
from learner.study.figures import all_updates
from learner.study.record import read_record, record_path

FILE = "search.json"
SEEDS = (1000, 1001)
UPDATES = 60
NAME = "search"


def preset_of(arm: Arm) -> str:
    """The preset that an arm trains with."""
    said = [word for word in arm.words if word.startswith("learner.algorithm=")]
    return said[-1].partition("=")[2] if said else "sao"


def search_study(study: Study, updates: int = UPDATES) -> Study:
    """The runs of a search for the presets of `study`, as a study: an arm a setting, under the study's own words."""
    arms = []
    for name in dict.fromkeys(preset_of(arm) for arm in study.arms):
        own = next(arm for arm in study.arms if preset_of(arm) == name)
        arms += [Arm(f"{name}--{i}", (*own.words, *words)) for i, words in enumerate(search_grid(name))]
    return replace(study, name=NAME, arms=tuple(arms), updates=updates)


def search_jobs(
    study: Study, seeds: Sequence[int] = SEEDS, updates: int = UPDATES, more: Sequence[str] = ()
) -> list[Job]:
    """All runs of a search, one setting of every preset before the next, so that a part of them is fair too."""
    found = search_study(study, updates)
    arms = sorted(found.arms, key=lambda arm: int(arm.name.rpartition("--")[2]))
    return [Job(found, arm, seed, updates, more=tuple(more)) for seed in seeds for arm in arms]


def conclude(study: Study, results: Path, seeds: Sequence[int] = SEEDS) -> dict[str, Any]:
    """Write `search.json` from the runs that are finished; what it now says.

    A preset has a choice once all of its settings are finished with the same seeds, at least one.
    """
    told = read(results)
    for name in dict.fromkeys(preset_of(arm) for arm in study.arms):
        grid = search_grid(name)
        scores: list[dict[int, float]] = []
        for i, _ in enumerate(grid):
            paths = {seed: record_path(results / NAME, f"{name}--{i}", seed) for seed in seeds}
            records = {seed: read_record(path) for seed, path in paths.items() if path.is_file()}
            scores.append({seed: all_updates("reward")(r, int(r.rows[-1]["step"])) for seed, r in records.items()})
        common = sorted(set.intersection(*(set(found) for found in scores)))
        tried = [
            {"words": list(words), "reward": {str(s): round(v, 4) for s, v in found.items()}}
            for words, found in zip(grid, scores, strict=True)
        ]
        entry: dict[str, Any] = {"study": study.name, "recipe": study.recipe, "tried": tried}
        if common:
            means = [math.fsum(found[seed] for seed in common) / len(common) for found in scores]
            best = max(range(len(grid)), key=lambda i: -math.inf if math.isnan(means[i]) else means[i])
            entry |= {"chosen": list(grid[best]), "seeds": common, "at_the_edge": best in _edges(grid)}
        if any(scores):
            told[name] = entry
    if told:
        results.mkdir(parents=True, exist_ok=True)
        (results / FILE).write_text(json.dumps(told, indent=1, sort_keys=True) + "\n", encoding="utf-8")
        (results / "search.md").write_text(search_page(told), encoding="utf-8")
    return told


def _edges(grid: Sequence[tuple[str, ...]]) -> set[int]:
    """Settings with the lowest or the highest rate: what is best there may be better outside."""
    rates = [float(words[0].partition("=")[2]) for words in grid]
    return {i for i, rate in enumerate(rates) if rate in (min(rates), max(rates))}


def read(results: Path) -> dict[str, Any]:
    """What a search has found, by preset; {} without one."""
    path = results / FILE
    found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    return found


def chosen(results: Path, arm: Arm, recipe: str = RECIPE) -> tuple[str, ...]:
    """The words that the search found for the arm's preset; () if it was not searched."""
    entry = read(results).get(preset_of(arm), {})
    return tuple(entry.get("chosen", ())) if entry.get("recipe") == recipe else ()


def search_page(told: Mapping[str, Any]) -> str:
    """What was tried and found, as a page."""
    lines = [
        "# Search",
        "",
        "Made by `python -m learner.study NAME --search`; do not edit. Mean reward over all updates ",
    ]
    lines[-1] += "of runs on seeds of their own. A best setting at the edge of the rates is no optimum."
    for name, entry in sorted(told.items()):
        lines += ["", f"## {name}", "", "| setting | reward by seed | |", "|---|---|---|"]
        for one in entry["tried"]:
            rewards = ", ".join(f"{seed}: {value:.3f}" for seed, value in one["reward"].items()) or "not run"
            is_best = one["words"] == entry.get("chosen")
            mark = ("chosen, at the edge" if entry.get("at_the_edge") else "chosen") if is_best else ""
            lines.append(f"| `{' '.join(one['words'])}` | {rewards} | {mark} |")
    return "\n".join(lines) + "\n"
