"""The figures of an evaluation, from its samples. Pure functions; docs/evaluation.md says what each means."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal

import msgspec

from agent.episode import StopReason
from agent.estimates import bootstrap_interval, pass_at, passes, wilson_interval
from agent.evaluate.sample import Sample, Tokens

Method = Literal["Wilson over tasks", "bootstrap over tasks", "none"]


class Estimate(msgspec.Struct, frozen=True):
    """A mean over tasks with its 95 % interval. `low` and `high` are None where `method` is "none": one task, or
    tasks that all fare alike in something that is no share, say nothing of how tasks scatter."""

    mean: float
    low: float | None
    high: float | None
    method: Method
    tasks: int


class PassRate(msgspec.Struct, frozen=True):
    """pass@k over the tasks that have at least `k` samples."""

    k: int
    estimate: Estimate


class TaskFigures(msgspec.Struct, frozen=True):
    """One task. `samples` have a reward, `faults` none. `mean_reward` is None without samples."""

    task_id: str
    family: str
    samples: int
    passed: int
    mean_reward: float | None
    truncated: int
    faults: int
    turns: float
    tokens: int


class Summary(msgspec.Struct, frozen=True):
    """All of it. `wanted` samples were asked for, `samples` have a reward, `faults` ended without one.

    `reward` and `passes`: None and empty while no sample has a reward. `truncated`: how many samples by what cut them.
    Per-sample figures (`turns`, `seconds`) are means over samples with a reward; `tokens` are of all, faults included.
    `versions`: the oldest and newest policy version, where an engine tells them.
    """

    wanted: int
    samples: int
    faults: int
    tasks: int
    passes_at: float | None
    reward: Estimate | None
    passes: tuple[PassRate, ...]
    truncated: dict[str, int]
    turns: float
    seconds: float
    tokens: Tokens
    requests: int
    retries: int
    tokens_a_pass: float | None
    versions: tuple[int, int] | None
    families: tuple[tuple[str, Estimate], ...]
    by_task: tuple[TaskFigures, ...]
    fault_kinds: dict[str, int]


def passed(sample: Sample, passes_at: float | None) -> bool:
    """Whether a sample passes: with a reward of at least `passes_at`, or any above 0. A fault does not."""
    if sample.reward is None:
        return False
    return sample.reward > 0 if passes_at is None else sample.reward >= passes_at


def summarise(samples: Iterable[Sample], task_ids: Sequence[str], wanted: int, passes_at: float | None) -> Summary:
    """The figures of `samples`, of the tasks `task_ids`; others are left out. `wanted`: samples of each task."""
    by_task: dict[str, list[Sample]] = {task_id: [] for task_id in task_ids}
    for sample in samples:
        if sample.task_id in by_task and sample.number < wanted:
            by_task[sample.task_id].append(sample)
    everything = [sample for members in by_task.values() for sample in members]
    graded = {task: [s for s in members if s.reward is not None] for task, members in by_task.items()}
    sound = [sample for members in graded.values() for sample in members]
    faulty = [sample for sample in everything if sample.reward is None]
    tokens = sum((sample.tokens for sample in everything), Tokens())
    passes_in_all = sum(passed(sample, passes_at) for sample in sound)
    versions = [sample.versions for sample in sound if sample.versions is not None]
    return Summary(
        wanted=len(task_ids) * wanted,
        samples=len(sound),
        faults=len(faulty),
        tasks=len(task_ids),
        passes_at=passes_at,
        reward=_reward(graded.values()),
        passes=tuple(_pass_rates(graded.values(), wanted, lambda sample: passed(sample, passes_at))),
        truncated=dict(Counter(s.stop_reason.removeprefix("truncated_") for s in sound if truncated(s))),
        turns=_mean([sample.turns for sample in sound]),
        seconds=_mean([sample.seconds for sample in sound]),
        tokens=tokens,
        requests=sum(sample.requests for sample in everything),
        retries=sum(sample.retries for sample in everything),
        tokens_a_pass=(tokens.prompt + tokens.completion) / passes_in_all if passes_in_all else None,
        versions=(min(v[0] for v in versions), max(v[1] for v in versions)) if versions else None,
        families=_families(graded),
        by_task=tuple(_of_task(task, members, passes_at) for task, members in by_task.items()),
        fault_kinds=dict(Counter(sample.fault.partition(":")[0] for sample in faulty)),
    )


def truncated(sample: Sample) -> bool:
    """Whether something cut the episode before its own end."""
    return StopReason(sample.stop_reason).truncated


def _reward(tasks: Iterable[Sequence[Sample]]) -> Estimate | None:
    return estimate([[float(sample.reward or 0.0) for sample in members] for members in tasks if members])


def estimate(tasks: Sequence[Sequence[float]]) -> Estimate | None:
    """The mean over tasks of the mean over a task's samples, clustered by task; None without tasks.

    Shares (all values 0 or 1) with one sample a task, or whose tasks all fare alike, have Wilson's interval over the
    tasks; everything else the bootstrap over tasks.
    """
    if not tasks:
        return None
    means = [math.fsum(values) / len(values) for values in tasks]
    mean = math.fsum(means) / len(means)
    alike = len(set(means)) == 1
    shares = all(value in (0.0, 1.0) for values in tasks for value in values)
    if shares and (alike or all(len(values) == 1 for values in tasks)):
        return Estimate(mean, *wilson_interval(math.fsum(means), len(means)), "Wilson over tasks", len(means))
    if alike:
        return Estimate(mean, None, None, "none", len(means))
    return Estimate(mean, *bootstrap_interval(means), "bootstrap over tasks", len(means))


def _pass_rates(
    tasks: Iterable[Sequence[Sample]], wanted: int, passes_: Callable[[Sample], bool]
) -> Iterable[PassRate]:
    outcomes = [[passes_(sample) for sample in members] for members in tasks]
    for k in passes(wanted):
        enough = [one for one in outcomes if len(one) >= k]
        if k == 1:
            found = estimate([[float(outcome) for outcome in one] for one in enough])
        else:  # one estimate a task, itself between 0 and 1
            found = estimate([[pass_at(len(one), sum(one), k)] for one in enough])
        if found is not None:
            yield PassRate(k, found)


def _families(graded: dict[str, list[Sample]]) -> tuple[tuple[str, Estimate], ...]:
    """The mean reward of each family that the environment tells in its metrics; none where there is one only."""
    families: dict[str, list[list[float]]] = {}
    for members in graded.values():
        family = next((str(s.metrics["family"]) for s in members if "family" in s.metrics), None)
        if family is not None:
            families.setdefault(family, []).append([float(s.reward or 0.0) for s in members])
    if len(families) < 2:
        return ()
    found = ((name, estimate(tasks)) for name, tasks in sorted(families.items()))
    return tuple((name, one) for name, one in found if one is not None)


def _of_task(task_id: str, members: Sequence[Sample], passes_at: float | None) -> TaskFigures:
    sound = [sample for sample in members if sample.reward is not None]
    return TaskFigures(
        task_id=task_id,
        family=next((str(s.metrics["family"]) for s in sound if "family" in s.metrics), ""),
        samples=len(sound),
        passed=sum(passed(sample, passes_at) for sample in sound),
        mean_reward=_mean([float(s.reward or 0.0) for s in sound]) if sound else None,
        truncated=sum(truncated(sample) for sample in sound),
        faults=len(members) - len(sound),
        turns=_mean([sample.turns for sample in sound]),
        tokens=sum(sample.tokens.prompt + sample.tokens.completion for sample in members),
    )


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values) if values else 0.0


def plain(summary: Summary) -> dict[str, Any]:
    """The summary as plain data for JSON."""
    data: dict[str, Any] = msgspec.to_builtins(summary)
    return data
