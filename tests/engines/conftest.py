"""Engines under test. The suite in test_engine_contract.py runs on every engine that `_ENGINES` names."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedConfig, Qwen3Config, Qwen3MoeConfig

from agent.engines.client import HttpEngine

VOCABULARY = 96
MAX_CONTEXT = 2048  # seconds of decoding: what must happen in flight has the time to
MAX_SEQUENCES = 32

_SHAPE = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "tie_word_embeddings": True,
    "max_position_embeddings": 4096,
    "initializer_range": 0.15,  # wide enough for logits that differ: a wrong cache must show
    "eos_token_id": None,
    "bos_token_id": None,
    "pad_token_id": None,
}


def config(kind: str) -> PreTrainedConfig:
    if kind == "moe":
        return Qwen3MoeConfig(**_SHAPE, num_experts=8, num_experts_per_tok=2, moe_intermediate_size=32)
    if kind == "dense":
        return Qwen3Config(**_SHAPE)
    return LlamaConfig(**_SHAPE)


def make_model(folder: Path, kind: str, seed: int, *, nan: bool = False, eos: list[int] | None = None) -> Path:
    """Save a model with random weights."""
    torch.manual_seed(seed)
    shape = config(kind)
    shape.eos_token_id = eos
    model = AutoModelForCausalLM.from_config(shape)
    if nan:
        with torch.no_grad():
            model.get_input_embeddings().weight.fill_(float("nan"))
    model.save_pretrained(folder)
    return folder


@dataclass
class EngineUnderTest:
    """A running engine: its client, two snapshots (`first` is served as `version`), and what it promises."""

    client: HttpEngine
    first: Path
    second: Path
    broken: Path
    version: int
    max_context: int = MAX_CONTEXT
    max_sequences: int = MAX_SEQUENCES
    counts_reused_tokens: bool = True


@dataclass
class Server:
    url: str
    first: Path
    second: Path
    broken: Path


@contextlib.contextmanager
def _local(tmp: Path, kind: str) -> Iterator[Server]:
    snapshots = [make_model(tmp / f"{kind}{seed}", kind, seed, nan=seed == 3) for seed in (1, 2, 3)]
    port_file, log = tmp / "port", (tmp / "log").open("wb")
    command = [sys.executable, "-m", "agent.engines.local", "--model", str(snapshots[0]), "--port-file", str(port_file)]
    command += ["--max-context", str(MAX_CONTEXT), "--max-sequences", str(MAX_SEQUENCES), "--exit-with-parent"]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=log, stderr=log, env=env)
    try:
        deadline = time.monotonic() + 90
        while not port_file.exists():
            assert process.poll() is None, (tmp / "log").read_text()
            assert time.monotonic() < deadline, "the engine did not start"
            time.sleep(0.05)
        yield Server(f"http://127.0.0.1:{int(port_file.read_text())}", *snapshots)
        assert process.poll() is None, f"the engine died: {(tmp / 'log').read_text()}"
    finally:
        process.terminate()
        process.wait(10)
        log.close()


# An engine is added by its name here: a context manager that starts it and tells where it is.
_ENGINES = {"local-moe": lambda tmp: _local(tmp, "moe"), "local-dense": lambda tmp: _local(tmp, "dense")}


@pytest.fixture(scope="session", params=list(_ENGINES))
def server(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    torch.set_num_threads(1)
    with _ENGINES[request.param](tmp_path_factory.mktemp(request.param)) as server:
        yield server


@pytest.fixture
async def engine(server: Server) -> AsyncIterator[EngineUnderTest]:
    """The engine, serving its first snapshot under a version that no test has seen."""
    client = HttpEngine(server.url, timeout_s=60)
    version = (await client.health()).version + 1
    await client.publish(version, server.first)
    yield EngineUnderTest(client, server.first, server.second, server.broken, version)
    await client.close()
