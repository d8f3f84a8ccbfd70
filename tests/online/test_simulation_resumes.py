"""The simulation as a real process, with servers and learners of its own: killed in the middle, it loses one run."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from online_tools import ROOT, until, write_recipe

from agent.simulate.recovery import Interaction
from agent.simulate.runs import Run, best_rate, read_csv, write_csv

pytestmark = [pytest.mark.timeout(900), pytest.mark.xdist_group("online")]


def simulate(recipe: Path, out: Path) -> subprocess.Popen[bytes]:
    with out.with_name("simulate.out").open("ab") as output:
        words = ["--out", str(out), "--users", "4", "--patience", "240"]
        return subprocess.Popen(
            [sys.executable, "-m", "agent.simulate", str(recipe), *words],
            cwd=ROOT,
            stdout=output,
            stderr=output,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )


@pytest.mark.slow
def test_a_killed_simulation_keeps_finished_runs_and_leaves_no_process(tmp_path: Path) -> None:
    recipe, out = write_recipe(tmp_path), tmp_path / "out"
    start = out / "runs" / "start"
    start.mkdir(parents=True)
    shutil.copytree(tmp_path / "model", start / "sft")  # stands for a cold start that was done
    first, second = (Run(method, 0, 1e-3).path(out) for method in ("sao", "sao_running_mean"))

    process = simulate(recipe, out)

    def said() -> str:
        logs = [out.with_name("simulate.out"), *out.glob("runs/*/*.log")]
        return "\n".join(path.read_text(errors="replace")[-1500:] for path in logs)

    until(first.exists, said, process)
    until(
        lambda: any("ready: " in log.read_text() for log in out.glob("runs/sao_running_mean*/server.log")),
        said,
        process,
    )
    family = psutil.Process(process.pid).children(recursive=True)
    process.send_signal(signal.SIGKILL)
    process.wait()
    until(lambda: not any(child.is_running() and child.status() != psutil.STATUS_ZOMBIE for child in family), said)
    assert not second.exists()
    kept = first.stat()

    process = simulate(recipe, out)
    until(lambda: process.poll() is not None, said)
    assert process.returncode == 0, said()
    assert (first.stat().st_ino, first.stat().st_mtime_ns) == (kept.st_ino, kept.st_mtime_ns)
    for path in (first, second):
        found = read_csv(path)
        assert {i.step for i in found} >= {0, 1, 2, 3}
        # What users prefer follows the schedule by the policy's step, and nobody runs ahead of it.
        assert all(i.target == ("cute" if i.step < 2 else "classical") for i in found)
        assert all(i.index // 4 - 1 <= i.step for i in found)
        assert [i.index for i in found] == sorted({i.index for i in found})
        # The same prompts for both methods.
    tasks = [{i.index: i.task_id for i in read_csv(path)} for path in (first, second)]
    assert all(tasks[0][index] == tasks[1][index] for index in tasks[0].keys() & tasks[1].keys())
    assert "running mean" in (out / "style_shift.md").read_text()
    assert (out / "style_shift.png").stat().st_size > 10_000


def test_a_run_survives_its_file(tmp_path: Path) -> None:
    one = Interaction(0, 3, 2, "tiny/1", "cute", "classical", 1, 0.0, 0.25)
    write_csv(tmp_path / "a.csv", [one])
    assert read_csv(tmp_path / "a.csv") == [one]
    (tmp_path / "b.csv").write_text("index,step\n1,2\n")
    with pytest.raises(ValueError, match="no CSV of a simulated run"):
        read_csv(tmp_path / "b.csv")


def test_a_search_that_is_not_finished_chooses_nothing(tmp_path: Path) -> None:
    def finished(lr: float, reward: float) -> None:
        write_csv(Run("sao", 7, lr).path(tmp_path), [Interaction(0, 0, 0, "t", "cute", "cute", 1, reward, 0.1)])

    finished(1e-3, 0.25)
    assert best_rate(tmp_path, "sao", 7, (1e-3, 2e-3), 10) is None
    finished(2e-3, 0.75)
    assert best_rate(tmp_path, "sao", 7, (1e-3, 2e-3), 10) == 2e-3
