"""A tiny model, a recipe for it, and `python -m agent.serve` as a real process."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import aiohttp
import yaml

from agent.doors.door import bearer
from learner.config import TinyModelConfig
from learner.model.tiny import write_tiny_model

ROOT = Path(__file__).parents[2]
NAME = "tiny"
# Wide enough to say something else each time, and never to end by itself too soon.
SHAPE: dict[str, Any] = {
    **{"vocab_size": 320, "hidden_size": 16, "layers": 1, "heads": 2, "kv_heads": 1, "head_dim": 8, "experts": 2},
    **{"experts_per_token": 1, "expert_width": 8, "max_context": 512, "init_std": 0.2},
}
TEXTS = ["Write a short text. 好的, meow! ~ <tool_call>{}</tool_call>"] * 4
MAX_CONTEXT = SHAPE["max_context"]


def write_models(folder: Path, **changes: int) -> tuple[Path, Path]:
    """Two snapshots of one shape with different weights."""
    for seed in (1, 2):
        shape = TinyModelConfig(**{**SHAPE, **changes})
        write_tiny_model(folder / f"m{seed}", shape, TEXTS, seed)
    return folder / "m1", folder / "m2"


def write_recipe(folder: Path, model: Path, *, engine: str = "", **serve: Any) -> Path:
    """A recipe whose run lives in `folder`; `engine`: the address of one that runs already.

    Nobody needs a key, unless `serve` has `keys_file` or `doors`.
    """
    if not {"doors", "keys_file"} & serve.keys():
        serve["doors"] = {"open": True}
    recipe = {
        "name": NAME,
        "runs_dir": str(folder / "runs"),
        "model": {"path": str(model)},
        "learner": {"batch_size": 4},
        "engine": {"max_sequences": 32, "max_context": MAX_CONTEXT, **({"urls": [engine]} if engine else {})},
        "runtime": {"max_tokens_per_turn": 400, "max_context_tokens": MAX_CONTEXT},
        "store": {"max_lag": 4},
        "serve": {"port": 0, "delivery_wait_s": 30.0, **serve},  # long: `in_store` is not to hang on a busy disk
    }
    path = folder / "recipe.yaml"
    path.write_text(yaml.safe_dump(recipe))
    return path


class ServerProcess:
    """The server as a process; `url` and `engine` (the learner's way in) once it is ready.

    `descriptors`: how many files it may have open.
    """

    def __init__(self, recipe: Path, *words: str, descriptors: int | None = None) -> None:
        self.recipe, self.words, self.descriptors = recipe, words, descriptors
        self.output = recipe.with_name("serve.out")
        self.url = self.engine = ""

    @property
    def run_dir(self) -> Path:
        return self.recipe.parent / "runs" / NAME

    @property
    def key(self) -> str:
        """What its store, its engine and the learner's way in ask for."""
        return (self.run_dir / "key").read_text().strip()

    def start(self, *, within_s: float = 90.0) -> None:
        before = len(self.said)
        with self.output.open("ab") as file:
            self.process = subprocess.Popen(
                [
                    *(["prlimit", f"--nofile={self.descriptors}:{self.descriptors}"] if self.descriptors else []),
                    *(sys.executable, "-m", "agent.serve", str(self.recipe), *self.words),
                ],
                cwd=ROOT,
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=file,
                env={**os.environ, "OMP_NUM_THREADS": "1"},
            )
        deadline = time.monotonic() + within_s
        while "\nready: " not in (said := "\n" + self.said[before:]):
            assert self.process.poll() is None, f"ended with {self.process.returncode}:\n{said[-4000:]}"
            assert time.monotonic() < deadline, f"not ready:\n{said[-4000:]}"
            time.sleep(0.02)
        line = said.partition("\nready: ")[2].partition("\n")[0]
        self.url, _, rest = line.partition("  ")
        self.engine = rest.rpartition(" ")[2].rstrip(")")

    @property
    def said(self) -> str:
        return self.output.read_text(errors="replace") if self.output.exists() else ""

    def kill(self) -> None:
        self.process.send_signal(signal.SIGKILL)
        self.process.wait(20)

    def stop(self) -> int:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        try:
            return self.process.wait(40)
        except subprocess.TimeoutExpired:
            self.process.kill()
            raise AssertionError(f"the server did not stop:\n{self.said[-4000:]}") from None


@contextlib.contextmanager
def engine_process(model: Path, folder: Path) -> Iterator[str]:
    """A `local` engine of its own, for servers that are to start quickly; gives its URL."""
    port, log = folder / "engine.port", folder / "engine.log"
    words = ["--model", str(model), "--version", "0", "--port-file", str(port), "--exit-with-parent"]
    words += ["--max-context", str(MAX_CONTEXT), "--max-sequences", "32"]
    with log.open("wb") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", "agent.engines.local", *words],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=output,
            stderr=output,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
    try:
        deadline = time.monotonic() + 120
        while not port.exists() or not port.read_text().strip():
            assert process.poll() is None, log.read_text()[-4000:]
            assert time.monotonic() < deadline, log.read_text()[-4000:]
            time.sleep(0.02)
        yield f"http://127.0.0.1:{int(port.read_text())}"
    finally:
        process.terminate()
        process.wait(30)


@contextlib.contextmanager
def serving(recipe: Path, *words: str, within_s: float = 90.0) -> Iterator[ServerProcess]:
    server = ServerProcess(recipe, *words)
    server.start(within_s=within_s)
    try:
        yield server
    finally:
        if server.process.poll() is None:
            server.stop()


class Client:
    """Plain JSON calls on a server."""

    def __init__(self, url: str, session: aiohttp.ClientSession) -> None:
        self.url, self.session = url, session

    async def call(self, method: str, path: str, body: Any = None, **headers: str) -> tuple[int, Any]:
        data = body if isinstance(body, bytes) or body is None else json.dumps(body).encode()
        if data is not None:
            headers.setdefault("Content-Type", "application/json")
        async with self.session.request(method, self.url + path, data=data, headers=headers) as answer:
            text = await answer.text()
            return answer.status, json.loads(text) if text.startswith("{") else text

    async def chat(self, content: str = "hello", **more: Any) -> dict[str, Any]:
        body = {"model": NAME, "messages": [{"role": "user", "content": content}], "max_tokens": 8, **more}
        status, answer = await self.call("POST", "/v1/chat/completions", body)
        assert status == 200, answer
        return answer

    async def feedback(self, response_id: str, **more: Any) -> tuple[int, Any]:
        return await self.call("POST", "/v1/feedback", {"response_id": response_id, **more})


@contextlib.asynccontextmanager
async def client(url: str, key: str = ""):  # type: ignore[no-untyped-def]
    connector, limit = aiohttp.TCPConnector(limit=0), aiohttp.ClientTimeout(total=60)
    async with aiohttp.ClientSession(connector=connector, timeout=limit, headers=bearer(key)) as session:
        yield Client(url, session)
