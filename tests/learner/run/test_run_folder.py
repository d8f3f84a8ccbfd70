"""One learner a run: the folder's lock, and what is written into the folder."""

from __future__ import annotations

import json
import math
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from learner_tools import micro_recipe
from run_tools import ROOT

from learner.config import load_recipe
from learner.faults import LearnerFault
from learner.run.folder import append_metrics, claim_run

HOLDER = """
    import sys, time
    from pathlib import Path
    from learner.config import load_recipe
    from learner.run.folder import claim_run
    with claim_run(load_recipe(Path(sys.argv[1]))):
        print("held", flush=True)
        time.sleep(60)
"""


def test_a_second_learner_is_refused_until_the_first_is_gone_however_it_went(tmp_path: Path) -> None:
    """The lock is the kernel's, so it goes with a process that SIGKILL took."""
    from learner.config import save_recipe

    recipe = micro_recipe(tmp_path)
    save_recipe(recipe, tmp_path / "recipe.yaml")
    holder = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(HOLDER), str(tmp_path / "recipe.yaml")],
        stdout=subprocess.PIPE,
        text=True,
        cwd=ROOT,
    )
    try:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "held\n"
        with pytest.raises(LearnerFault) as caught, claim_run(recipe):
            pass
        said = str(caught.value)
        assert f"process {holder.pid}" in said
        assert str(recipe.run_dir) in said
        assert "name=" in said
        with claim_run(micro_recipe(tmp_path, name="other")) as folder:  # another run is free
            assert folder.name == "other"
    finally:
        holder.send_signal(signal.SIGKILL)
        holder.wait()
        assert holder.stdout is not None
        holder.stdout.close()
    with claim_run(recipe) as folder:
        assert load_recipe(folder / "recipe.yaml") == recipe


def test_a_refused_learner_changes_nothing_in_the_folder(tmp_path: Path) -> None:
    recipe, other = micro_recipe(tmp_path), micro_recipe(tmp_path, seed=9)
    with claim_run(recipe) as folder:
        before = (folder / "recipe.yaml").read_bytes()
        with pytest.raises(LearnerFault), claim_run(other):
            pass
        assert (folder / "recipe.yaml").read_bytes() == before
    with claim_run(other):
        assert (folder / "recipe.yaml").read_bytes() != before


def test_a_folder_that_cannot_be_made_is_said_so(tmp_path: Path) -> None:
    (tmp_path / "micro").write_text("a file where the folder would be")
    with pytest.raises(LearnerFault, match=r"cannot write to .*runs_dir"), claim_run(micro_recipe(tmp_path)):
        pass


def test_undefined_figures_are_null_not_nan(tmp_path: Path) -> None:
    """NaN is no JSON: other readers would stop at it."""
    append_metrics(tmp_path, 4, {"critic/explained_variance": math.nan, "rollout/reward": 0.5})
    line = (tmp_path / "metrics.jsonl").read_text()
    assert json.loads(line, parse_constant=pytest.fail) == {
        "step": 4,
        "critic/explained_variance": None,
        "rollout/reward": 0.5,
    }
