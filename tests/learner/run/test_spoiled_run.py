"""A whole run of which one gradient of the critic and one of the policy is no number; its tracker; its second end."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from run_tools import metrics, training, write_run
from safetensors.torch import load_file

from learner.run.checkpoint import checkpoints, load_progress

SPOILED = """
import sys
from learner import train
from learner.model.trainee import Trainee

backward, calls = Trainee.backward, {}

def spoiled(self, buckets, loss_of):
    read, who = backward(self, buckets, loss_of), type(self.unwrapped).__name__
    calls[who] = calls.get(who, 0) + 1
    # Two critic updates of the value pretraining come first, then two a step.
    if (who, calls[who]) in {("CriticForward", 5), ("PolicyForward", 3)}:
        next(p for p in self.parameters if p.grad is not None).grad.view(-1)[0] = float("nan")
    return read

Trainee.backward = spoiled
raise SystemExit(train.main(sys.argv[1:]))
"""

# What Accelerate's tracker calls of the package; it writes down what it was told.
WANDB = """
import json, os

class Config:
    def update(self, values, allow_val_change=False):
        note(config=values)

class Run:
    def log(self, values, step=None, **rest):
        note(logged=step)

    def finish(self):
        note(finished=True)

def note(**words):
    with open(os.environ["WANDB_NOTES"], "a") as file:
        file.write(json.dumps(words) + "\\n")

def init(**words):
    note(init=words)
    return Run()

config = Config()
"""


def finite(path: Path) -> bool:
    return all(bool(tensor.isfinite().all()) for tensor in load_file(path).values())


@pytest.mark.slow
@pytest.mark.timeout(500)
def test_a_run_survives_a_spoiled_gradient_of_critic_and_policy_and_is_gone_on_with(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Cases N1, N16, N18: every step is made, the discards are counted; resumed it is the same run of its tracker."""
    site, notes = tmp_path / "site", tmp_path / "notes"
    (site / "wandb-1.0.dist-info").mkdir(parents=True)
    (site / "wandb-1.0.dist-info" / "METADATA").write_text("Metadata-Version: 2.1\nName: wandb\nVersion: 1.0\n")
    (site / "wandb.py").write_text(WANDB)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(site), os.environ.get("PYTHONPATH", "")]))
    monkeypatch.setenv("WANDB_NOTES", str(notes))
    recipe, run = write_run(tmp_path, steps=4), tmp_path / "runs" / "micro"
    words, output = (str(recipe), "learner.tracker=wandb"), tmp_path / "out"

    with training(*words, output=output, program=("-c", SPOILED)) as command:
        assert command.end(within_s=240) == 0, command.said[-3000:]
        assert "step 2: discarded an update of critic, whose gradient or loss was not finite" in command.said
        assert "step 3: discarded an update of policy" in command.said
    lines = {line["step"]: line for line in metrics(run)}
    assert [line["step"] for line in metrics(run)] == [0, 1, 2, 3, 4]
    assert [lines[step]["critic/discarded"] for step in range(1, 5)] == [0, 1, 0, 0]
    assert [lines[step]["policy/discarded"] for step in range(1, 5)] == [0, 0, 1, 0]
    assert [lines[step]["policy/version"] for step in range(1, 5)] == [1, 2, 2, 3]
    assert lines[3]["policy/gradient_norm"] is None
    saved = checkpoints(run / "checkpoints")[-1]
    state = json.loads((saved / "progress.json").read_text())["trainees"]
    assert (load_progress(saved).step, state["policy"]["updates"], state["critic"]["updates"]) == (4, 3, 7)
    assert all(finite(path) for path in run.glob("final/*.safetensors"))

    with training(*words, "learner.steps=5", output=output) as command:
        assert command.end(within_s=120) == 0, command.said[-3000:]
    assert [line["step"] for line in metrics(run)] == [0, 1, 2, 3, 4, 5]
    with training(*words, "learner.steps=5", output=output) as command:
        assert command.end(within_s=120) == 0, command.said[-3000:]
    assert [line["step"] for line in metrics(run)] == [0, 1, 2, 3, 4, 5]

    told = [json.loads(line) for line in notes.read_text().splitlines()]
    starts = [words["init"] for words in told if "init" in words]
    assert len(starts) == 3
    assert starts[0] == starts[1] == starts[2]
    assert starts[0]["resume"] == "allow"
    assert starts[0]["id"]
    assert [words["logged"] for words in told if "logged" in words] == [0, 1, 2, 3, 4, 5]
    config = next(words["config"] for words in told if "config" in words)
    assert (config["name"], config["learner.policy.lr"], config["store.max_lag"]) == ("micro", 1e-4, 3)
