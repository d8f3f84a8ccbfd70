"""What a schedule costs when episode times are heavy-tailed: barrier, asynchronous groups, stream.

    python benchmarks/schedules.py                                  # about 4 minutes
    python benchmarks/schedules.py --quick                          # about 25 seconds, rough
    python benchmarks/schedules.py --sweep --json sweep.json        # staleness budgets 1, 2, 4, 8
    python benchmarks/schedules.py --plot occupancy.png --slots 64

The ledger of work is the real one: an episode store in a process of its own, reached over HTTP, every delivery synced
to the disk before it is acknowledged, and tickets leased as the runtime leases them. What is stood in for is the
model. An episode occupies its slot for a time drawn from a lognormal distribution; a learner's step takes a fixed
time. Only the rules of the store differ between the schedules:

    barrier   128 prompts x 1, max_lag=0: nothing is issued until the batch before it is trained and published
    groups    16 prompts x 8: a group can be claimed only when its slowest member is there
    stream    128 prompts x 1: every episode can be claimed once it is on the disk

A duration is a function of the seed that the store deals with the ticket, so all schedules meet the same times.
"""

from __future__ import annotations

import argparse
import asyncio
import math
import statistics
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.report import save_json, show
from benchmarks.schedule_run import Load, Record, Schedule, run_schedule

SWEPT = (1, 2, 4, 8)


def analyse(load: Load, schedule: Schedule, record: Record) -> dict[str, Any]:
    """Figures between the first publication after the warm-up and the last one, so that whole batches are counted.

    A barrier needs no warm-up: each of its batches begins with nothing under way, the first one too.
    """
    start_of_run = min(begun for begun, _ in record.work)
    begins = [s.published_at for s in record.steps if s.published_at >= start_of_run + load.warmup_s]
    begin = start_of_run if schedule.max_lag == 0 else min(begins, default=math.inf)
    counted = [step for step in record.steps if step.published_at > begin]
    if not counted:
        raise SystemExit(f"{schedule.name}: no batch was trained in the counted time: raise --seconds or lower --scale")
    end = counted[-1].published_at
    waits = [wait for step in counted for wait in waits_of(schedule, step.episodes, record)]
    lags = [lag for step in counted for lag in step.lags]
    return {
        "schedule": schedule.name,
        "group_size": schedule.group_size,
        "max_lag": schedule.max_lag,
        "order": schedule.order,
        "busy_share": share(record.work, begin, end) / load.slots,
        "no_ticket_share": share(record.waiting, begin, end) / load.slots,
        "delivering_share": share(record.delivering, begin, end) / load.slots,
        "wait_p50_s": quantile(waits, 0.5),
        "wait_p99_s": quantile(waits, 0.99),
        "lag_mean": statistics.fmean(lags),
        "lag_max": max(lags),
        "token_lag_mean": statistics.fmean(step.token_lag for step in counted),
        "prompts_per_batch": statistics.fmean(step.prompts for step in counted),
        "batches": len(counted),
        "batches_per_hour": 3600 * len(counted) / (end - begin),
        "learner_busy_share": share(record.training, begin, end),
        "counted_s": end - begin,
    }


def waits_of(schedule: Schedule, episodes: Sequence[str], record: Record) -> list[float]:
    """Seconds from the end of each episode of a batch to the moment from which it could have been claimed.

    That is when the last of those it must wait for is on the disk: its group's members, or, with a budget of 0, the
    whole batch.
    """
    if schedule.max_lag == 0:
        last = max(record.on_disk[name] for name in episodes)
        return [last - record.finished[name] for name in episodes]
    members = ((name, record.groups[record.group_of[name]]) for name in episodes)
    return [max(record.on_disk[m] for m in group) - record.finished[name] for name, group in members]


def share(intervals: Sequence[tuple[float, float]], begin: float, end: float) -> float:
    """The summed length of `intervals` inside [begin, end], over end - begin."""
    return sum(max(0.0, min(b, end) - max(a, begin)) for a, b in intervals) / (end - begin)


def quantile(values: Sequence[float], q: float) -> float:
    """The nearest-rank quantile."""
    ranked = sorted(values)
    return ranked[max(0, math.ceil(q * len(ranked)) - 1)]


def occupancy(intervals: Sequence[tuple[float, float]], slots: int, bins: int = 400) -> tuple[list[float], list[float]]:
    """(seconds since the first interval's begin, share of `slots` that worked) in `bins` equal steps."""
    start, end = min(a for a, _ in intervals), max(b for _, b in intervals)
    width = (end - start) / bins
    filled = [0.0] * bins
    for a, b in intervals:
        first, last = int((a - start) / width), min(bins - 1, int((b - start) / width))
        for i in range(first, last + 1):
            filled[i] += max(0.0, min(b, start + (i + 1) * width) - max(a, start + i * width))
    return [(i + 0.5) * width for i in range(bins)], [value / (width * slots) for value in filled]


def plot(path: Path, load: Load, runs: Sequence[tuple[dict[str, Any], Record]]) -> None:
    """Draw the slots' occupancy over time, one panel a schedule."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(
        len(runs), 1, figsize=(11, 2.1 * len(runs) + 0.6), sharex=True, sharey=True, squeeze=False, layout="constrained"
    )
    for axis, (figures, record) in zip(axes[:, 0], runs, strict=True):
        times, filled = occupancy(record.work, load.slots)
        axis.fill_between(times, filled, step="mid", alpha=0.65, linewidth=0)
        start = min(a for a, _ in record.work)
        for step in record.steps if len(record.steps) <= 100 else ():
            axis.axvline(step.published_at - start, color="black", linewidth=0.6, alpha=0.6)
        axis.set_title(
            f"{label(figures)}: {figures['busy_share']:.1%} busy, {figures['batches_per_hour']:,.0f} batches/hour",
            loc="left",
            fontsize=10,
        )
        axis.set_ylim(0, 1.02)
        axis.set_ylabel("slots working")
        axis.yaxis.set_major_formatter(matplotlib.ticker.PercentFormatter(1.0))
    axes[-1, 0].set_xlabel(
        f"seconds (median episode {load.scale_s:g} s, p99/p50 = {load.tail:g}, {load.slots} slots); "
        "lines: a version is published"
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
    plt.close(figure)


def label(figures: dict[str, Any]) -> str:
    """`stream 128 x 1` and the like."""
    prompts = figures["batch_size"] // figures["group_size"]
    return f"{figures['schedule']} {prompts} x {figures['group_size']}"


COLUMNS = (
    *("schedule", "max_lag", "slots\nbusy", "no\nticket", "deliv-\nering", "wait to trainable\np50, p99 (s)"),
    *("lag at claim\nmean, max", "token\nlag", "prompts\na batch", "batches an hour\n(counted)", "learner\nbusy"),
)


def cells(figures: dict[str, Any]) -> list[str]:
    """One row of the table."""
    return [
        label(figures),
        str(figures["max_lag"]),
        *(f"{figures[key]:.1%}" for key in ("busy_share", "no_ticket_share", "delivering_share")),
        f"{figures['wait_p50_s']:.3f}, {figures['wait_p99_s']:.3f}",
        f"{figures['lag_mean']:.2f}, {figures['lag_max']}",
        f"{figures['token_lag_mean']:.2f}",
        f"{figures['prompts_per_batch']:.1f}",
        f"{figures['batches_per_hour']:,.0f} ({figures['batches']})",
        f"{figures['learner_busy_share']:.0%}",
    ]


def notes(load: Load) -> list[str]:
    """What the columns mean, and what the figures can and cannot say."""
    return [
        f"{load.slots} slots; episodes of p50 {load.scale_s:g} s, mean {load.mean_s:.2f} s, p99 "
        f"{load.scale_s * load.tail:g} s (lognormal); a learner's step takes {load.train_s:g} s, full slots make a "
        f"batch in {load.batch * load.mean_s / load.slots:.2f} s; seed {load.seed}.",
        "max_lag: the staleness budget. batch x (max_lag + 1) episodes may be issued and not yet trained; with less "
        "the slots get no tickets.",
        "slots busy, no ticket, delivering: shares of slot time. Busy is inside an episode; no ticket: the store deals "
        "nothing (budget, barrier) or is being asked; delivering: HTTP and fsync, up to the acknowledgement. The last "
        "two do not shrink with the scaled episodes: at real lengths their few milliseconds vanish.",
        "wait to trainable: from the end of an episode to when it could be claimed: it is on the disk, and so are the "
        "others of its group (groups) or of its batch (barrier). Waiting for its turn (--order window) is not in it.",
        "lag at claim: the learner's version minus the version of an episode's oldest token; above max_lag where an "
        "episode runs while many batches pass. token lag: mean over all tokens. Episodes longer than the run are "
        "missing, so the maximum is a lower bound.",
        "prompts a batch: distinct ones. batches an hour: of this scaled time; compare the rows. learner busy: near "
        "100 % means that the learner holds the slots back, not the schedule.",
        "Slots do not slow each other down here; in an engine the last ones of a barrier run somewhat faster.",
    ]


def main() -> None:
    """Parse the command line and run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--slots", type=int, default=128, help="episodes at once (default 128)")
    parser.add_argument("--batch", type=int, default=128, help="episodes a learner step (a multiple of 8)")
    parser.add_argument("--scale", type=float, default=0.4, help="seconds of the median episode (default 0.4)")
    parser.add_argument("--tail", type=float, default=30.0, help="p99 over p50 of the episode times (default 30)")
    parser.add_argument("--train", type=float, default=1.5, help="a learner's step, in median episodes (default 1.5)")
    parser.add_argument("--max-lag", type=int, default=4, help="budget of groups and stream (default 4, as in recipes)")
    parser.add_argument("--order", choices=("completion", "window"), default="completion", help="claims of the stream")
    parser.add_argument("--seconds", type=float, help="a schedule's run, warm-up included (default 70; --sweep 25)")
    parser.add_argument("--batches", type=int, help="stop a schedule earlier, after so many counted batches")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--quick", action="store_true", help="7 s a schedule; slots, batch, times: a quarter")
    parser.add_argument("--sweep", action="store_true", help=f"budgets {SWEPT} for stream and groups, 25 s each")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="PNG of the slots' occupancy over time")
    parser.add_argument("--json", type=Path, metavar="FILE")
    given = parser.parse_args()
    if given.batch < 16 or given.batch % 8:
        parser.error("--batch must be a multiple of 8, at least 16: the groups have 8 members")
    seconds = given.seconds or (7.0 if given.quick else 25.0 if given.sweep else 70.0)
    slots, scale = (given.slots // 4, given.scale / 4) if given.quick else (given.slots, given.scale)
    load = Load(
        slots=slots,
        batch=given.batch // 4 // 8 * 8 if given.quick else given.batch,
        scale_s=scale,
        tail=given.tail,
        train_s=given.train * scale,
        seconds=seconds,
        warmup_s=0.12 * seconds,
        batches=given.batches,
        seed=given.seed,
    )
    if given.sweep:
        chosen = [Schedule("stream", 1, lag, given.order) for lag in SWEPT]
        chosen += [Schedule("groups", 8, lag) for lag in SWEPT]
    else:
        chosen = [
            Schedule("barrier", 1, 0),
            Schedule("groups", 8, given.max_lag),
            Schedule("stream", 1, given.max_lag, given.order),
        ]
    runs = []
    for schedule in chosen:
        print(f"{schedule.name}, max_lag {schedule.max_lag}: up to {load.seconds:g} s", file=sys.stderr, flush=True)
        record = asyncio.run(run_schedule(load, schedule))
        runs.append(({"batch_size": load.batch} | analyse(load, schedule, record), record))
    show("Schedules under heavy-tailed episode times", COLUMNS, [cells(f) for f, _ in runs], notes(load))
    save_json(given.json, {"load": asdict(load), "schedules": [figures for figures, _ in runs]})
    if given.plot is not None:
        plot(given.plot, load, runs)
        print(f"drawn: {given.plot}", file=sys.stderr)


if __name__ == "__main__":
    main()
