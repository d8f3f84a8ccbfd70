"""The benchmarks of schedules and of the learner's step run as their documentation says, and their arithmetic holds."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks import schedules
from benchmarks.schedule_run import Load, Record, Schedule

ROOT = Path(__file__).resolve().parents[2]


def run(script: str, *options: str, target: Path) -> tuple[dict[str, Any], str]:
    """The figures and the output of a benchmark that is run as a script."""
    process = subprocess.run(
        [sys.executable, f"benchmarks/{script}", *options, "--json", str(target)],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert process.returncode == 0, process.stderr
    return json.loads(target.read_text()), process.stdout


def test_schedules_are_told_apart_by_what_they_wait_for(tmp_path: Path) -> None:
    load = ("--slots", "16", "--batch", "16", "--scale", "0.02", "--train", "1", "--seconds", "1.2")
    picture = tmp_path / "occupancy.png"
    report, output = run("schedules.py", *load, "--plot", str(picture), target=tmp_path / "figures.json")
    barrier, groups, stream = report["schedules"]
    assert barrier["lag_max"] == 0 == barrier["token_lag_mean"]  # on-policy is what the barrier pays for
    assert barrier["prompts_per_batch"] == stream["prompts_per_batch"] == 16
    assert groups["prompts_per_batch"] == 2
    assert stream["lag_max"] >= 1  # it is asynchronous
    for row in report["schedules"]:
        idle = row["no_ticket_share"] + row["delivering_share"]
        assert row["busy_share"] + idle == pytest.approx(1.0, abs=0.05)  # no slot time is unaccounted for
    assert "stream 16 x 1" in output
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_episode_times_have_the_tail_they_claim() -> None:
    load = Load(scale_s=0.2, tail=30.0)
    times = [load.duration(seed) for seed in range(40_000)]
    ratio = schedules.quantile(times, 0.99) / schedules.quantile(times, 0.5)
    assert ratio == pytest.approx(30.0, rel=0.1)
    assert statistics.fmean(times) == pytest.approx(load.mean_s, rel=0.1)


def test_share_and_occupancy_count_only_what_lies_inside() -> None:
    work = [(0.0, 4.0), (2.0, 10.0)]
    assert schedules.share(work, 1.0, 3.0) == pytest.approx((2.0 + 1.0) / 2.0)
    times, filled = schedules.occupancy(work, slots=2, bins=10)
    assert times[0] == pytest.approx(0.5)
    assert filled == pytest.approx([0.5, 0.5, 1.0, 1.0, 0.5, 0.5, 0.5, 0.5, 0.5, 0.5])


@pytest.mark.parametrize(
    ("schedule", "expected"),
    [
        (Schedule("stream", 1, 4), [0.5, 0.5, 0.5]),
        (Schedule("groups", 8, 4), [9.5, 0.5, 0.5]),  # a waits for b, which ran until 10
        (Schedule("barrier", 1, 0), [19.5, 10.5, 0.5]),
    ],
    ids=lambda value: getattr(value, "name", ""),
)
def test_episode_waits_for_those_it_must_be_claimed_with(schedule: Schedule, expected: list[float]) -> None:
    finished = {"a": 1.0, "b": 10.0, "c": 20.0}
    group_of = {"a": "ab", "b": "ab", "c": "c"} if schedule.group_size > 1 else {name: name for name in finished}
    groups: dict[str, list[str]] = {}
    for name, group in group_of.items():
        groups.setdefault(group, []).append(name)
    on_disk = {name: moment + 0.5 for name, moment in finished.items()}
    record = Record(finished=finished, on_disk=on_disk, groups=groups, group_of=group_of)
    assert schedules.waits_of(schedule, ["a", "b", "c"], record) == expected


def test_learner_step_accounts_for_all_of_its_time(tmp_path: Path) -> None:
    options = ("--models", "tiny", "--lengths", "64", "--tokens", "512", "--steps", "1")
    report, output = run("learner_step.py", *options, target=tmp_path / "figures.json")
    [row] = report["rows"]
    shares = row["phase_share"]
    assert set(shares) == {"batch", "critic", "values", "advantages", "policy", "rest"}
    assert sum(shares.values()) == pytest.approx(1.0)
    assert min(shares[name] for name in ("critic", "values", "policy")) > 0.0
    assert shares["critic"] > shares["values"]  # two forwards and backwards against one forward
    assert row["critic_updates"] == 2
    assert row["padding_share"] <= 0.05
    assert row["gated_share"] < 0.1  # else the policy's backward pass would be half empty
    assert row["peak_mib"] >= row["standing_mib"] * 0.9
    assert "tokens/s" in output


@pytest.mark.parametrize("script", ["schedules.py", "learner_step.py"])
def test_wrong_options_are_refused_with_a_sentence(script: str) -> None:
    options = ["--batch", "12"] if script == "schedules.py" else ["--lengths", "4"]
    process = subprocess.run(
        [sys.executable, f"benchmarks/{script}", *options], cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    assert process.returncode == 2
    assert options[0] in process.stderr


@pytest.mark.slow
@pytest.mark.timeout(180)
def test_the_projects_half_of_the_comparison_with_peers_runs_alone(tmp_path: Path) -> None:
    words = ("--models", "moe", "--batches", "short", "--rounds", "1")
    report, output = run("peers/learner.py", *words, target=tmp_path / "figures.json")
    [step] = report["steps"]
    assert step["answers"][0]["gated"] == 0.0  # or the losses would not have one gradient
    assert step["answers"][0]["padding"] <= 0.05
    assert "moe, short: project" in output


def test_what_a_record_costs_is_measured_as_the_page_says(tmp_path: Path) -> None:
    words = ("--quick", "--scratch", str(tmp_path))
    report, output = run("peers/records.py", *words, target=tmp_path / "figures.json")
    [record], [store] = report["records"], report["stores"]
    assert record["disk_bytes_bare"] < 6.0, "4 bytes a token, 8 a sampled one"
    assert record["disk_bytes"] < 8.0 < record["wire_bytes"]
    assert store["tokens"] == 16 * 2048
    assert "16 x 2,048" in output


def test_the_cost_of_a_turn_runs_without_the_others(tmp_path: Path) -> None:
    words = ("--concurrency", "4", "--episodes", "8", "--rounds", "1", "--long-turns", "6")
    report, output = run("peers/rollouts.py", *words, target=tmp_path / "figures.json")
    assert [(row["length"], row["who"].split(", ")[0]) for row in report["rollouts"]] == [
        ("short", "project"),
        ("short", "project"),
        ("long", "project"),
        ("long", "project"),
    ]
    for row in report["rollouts"]:
        [found] = row["answers"]
        assert found["turns"] == row["turns"] * row["episodes"], "every episode has had all of its turns"
        assert found["cpu_s"] > 0.0
    in_process, over_http = (row["answers"][0]["tokens"] for row in report["rollouts"][:2])
    assert in_process == over_http
    assert "project, HTTP" in output


def test_pauses_of_the_loop_are_measured_as_the_page_says(tmp_path: Path) -> None:
    words = ("--concurrency", "20", "--think", "0.1", "--turns", "2")
    report, output = run("peers/pauses.py", *words, target=tmp_path / "figures.json")
    assert report["pauses"]["turns"] == 40
    assert 0.0 < report["pauses"]["callback_ms"] < 10_000
    assert "longest callback" in output.replace("\n", " ")
