"""The benchmark of publications runs as its documentation says, and its arithmetic holds."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))

from agent.engines.base import Completion
from benchmarks.publish_latency import Publication, Request, figures_of

ROOT = Path(__file__).resolve().parents[2]


def request(arrivals: list[float], versions: list[int]) -> Request:
    count = len(arrivals)
    return Request([1], arrivals, Completion((1,) * count, (-1.0,) * count, tuple(versions), "length"))


def test_what_a_publication_took_is_read_off_the_arrivals() -> None:
    moved = request([0.0, 1.0, 2.0, 5.0, 6.0], [0, 0, 0, 1, 1])
    short = request([4.5, 4.75], [1, 1])
    before = request([0.0, 1.9], [0, 0])
    found = figures_of([Publication(1, begun=1.5, written=2.5, done=4.0)], [moved, short, before])
    assert found["written"] == [1.0]
    assert found["call"] == [1.5]
    assert found["first"] == [2.0], "the earliest new token, of whichever request"
    assert found["gap"] == [3.0], "only gaps that the publication lies in"
    assert found["usual"] == [1.0]


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_it_runs_in_small_and_a_kept_cache_shows_in_the_log_probs(tmp_path: Path) -> None:
    target = tmp_path / "figures.json"
    words = ["benchmarks/publish_latency.py", "--quick", "--in-flight", "4", "--json", str(target)]
    done = subprocess.run(
        [sys.executable, *words],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stderr
    cleared, kept = json.loads(target.read_text())["publications"]
    assert (cleared["keep"], kept["keep"]) == (False, True)
    assert len(cleared["call"]) == len(cleared["first"]) == len(cleared["gap"]) == 2
    assert cleared["difference"] < 1e-4 < kept["difference"]
    assert "local, snapshot, cache cleared" in done.stdout
