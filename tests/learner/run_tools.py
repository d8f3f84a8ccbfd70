"""A whole run in small: its recipe, and `python -m learner.train` as a real process whose descendants are known."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import psutil
import yaml

ROOT = Path(__file__).parents[2]
CALL = '<tool_call>{"name": "python", "arguments": {"code": "1+1"}}</tool_call>'
CHILDREN = ("agent.store", "agent.engines.local", "agent.runtime")


def write_run(folder: Path, *, steps: int = 24, learner: dict[str, Any] | None = None, **sections: Any) -> Path:
    """Problems, traces and a recipe in `folder`; the path of the recipe. `learner` and `sections` are added to it.

    Every answer is 2 and half of the traces end on 3, so that after the cold start rewards vary.
    """
    for name, count in (("train", 64), ("held_out", 16)):
        lines = [{"problem": f"What is 1 + 1? ({name} {i})", "answer": "2"} for i in range(count)]
        (folder / f"{name}.jsonl").write_text("\n".join(map(json.dumps, lines)))
    traces = [
        {
            "messages": [
                {"role": "user", "content": f"What is 1 + 1? (train {i % 64})"},
                {"role": "assistant", "content": CALL},
                {"role": "tool", "content": "2"},
                {"role": "assistant", "content": f"\\boxed{{{2 + i % 2}}}"},
            ]
        }
        for i in range(128)
    ]
    (folder / "traces.jsonl").write_text("\n".join(map(json.dumps, traces)))

    def env(name: str) -> dict[str, Any]:
        source = {"source": "file", "path": str(folder / f"{name}.jsonl"), "problem": "problem", "answer": "answer"}
        return {
            "id": "sao/PythonTIR-v0",
            "kwargs": {"system_prompt": "", "max_turns": 4, "spares": 2, "call_timeout_s": 5.0, "problems": source},
        }

    shape = {
        "hidden_size": 32,
        "layers": 1,
        "heads": 2,
        "kv_heads": 1,
        "head_dim": 16,
        "experts": 4,
        "expert_width": 16,
    }
    recipe = {
        "name": "micro",
        "runs_dir": str(folder / "runs"),
        "model": {"tiny": {"vocab_size": 384, "expert_width": 16, **shape}},
        "env": env("train"),
        "evaluation": {"tasks": 8, "env": env("held_out")},
        "sft": {"traces": str(folder / "traces.jsonl"), "clean_steps": 60, "imperfect_steps": 0, "batch_size": 16},
        "value_pretraining": {"episodes": 12, "held_out_episodes": 4, "steps": 2, "batch_size": 8},
        "learner": {
            "steps": steps,
            "batch_size": 8,
            "policy": {"lr": 1e-4, "warmup_steps": 2},
            "critic": {"lr": 1e-3, "warmup_steps": 2},
            "evaluate_every": 1000,
            "tracker": None,
            **(learner or {}),
        },
        "engine": {"max_sequences": 8, "max_context": 256},
        "runtime": {"concurrency": 8, "max_tokens_per_turn": 24, "max_context_tokens": 200},
        "store": {"max_lag": 3},
        **sections,
    }
    path = folder / "recipe.yaml"
    path.write_text(yaml.safe_dump(recipe))
    return path


def metrics(folder: Path) -> list[dict[str, Any]]:
    """The lines of a run's metrics so far."""
    path = folder / "metrics.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    found = []
    for line in lines:
        with contextlib.suppress(json.JSONDecodeError):
            found.append(json.loads(line))
    return found


def last_step(folder: Path) -> int:
    return max((record["step"] for record in metrics(folder)), default=-1)


class TrainCommand:
    """`python -m learner.train ...` in a session of its own; `descendants` are all that it was seen to start.

    `program`: what Python runs in its place.
    """

    def __init__(self, *words: str, output: Path, program: Sequence[str] = ("-m", "learner.train")) -> None:
        self.output = output
        self.descendants: set[psutil.Process] = set()
        with output.open("ab") as file:
            self.process = subprocess.Popen(
                [sys.executable, *program, *words],
                cwd=ROOT,
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=file,
                env={**os.environ, "OMP_NUM_THREADS": "1", "COLUMNS": "200"},
                start_new_session=True,
            )

    @property
    def said(self) -> str:
        return self.output.read_text(errors="replace")

    def watch(self) -> None:
        """Note the descendants that are alive now."""
        with contextlib.suppress(psutil.NoSuchProcess):
            self.descendants |= set(psutil.Process(self.process.pid).children(recursive=True))

    def wait_for(self, condition: Callable[[], bool], *, within_s: float) -> None:
        """Until `condition` holds; fails with the command's output if it ends or takes too long."""
        deadline = time.monotonic() + within_s
        while not condition():
            assert self.process.poll() is None, f"ended with {self.process.returncode}:\n{self.said[-4000:]}"
            assert time.monotonic() < deadline, f"not within {within_s} s:\n{self.said[-4000:]}"
            time.sleep(0.02)
        self.watch()

    def end(self, *, within_s: float) -> int:
        """The exit code; fails if the command goes on for longer."""
        try:
            return self.process.wait(within_s)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"still there after {within_s} s:\n{self.said[-4000:]}") from None

    def survivors(self, *, within_s: float = 40.0) -> list[str]:
        """Command lines of descendants that are still alive when they had `within_s` to go.

        A store may take `agent.store.ending.LIMIT_S` on a machine whose disk is busy.
        """
        _, alive = psutil.wait_procs(list(self.descendants), timeout=within_s)
        found = []
        for process in alive:
            with contextlib.suppress(psutil.NoSuchProcess):
                if process.status() != psutil.STATUS_ZOMBIE:
                    found.append(" ".join(process.cmdline()))
        return found

    def words(self) -> set[str]:
        """All words of the descendants' command lines; a short-lived one may be gone between noting and reading."""
        found: set[str] = set()
        for process in self.descendants:
            with contextlib.suppress(psutil.NoSuchProcess):
                found |= set(process.cmdline())
        return found

    def child(self, module: str) -> psutil.Process:
        """The descendant that runs `python -m module`."""
        for process in self.descendants:
            with contextlib.suppress(psutil.NoSuchProcess):
                if module in process.cmdline():
                    return process
        raise AssertionError(f"no {module} among the children")

    def clean_up(self) -> None:
        """Kill what is left, of this command only."""
        self.watch()
        for process in (*self.descendants, self.process):
            with contextlib.suppress(psutil.NoSuchProcess, ProcessLookupError):
                process.send_signal(signal.SIGKILL)
        self.process.wait()


@contextlib.contextmanager
def training(*words: str, output: Path, program: Sequence[str] = ("-m", "learner.train")) -> Iterator[TrainCommand]:
    command = TrainCommand(*words, output=output, program=program)
    try:
        yield command
    finally:
        command.clean_up()


def run_two_ranks(words: list[str], *, within_s: float) -> None:
    """`run_ranks` of two."""
    run_ranks(2, words, within_s=within_s)


def run_ranks(count: int, words: list[str], *, within_s: float) -> None:
    """Run `python WORDS` as `count` ranks of a group on the CPU; fails with what they said unless all end with 0."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    shared = {
        "WORLD_SIZE": str(count),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "OMP_NUM_THREADS": "1",
        "ACCELERATE_USE_CPU": "true",
        "PYTHONPATH": str(ROOT),
    }
    processes = [
        subprocess.Popen(
            [sys.executable, *words],
            env={**os.environ, **shared, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(count)
    ]
    try:
        said = [process.communicate(timeout=within_s)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert [process.returncode for process in processes] == [0] * count, "\n".join(text[-3000:] for text in said)
