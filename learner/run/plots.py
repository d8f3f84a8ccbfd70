"""The picture a run leaves: `curves.png`, drawn from `metrics.jsonl` alone."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

Panel = tuple[str, tuple[tuple[str, str], ...]]
"""A title, and lines: the figure and what it is called."""

PANELS: tuple[Panel, ...] = (
    ("Success", (("evaluation/success", "held out"), ("rollout/success", "training batch"))),
    ("Critic: explained variance", (("critic/explained_variance", "before the update"),)),
    ("Gated share of action tokens", (("gate/low_share", "below"), ("gate/high_share", "above"))),
    ("Policy lag (versions)", (("lag/mean", "mean"), ("lag/max", "max"))),
    ("Gradient norm", (("policy/gradient_norm", "policy"), ("critic/gradient_norm", "critic"))),
    ("Action tokens an episode", (("rollout/action_tokens", "mean"), ("rollout/action_tokens_p99", "p99"))),
)


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The records of a run in order of step; of a step that was done twice (a resumed run) the later one."""
    if not path.exists():
        return []
    records: dict[int, dict[str, Any]] = {}
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            record = json.loads(line)
        except json.JSONDecodeError:  # the last line of a killed run
            continue
        records[record["step"]] = records.get(record["step"], {}) | record
    return [records[step] for step in sorted(records)]


_OF_SET = re.compile(r"evaluation/(?:([^/]+)/)?(success|pass_at_\d+)$")
_OF_ENVIRONMENT = re.compile(r"rollout/([^/]+)/(success|reward|action_tokens)$")


def panels(names: Iterable[str]) -> list[Panel]:
    """The panels of a run that has figures of these names: evaluation sets, pass@k and environments have lines of their
    own where there are several."""
    sets: list[tuple[str, str]] = []
    more: dict[str, list[tuple[str, str]]] = {}
    for name in sorted(set(names)):
        if (found := _OF_SET.match(name)) and found[2] != "success":
            label = " ".join(filter(None, (found[1], found[2].replace("pass_at_", "pass@"))))
            more.setdefault("pass@k, held out", []).append((name, label))
        elif found and found[1]:
            sets.append((name, found[1]))
        elif found := _OF_ENVIRONMENT.match(name):
            title = {"success": "Success", "reward": "Reward", "action_tokens": "Action tokens an episode"}[found[2]]
            more.setdefault(f"{title}, by environment", []).append((name, found[1]))
    (title, lines), *others = PANELS
    held_out, batch = lines
    return [(title, (*(sets or [held_out]), batch)), *others, *((key, tuple(own)) for key, own in more.items())]


def draw_curves(metrics: Path, target: Path, title: str) -> None:
    """Draw the panels that have data into `target` (PNG). Any thread may: nothing of matplotlib's that all share is
    touched."""
    from matplotlib.figure import Figure

    records = read_metrics(metrics)
    drawn = panels(key for record in records for key in record)
    rows = -(-len(drawn) // 3)
    figure = Figure(figsize=(13, 3.25 * rows), layout="constrained")
    axes = figure.subplots(rows, 3, squeeze=False)
    for axis in axes.flat[len(drawn) :]:
        axis.set_visible(False)
    for axis, (name, lines) in zip(axes.flat, drawn, strict=False):
        for (key, label), style in zip(lines, itertools.cycle(("-", "--")), strict=False):
            points = [(r["step"], r[key]) for r in records if r.get(key) is not None]
            if points:
                axis.plot(*zip(*points, strict=True), style, label=label, marker="o" if len(points) < 20 else None)
        axis.set_title(name)
        axis.set_xlabel("policy updates")
        axis.grid(alpha=0.3)
        if axis.lines:
            axis.legend(frameon=False)
    axes.flat[0].set_ylim(0, 1.02)
    figure.suptitle(title)
    figure.savefig(target, dpi=120)
