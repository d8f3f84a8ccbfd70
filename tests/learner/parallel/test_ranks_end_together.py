"""A rank that fails or is killed ends the others at once, with its error, long before a collective's limit."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import ending_ranks
import pytest
from run_tools import ROOT

LIMIT_S = 90.0  # for seven pairs at once on a busy machine; a collective would have waited 600 s


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What became of the ranks of every case: their exit codes, and what they said."""
    folder = tmp_path_factory.mktemp("ends")
    words = [sys.executable, str(Path(ending_ranks.__file__)), str(folder), str(LIMIT_S)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    subprocess.run(words, env=environment, check=True, timeout=LIMIT_S + 60, cwd=ROOT)
    return folder


def found(folder: Path, case: str) -> tuple[list[int | None], list[str]]:
    codes = json.loads((folder / "codes.json").read_text())[case]
    return codes, [(folder / f"{case}_{rank}.txt").read_text() for rank in range(2)]


@pytest.mark.timeout(200)
@pytest.mark.parametrize(
    ("case", "reason"), [("main_in_step", "no room for 7 GiB"), ("main_between", "nothing to publish")]
)
def test_a_main_rank_that_raises_ends_the_others_with_its_error(ended: Path, case: str, reason: str) -> None:
    """Case N3: the other waits in a collective of the step, or for the next call."""
    codes, said = found(ended, case)
    assert codes == [1, 1], said
    assert reason in said[0]
    assert f"rank 0 failed: {'OutOfMemoryError: ' if 'room' in reason else 'ValueError: '}{reason}" in said[1]
    assert "Traceback" not in said[1]
    assert (ended / f"{case}_taken_down").exists()


@pytest.mark.timeout(200)
@pytest.mark.parametrize("case", ["other_in_step", "other_fails_early"])
def test_another_rank_that_raises_ends_the_main_one_which_says_why(ended: Path, case: str) -> None:
    """Case N3: services are taken down; the main rank's own broken collective is not what is told."""
    codes, said = found(ended, case)
    assert codes == [1, 1], said
    assert "rank 1 failed: OutOfMemoryError: no room for 7 GiB" in said[0]
    assert "Traceback" not in said[0]
    assert (ended / f"{case}_taken_down").exists()


@pytest.mark.timeout(200)
def test_a_rank_that_is_killed_is_missed_at_once(ended: Path) -> None:
    """Bad input: a rank lost. The kernel says so, whichever rank it was."""
    codes, said = found(ended, "other_killed")
    assert codes == [1, -9], said
    assert "rank 1 is gone" in said[0]
    assert (ended / "other_killed_taken_down").exists()
    codes, said = found(ended, "main_killed")
    assert codes[0] == -9
    assert codes[1] == 1, said
    assert "rank 0 is gone" in said[1]


@pytest.mark.timeout(200)
def test_a_launcher_that_hands_on_ctrl_c_leaves_the_end_to_the_main_rank(ended: Path) -> None:
    """The others died of it in the middle of the step that the main one meant to finish."""
    codes, said = found(ended, "other_signalled")
    assert codes == [0, 0], said
