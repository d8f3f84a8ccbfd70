"""Runs of a study: made once, stopped in order, taken up again, and one that fails does not keep the others."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Any

import pytest
from study_tools import STUDY, calls_of, fake_python

from learner.study.__main__ import jobs_of
from learner.study.arms import Job
from learner.study.record import read_record, record_path, rows_of, write_record
from learner.study.running import Runner


def runner(folder: Path, **keys: object) -> Runner:
    return Runner(folder / "results", folder / "runs", python=fake_python(folder), **keys)  # type: ignore[arg-type]


def jobs(folder: Path, seeds: int = 2) -> list[Job]:
    return jobs_of(STUDY, range(seeds), STUDY.updates, folder / "results")


def test_every_arm_starts_from_the_cold_start_of_its_seed_which_is_made_once(tmp_path: Path) -> None:
    asyncio.run(runner(tmp_path, parallel=4).run(jobs(tmp_path)))
    calls = calls_of(tmp_path)
    assert calls.count("learner.sft") == 2
    assert calls.count("learner.pretrain_value") == 2  # of SAO; GRPO has no critic
    assert calls.count("learner.train") == 4
    record = read_record(record_path(tmp_path / "results" / "main", "grpo", 1))
    assert record.column("reward") == [(step, pytest.approx(step / 10)) for step in range(1, 6)]
    assert "learner.algorithm=grpo" in record.facts["command"]
    assert "cores" in record.facts["machine"]
    assert not [path for path in (tmp_path / "runs" / "main").iterdir()]


def test_a_finished_run_is_never_made_again(tmp_path: Path) -> None:
    first = runner(tmp_path)
    asyncio.run(first.run(jobs(tmp_path, 1)))
    before = calls_of(tmp_path)
    asyncio.run(runner(tmp_path).run(jobs(tmp_path, 1)))
    assert calls_of(tmp_path) == before
    assert first.missing(jobs(tmp_path)) == [job for job in jobs(tmp_path) if job.seed == 1]


def test_a_longer_run_replaces_a_shorter_one(tmp_path: Path) -> None:
    short, long = (Job(STUDY, STUDY.arms[1], 0, updates) for updates in (2, 4))
    asyncio.run(runner(tmp_path).run([short]))
    assert runner(tmp_path).missing([short, long]) == [long]
    asyncio.run(runner(tmp_path).run([long]))
    assert runner(tmp_path).missing([short, long]) == []
    assert len(read_record(runner(tmp_path).path(long)).rows) == 4


def test_a_budget_that_is_used_up_leaves_no_half_a_csv_and_the_next_call_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAKE_STEP_S", "0.4")
    stopped = runner(tmp_path, deadline=time.monotonic() + 3600)
    seen: list[int] = []

    def moved(name: str, done: int) -> None:
        if name == "sao-seed0" and done >= 1 and not seen:
            seen.append(done)
            stopped.deadline = time.monotonic()

    stopped.watch.moved = moved
    asyncio.run(stopped.run(jobs(tmp_path, 1)))
    assert stopped.unfinished == ["sao-seed0", "grpo-seed0"]
    assert not list((tmp_path / "results").rglob("*.csv"))
    monkeypatch.setenv("FAKE_STEP_S", "0")
    asyncio.run(runner(tmp_path).run(jobs(tmp_path, 1)))
    record = read_record(record_path(tmp_path / "results" / "main", "sao", 0))
    assert [row["step"] for row in record.rows] == [1, 2, 3, 4, 5]  # one line an update, across both calls
    assert calls_of(tmp_path).count("learner.sft") == 1


def test_a_run_that_fails_is_named_and_the_others_go_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAKE_FAILS", "sao")
    found = runner(tmp_path)
    asyncio.run(found.run(jobs(tmp_path, 1)))
    assert list(found.failed) == ["sao-seed0"]
    assert "it broke" in found.failed["sao-seed0"]
    assert record_path(tmp_path / "results" / "main", "grpo", 0).is_file()


def test_other_words_do_not_go_on_in_the_folder_of_a_run(tmp_path: Path) -> None:
    one, other = (Job(STUDY, STUDY.arms[0], 0, 5, more=more) for more in ((), ("learner.policy.lr=1e-3",)))
    assert runner(tmp_path).folder(one) != runner(tmp_path).folder(other)


def test_a_record_reads_back_as_it_was_written_gaps_too(tmp_path: Path) -> None:
    lines: list[dict[str, Any]] = [
        {"step": 0, "evaluation/success": 0.25},
        {"step": 1, "rollout/reward": 0.5, "critic/explained_variance": None},
        {"step": 2, "rollout/reward": 0.75, "critic/explained_variance": 0.123456789, "evaluation/success": 0.5},
    ]
    path = record_path(tmp_path, "dis-lag4", 7)
    write_record(path, rows_of(lines), {"command": "a  b\n: c"})
    record = read_record(path)
    assert (record.arm, record.seed, record.facts) == ("dis-lag4", 7, {"command": "a b : c"})
    assert record.column("held_out") == [(0, 0.25), (2, 0.5)]
    assert record.column("explained_variance") == [(2, 0.123457)]
    assert [path.name for path in tmp_path.iterdir()] == ["dis-lag4-seed7.csv"]
