"""Engines under test. The suite in test_engine_contract.py runs on every engine that `_ENGINES` names."""

from __future__ import annotations

import asyncio
import contextlib
import os
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_tools import (
    MAX_CONTEXT,
    MAX_SEQUENCES,
    VLLM_READY_S,
    VLLM_TEST_S,
    EngineUnderTest,
    make_model,
)
from vllm_tools import have_vllm

from agent.child_processes import stop_child
from agent.engines.client import HttpEngine
from agent.engines.vllm.launch import launch_vllm


@dataclass
class Server:
    url: str
    first: Path
    second: Path
    broken: Path
    is_local: bool = True


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
        process.wait(60)
        log.close()


@contextlib.contextmanager
def _vllm(tmp: Path, kind: str) -> Iterator[Server]:
    # head_dim: vLLM's CPU attention starts at 32. Layers: with few, an answer is at its end before anything can
    # happen to it.
    shape = {"head_dim": 32, "num_hidden_layers": 24}
    snapshots = [make_model(tmp / f"{kind}{seed}", kind, seed, nan=seed == 3, **shape) for seed in (1, 2, 3)]
    log, loop = tmp / "log", asyncio.new_event_loop()
    limits = {"max_context": MAX_CONTEXT, "max_sequences": MAX_SEQUENCES, "ready_timeout_s": VLLM_READY_S}
    process, url = loop.run_until_complete(launch_vllm(snapshots[0], version=0, log=log, dtype="float32", **limits))
    try:
        yield Server(url, *snapshots, is_local=False)
        loop.run_until_complete(asyncio.sleep(0.1))  # lets the loop hear of an end
        assert process.returncode is None, f"the engine died: {log.read_text()[-5000:]}"
    finally:
        loop.run_until_complete(stop_child(process))
        loop.close()


# An engine is added by its name here: a context manager that starts it and tells where it is.
_ENGINES = {
    "local-moe": lambda tmp: _local(tmp, "moe"),
    "local-dense": lambda tmp: _local(tmp, "dense"),
    "vllm-moe": lambda tmp: _vllm(tmp, "moe"),
    "vllm-dense": lambda tmp: _vllm(tmp, "dense"),
}


def _parameters() -> list[Any]:
    # One worker for each server: one start of it in the whole run.
    slow = [pytest.mark.vllm, pytest.mark.timeout(VLLM_TEST_S)]
    return [
        pytest.param(name, marks=[*slow, pytest.mark.xdist_group(name)]) if name.startswith("vllm") else name
        for name in _ENGINES
        if have_vllm() or not name.startswith("vllm")
    ]


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests that start a vLLM server of their own come first: later, that of a whole group would stand beside it."""
    items.sort(
        key=lambda item: item.get_closest_marker("vllm") is None or "server" in getattr(item, "fixturenames", ())
    )


@pytest.fixture(scope="session", params=_parameters())
def server(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    torch.set_num_threads(1)
    with _ENGINES[request.param](tmp_path_factory.mktemp(request.param)) as server:
        yield server


@pytest.fixture
async def engine(server: Server) -> AsyncIterator[EngineUnderTest]:
    """The engine, serving its first snapshot under a version that no test has seen."""
    client = HttpEngine(server.url, timeout_s=60 if server.is_local else 300)
    version = (await client.health()).version + 1
    await client.publish(version, server.first)
    yield EngineUnderTest(
        client,
        server.first,
        server.second,
        server.broken,
        version,
        counts_reused_tokens=server.is_local,
        says_whose_fault=server.is_local,
        knows_vocabulary=server.is_local,
    )
    await client.close()
