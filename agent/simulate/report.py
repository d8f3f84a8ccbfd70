"""The figure and the table of a comparison, drawn from the CSV files alone."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from pathlib import Path

from agent.simulate.recovery import (
    BEFORE,
    SHARE,
    Interaction,
    by_step,
    interval,
    mean_reward,
    share_by_step,
    steps_to_recover,
)
from envs.style_shift.schedule import STYLES, Schedule

TITLES = {"sao": "SAO", "sao_running_mean": "running mean (128)"}
_COLOURS = {"academic": "tab:gray", "cute": "tab:pink", "chuunibyou": "tab:purple", "classical": "tab:green"}
_TRANSITION = 20  # steps that are shaded after a shift
_SMOOTH = 3

Results = Mapping[str, Mapping[int, Sequence[Interaction]]]
"""method -> seed -> interactions."""


def table(results: Results, schedule: Schedule, rates: Mapping[str, float]) -> str:
    """Markdown: for each method the steps to recover after each shift and the mean reward of each phase, with 95 %
    intervals over seeds; then the same for every seed.

    A shift that was not recovered from counts as the whole phase, and is counted in brackets.
    """
    bounds = _bounds(schedule)
    shifts = bounds[1:]
    head = ["method", "seeds", *(f"steps to {SHARE:.0%} after {a}" for a, _ in shifts)]
    head += [f"reward in {a}-{b - 1} ({schedule.at(a).style})" for a, b in bounds] + ["reward, all steps"]
    lines = [_row(head), _row(["---"] * len(head))]
    for method, runs in results.items():
        rate = f", lr {rates[method]:g}" if method in rates else ""
        cells = [TITLES.get(method, method) + rate, str(len(runs))]
        for shift, stop in shifts:
            recovered = [_recovered(run, shift, stop, schedule.steps) for run in runs.values()]
            text = _with_interval([float(stop - shift if n is None else n) for n in recovered], "{:.1f}")
            missed = sum(n is None for n in recovered)
            cells.append(text + (f" ({missed} never)" if missed else ""))
        for start, stop in [*bounds, (0, schedule.steps)]:
            cells.append(_with_interval([mean_reward(run, start, stop) for run in runs.values()], "{:.3f}"))
        lines.append(_row(cells))
    lines += ["", _row(["method", "seed", *head[2:]]), _row(["---"] * len(head))]
    for method, runs in results.items():
        for seed, run in sorted(runs.items()):
            cells = [TITLES.get(method, method), str(seed)]
            for shift, stop in shifts:
                steps = _recovered(run, shift, stop, schedule.steps)
                cells.append("never" if steps is None else str(steps))
            cells += [f"{mean_reward(run, start, stop):.3f}" for start, stop in [*bounds, (0, schedule.steps)]]
            lines.append(_row(cells))
    return "\n".join(lines) + "\n"


def rewards_table(interactions: Sequence[Interaction], steps: int, parts: int = 5) -> str:
    """Markdown: the mean reward of each fifth of the steps, for users that have no schedule."""
    bounds = [round(steps * part / parts) for part in range(parts + 1)]
    lines = [_row(["steps", "conversations", "reward"]), _row(["---"] * 3)]
    for start, stop in itertools.pairwise(bounds):
        count = sum(start <= i.step < stop for i in interactions)
        reward = mean_reward(interactions, start, stop)
        lines.append(_row([f"{start}-{stop - 1}", str(count), f"{reward:.3f}" if count else "none"]))
    return "\n".join(lines) + "\n"


def draw(results: Results, schedule: Schedule, target: Path) -> None:
    """Write the figure (PNG): style share by step for each method, and the reward by step of all methods.

    Lines are means over seeds, smoothed over three steps; the band of the reward is from the lowest to the highest
    seed. The steps after a shift are shaded.
    """
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    steps = schedule.steps
    figure, axes = plt.subplots(1, len(results) + 1, figsize=(5.2 * (len(results) + 1), 4), layout="constrained")
    for axis, (method, runs) in zip(axes[:-1], results.items(), strict=True):
        for style in STYLES:
            lines = [share_by_step(run, style, steps) for run in runs.values()]
            axis.plot(range(steps), _smooth(_mean(lines)), color=_COLOURS[style], label=style)
        axis.set_title(f"{TITLES.get(method, method)}: style share")
        axis.legend(fontsize=8, loc="center right")
    for (method, runs), colour in zip(results.items(), ("tab:blue", "tab:orange", "tab:red", "tab:cyan"), strict=False):
        curves = [_smooth(by_step(run, steps)) for run in runs.values()]
        axes[-1].plot(range(steps), _mean(curves), color=colour, label=f"{TITLES.get(method, method)} ({len(runs)})")
        if len(curves) > 1:
            low, high = _extremes(curves)
            axes[-1].fill_between(range(steps), low, high, color=colour, alpha=0.15, linewidth=0)
    axes[-1].set_title("reward")
    axes[-1].legend(fontsize=8, loc="lower right")
    for axis in axes:
        for shift in schedule.changes:
            axis.axvspan(shift, min(shift + _TRANSITION, steps), color="0.85", zorder=0)
        axis.set_xlabel("policy step")
        axis.set_xlim(0, max(steps - 1, 1))
        axis.set_ylim(-0.02, 1.02)
    part = target.with_name(f".{target.name}")
    figure.savefig(part, dpi=120, format="png")
    plt.close(figure)
    part.replace(target)


def _bounds(schedule: Schedule) -> list[tuple[int, int]]:
    """(first step, first step after it) of every stretch with one preferred style."""
    starts = [0, *(change for change in schedule.changes if change < schedule.steps)]
    return list(zip(starts, [*starts[1:], schedule.steps], strict=True))


def _recovered(run: Sequence[Interaction], shift: int, stop: int, steps: int) -> int | None:
    return steps_to_recover(by_step(run, steps), shift, stop, before=BEFORE)


def _with_interval(values: Sequence[float], form: str) -> str:
    mean, low, high = interval(values)
    if math.isnan(low):
        return form.format(mean)
    return f"{form} [{form}, {form}]".format(mean, low, high)


def _row(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def _mean(lines: Sequence[Sequence[float | None]]) -> list[float]:
    return [_average([v for v in column if v is not None and not math.isnan(v)]) for column in zip(*lines, strict=True)]


def _extremes(lines: Sequence[Sequence[float]]) -> tuple[list[float], list[float]]:
    columns = [[v for v in column if not math.isnan(v)] or [math.nan] for column in zip(*lines, strict=True)]
    return [min(column) for column in columns], [max(column) for column in columns]


def _smooth(line: Sequence[float | None]) -> list[float]:
    windows = (line[max(0, i - _SMOOTH + 1) : i + 1] for i in range(len(line)))
    return [_average([v for v in window if v is not None and not math.isnan(v)]) for window in windows]


def _average(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values) if values else math.nan
