"""The picture a run leaves: `curves.png`, drawn from `metrics.jsonl` alone."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

PANELS: tuple[tuple[str, tuple[tuple[str, str], ...]], ...] = (
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


def draw_curves(metrics: Path, target: Path, title: str) -> None:
    """Draw the panels that have data into `target` (PNG)."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    records = read_metrics(metrics)
    figure, axes = plt.subplots(2, 3, figsize=(13, 6.5), layout="constrained")
    for axis, (name, lines) in zip(axes.flat, PANELS, strict=True):
        for (key, label), style in zip(lines, ("-", "--"), strict=False):
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
    plt.close(figure)
