"""A recipe that learns online from a random model, and everything that runs for it as real processes."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.request import Request, urlopen

import psutil
import yaml

from envs.style_shift.traces import style_traces
from learner.config import TinyModelConfig
from learner.model.tiny import write_tiny_model

ROOT = Path(__file__).parents[2]
SHAPE = {"vocab_size": 640, "hidden_size": 16, "layers": 1, "heads": 2, "kv_heads": 1, "head_dim": 8, "experts": 0}
PATIENCE_S = 240.0
NAME = "online"


def write_recipe(folder: Path, **learner: Any) -> Path:
    """A recipe in `folder` whose model is random and whose batches are four conversations."""
    model = folder / "model"
    if not model.exists():
        texts = [m["content"] for trace in style_traces(400, bad=0.3, seed=1) for m in trace]
        write_tiny_model(model, TinyModelConfig(**SHAPE, max_context=128), texts, 0)
    recipe = {
        "name": NAME,
        "runs_dir": str(folder / "runs"),
        "model": {"path": str(model)},
        "env": {
            "id": "sao/StyleShift-v0",
            "kwargs": {
                "prompts": "tiny",
                "show_candidates": False,
                "steps": 4,
                "phases": [{"start": 0, "style": "cute"}, {"start": 2, "style": "classical"}],
            },
        },
        "learner": {
            "batch_size": 4,
            "steps": 4,
            "methods": {
                "sao_running_mean": {"running_mean": {"window": 128, "per_prompt": False, "include_current": True}}
            },
            "policy": {"lr": 1e-3, "warmup_steps": 0},
            "held_out_probe": {"prompts": 2},
            "tracker": None,
            **learner,
        },
        "engine": {"max_sequences": 8, "max_context": 128},
        "runtime": {"max_tokens_per_turn": 8, "max_context_tokens": 100},
        "store": {"max_lag": 4},
        "serve": {"port": 0, "learner_backoff_s": 0.1, "doors": {"open": True}},
    }
    path = folder / "recipe.yaml"
    path.write_text(yaml.safe_dump(recipe))
    return path


@contextlib.contextmanager
def learning_server(recipe: Path) -> Iterator[tuple[str, psutil.Process]]:
    """`python -m agent.serve --learn`: its URL and its process."""
    port = recipe.with_name("port")
    with recipe.with_name("serve.out").open("ab") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", "agent.serve", str(recipe), "--learn", "--port-file", str(port)],
            cwd=ROOT,
            stdout=output,
            stderr=output,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
    try:
        until(port.exists, lambda: recipe.with_name("serve.out").read_text()[-2000:], process)
        yield f"http://127.0.0.1:{int(port.read_text())}", psutil.Process(process.pid)
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(60)
        except subprocess.TimeoutExpired:
            process.kill()
            raise


def until(done: Callable[[], Any], why: Callable[[], Any], process: subprocess.Popen[bytes] | None = None) -> Any:
    """Wait until `done` is true, within generous limits; `why` says what to show if it never is."""
    deadline = time.monotonic() + PATIENCE_S
    while not (found := done()):
        assert process is None or process.poll() is None, why()
        assert time.monotonic() < deadline, why()
        time.sleep(0.05)
    return found


def call(url: str, path: str, body: Any = None) -> dict[str, Any]:
    """A JSON call on the server; an answer that is no success is an error."""
    data = None if body is None else json.dumps(body).encode()
    with urlopen(Request(url + path, data, {"Content-Type": "application/json"}), timeout=60) as answer:
        found: dict[str, Any] = json.loads(answer.read())
        return found


def converse(url: str, count: int) -> list[str]:
    """`count` conversations with feedback, one after the other; their ids."""
    found = []
    for number in range(count):
        messages = [{"role": "user", "content": f"Write about rain. ({number})"}]
        answer = call(url, "/v1/chat/completions", {"model": NAME, "messages": messages})
        call(url, "/v1/feedback", {"response_id": answer["id"], "reward": float(number % 2)})
        found.append(answer["conversation"])
    return found


def metrics(run: Path) -> list[dict[str, Any]]:
    """The learner's steps so far."""
    path = run / "metrics.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    return [json.loads(line) for line in lines if line.endswith("}")]


def trained(run: Path) -> dict[str, str]:
    """The status of every episode in the run's store, by id."""
    with contextlib.closing(sqlite3.connect(f"file:{run / 'episodes.sqlite'}?mode=ro", uri=True, timeout=30)) as store:
        return dict(store.execute("SELECT id, status FROM episodes").fetchall())


def learners(server: psutil.Process) -> list[psutil.Process]:
    """The learner of a server."""
    found = []
    for child in server.children():
        with contextlib.suppress(psutil.NoSuchProcess):
            if "learner.train" in child.cmdline():
                found.append(child)
    return found
