"""OpenHands' own loop, trained for some steps on the demo repositories by `recipes/openhands_tiny.yaml`, only shorter.

Its environment is one of its own (`make openhands`).
"""

from __future__ import annotations

import os
import sqlite3
from pathlib import Path

import pytest
from run_tools import ROOT, metrics, training

from agent.episode import decode

PYTHON = Path(os.environ.get("SAO_OPENHANDS_PYTHON", ROOT / ".venv-openhands/bin/python"))
STEPS, BATCH = 2, 4


@pytest.mark.slow
@pytest.mark.docker
@pytest.mark.xdist_group("demo-images")
@pytest.mark.timeout(3600)
@pytest.mark.skipif(not PYTHON.exists(), reason="`make openhands` has not been run")
def test_the_policy_learns_from_openhands_own_loop(tmp_path: Path) -> None:
    words = [
        str(ROOT / "recipes" / "openhands_tiny.yaml"),
        f"runs_dir={tmp_path}",
        f"runtime.python={PYTHON}",
        f"learner.steps={STEPS}",
        f"learner.batch_size={BATCH}",
        "learner.evaluate_every=100",
        "evaluation.tasks=1",
        "sft.imperfect_traces=400",
    ]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(ROOT))
        with training(*words, output=tmp_path / "log") as command:
            assert command.end(within_s=3000) == 0, command.said[-4000:]
            assert command.survivors(within_s=10.0) == []
    folder = tmp_path / "openhands_tiny"
    assert len([line for line in metrics(folder) if "policy/gradient_norm" in line]) <= STEPS
    with sqlite3.connect(f"file:{folder / 'episodes.sqlite'}?mode=ro", uri=True) as sql:
        rows = sql.execute("SELECT data FROM episodes WHERE status = 'trained'").fetchall()
    episodes = [decode(data) for (data,) in rows]
    assert len(episodes) == STEPS * BATCH
    for episode in episodes:
        assert episode.env_id == "sao/SWEBench-v0"
        assert episode.branches == (), "its history stays one chain"
        assert episode.metrics["turns"] == len(episode.actions)
    assert any(len(episode.actions) > 1 for episode in episodes), "calls were carried out, and answered"
