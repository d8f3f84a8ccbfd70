"""A study of two arms, and a stand-in for the commands that it starts: a process that can be stopped and goes on."""

from __future__ import annotations

import sys
from pathlib import Path

from learner.study.arms import Study, preset

FAKE = """
import json, os, signal, sys, time
words = sys.argv[1:]
given = dict(word.split("=", 1) for word in words if "=" in word)
folder = os.path.join(json.loads(given["runs_dir"]), given["name"])
os.makedirs(folder, exist_ok=True)
with open(os.path.join(os.path.dirname(__file__), "calls"), "a") as file:
    file.write(words[1] + " " + given["name"] + "\\n")
part = {"learner.sft": "sft", "learner.pretrain_value": "value"}.get(words[1])
if part:
    os.makedirs(os.path.join(folder, part))
    open(os.path.join(folder, part, "config.json"), "w").write(json.dumps({"of": given["seed"]}))
    sys.exit()
config = json.load(open(os.path.join(folder, "sft", "config.json")))
assert config["of"] == given["seed"], "the cold start of another seed"
path = os.path.join(folder, "metrics.jsonl")
done = sum(1 for _ in open(path)) if os.path.exists(path) else 0
stop = []
signal.signal(signal.SIGTERM, lambda *_: stop.append(1))
for step in range(done + 1, int(given["learner.steps"]) + 1):
    time.sleep(float(os.environ.get("FAKE_STEP_S", "0")))
    if os.environ.get("FAKE_FAILS") == given["learner.algorithm"]:
        sys.exit("it broke")
    line = {"step": step, "rollout/reward": step / 10, "time/step_s": 2.0, "gate/share": 0.001}
    with open(path, "a") as file:
        file.write(json.dumps(line) + "\\n")
    if stop:
        sys.exit()
"""

STUDY = Study(
    "main",
    "table 1",
    ("SAO 97.3, GRPO 84.2.",),
    "SAO is above GRPO.",
    (preset("sao", label="SAO"), preset("grpo", label="GRPO")),
    updates=5,
    plots=("reward", "gated"),
)


def fake_python(folder: Path) -> tuple[str, str]:
    """What `Runner.python` is given so that the stand-in is started instead of the learner."""
    path = folder / "fake.py"
    path.write_text(FAKE, encoding="utf-8")
    return sys.executable, str(path)


def calls_of(folder: Path) -> list[str]:
    """The modules that the stand-in stood for, in order."""
    return [line.split()[0] for line in (folder / "calls").read_text().splitlines()]
