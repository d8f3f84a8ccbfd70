"""A run goes on through the deaths of its engine. The engine is a parameter: `kill_run` takes the recipe's words."""

from __future__ import annotations

import contextlib
import signal
import sqlite3
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
from run_tools import TrainCommand, last_step, metrics, training, write_run

from learner.run.checkpoint import checkpoints, load_progress

STEPS, BATCH, KILLS = 8, 8, 3
SERVERS = {"local": "agent.engines.local", "vllm": "vllm.entrypoints.cli.main"}


def engine_of(command: TrainCommand, module: str) -> psutil.Process | None:
    """The engine that is alive now, if one is."""
    for process in psutil.Process(command.process.pid).children():
        with contextlib.suppress(psutil.NoSuchProcess):
            if module in process.cmdline() and process.status() != psutil.STATUS_ZOMBIE:
                return process
    return None


def kill_run(folder: Path, *words: str, launch: str = "local", within_s: float = 120.0) -> tuple[TrainCommand, Path]:
    """A run of 8 steps with an engine of kind `launch` that is killed three times; the ended command, its folder."""
    recipe = write_run(folder, steps=STEPS)
    run = folder / "runs" / "micro"
    words = ("value_pretraining=null", "evaluation.tasks=4", f"engine.launch={launch}", *words)
    with training(str(recipe), *words, output=folder / "said.log") as command:
        killed: set[int] = set()
        for kill in range(KILLS):
            command.wait_for(lambda least=1 + 2 * kill: last_step(run) >= least, within_s=within_s)
            found: list[psutil.Process] = []

            def another(found: list[psutil.Process] = found, first: bool = kill == 0) -> bool:
                # The first death hits episodes that are under way; the later ones come when they come.
                if first and not rows(run, "SELECT 1 FROM tickets WHERE status = 'leased' LIMIT 1"):
                    return False
                engine = engine_of(command, SERVERS[launch])
                if engine is not None and engine.pid not in killed:
                    found.append(engine)
                return bool(found)

            command.wait_for(another, within_s=within_s)
            killed.add(found[0].pid)
            found[0].send_signal(signal.SIGKILL)
        assert command.end(within_s=within_s) == 0, command.said[-4000:]
        assert command.survivors() == []
    return command, run


def rows(run: Path, query: str) -> list[tuple[Any, ...]]:
    with sqlite3.connect(f"file:{run / 'episodes.sqlite'}?mode=ro", uri=True) as sql:
        return sql.execute(query).fetchall()


def check_nothing_lost(command: TrainCommand, run: Path) -> None:
    """Every batch was trained, no episode twice, and none failed for want of an engine."""
    progress = load_progress(checkpoints(run / "checkpoints")[-1])
    assert (progress.step, progress.episodes) == (STEPS, STEPS * BATCH)
    committed = rows(
        run,
        "SELECT m.episode, COUNT(*) FROM claim_members m JOIN claims c ON c.id = m.claim "
        "WHERE c.status = 'committed' GROUP BY m.episode",
    )
    assert len(committed) == STEPS * BATCH
    assert {count for _, count in committed} == {1}
    last = [record for record in metrics(run) if record["step"] == STEPS][-1]
    assert last["count/retried"] == 0
    assert last["count/given_up"] == 0
    assert command.said.count("starting the engine again with version") == KILLS


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_an_engine_killed_three_times_costs_no_episode_and_none_is_trained_twice(tmp_path: Path) -> None:
    """Case D3, and D2: the run ends with as many trained episodes as one in which nobody died."""
    started = time.monotonic()
    command, run = kill_run(tmp_path)
    check_nothing_lost(command, run)
    # Episodes that were under way went on: their requests failed, they did not.
    with_faults = (run / "runtime.log").read_text().count("a request failed, and will be made again")
    assert with_faults > 0, f"no request was in flight at any of the deaths ({time.monotonic() - started:.0f} s)"
