"""The command as a process: Ctrl-C and SIGKILL lose nothing that had ended, and leave nothing behind."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from aiohttp import web
from chat_server import ChatServer, asked, calculates
from engine_process import local_engine_process

from agent.evaluate.sample import Sample, decode
from learner.config import TinyModelConfig
from learner.model.tiny import write_tiny_model

ROOT = Path(__file__).parents[2]
PROBLEMS = "problems=[" + ", ".join(f"{{problem: 'What is {i}*7?', answer: '{i * 7}'}}" for i in range(10)) + "]"
LIMIT_S = 60.0


@contextlib.asynccontextmanager
async def evaluation(cwd: Path, *words: str) -> AsyncIterator[asyncio.subprocess.Process]:
    """The command as a user runs it in a folder of their own; its output lies in `out.txt` there."""
    with (cwd / "out.txt").open("ab") as output:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "agent.evaluate", *words),
            cwd=cwd,
            stdout=output,
            stderr=output,
            env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        )
    try:
        yield process
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


async def ended(process: asyncio.subprocess.Process) -> int:
    async with asyncio.timeout(LIMIT_S):
        return await process.wait()


def kept(out: Path) -> list[Sample]:
    return [decode(line) for line in (out / "samples.jsonl").read_bytes().splitlines(keepends=True)]


class Gate:
    """Lets the first tasks through and holds the others until it is opened."""

    def __init__(self, through: int) -> None:
        self.open, self._through = asyncio.Event(), through
        self.held, self.dropped = asyncio.Semaphore(0), asyncio.Semaphore(0)

    async def __call__(self, number: int, body: dict[str, Any]) -> web.Response | None:
        if int(asked(body)[8]) < self._through or self.open.is_set():
            return None
        self.held.release()
        try:
            await self.open.wait()
        except asyncio.CancelledError:
            self.dropped.release()
            raise
        return None


async def all_of(semaphore: asyncio.Semaphore, count: int) -> None:
    async with asyncio.timeout(LIMIT_S):
        for _ in range(count):
            await semaphore.acquire()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL], ids=["int", "kill"])
async def test_what_had_ended_is_kept_and_the_same_command_goes_on(number: signal.Signals, tmp_path: Path) -> None:
    gate = Gate(through=6)
    async with ChatServer(calculates, gate).running() as server:
        words = ["sao/PythonTIR-v0", "--url", server.url, "--model", "m", "--env-arg", PROBLEMS]
        words += ["--concurrency", "4", "--out", "results"]
        async with evaluation(tmp_path, *words) as process:
            await all_of(gate.held, 4)  # all four workers are at tasks that are held: six have ended
            children = psutil.Process(process.pid).children(recursive=True)
            process.send_signal(number)
            status = await ended(process)
            await all_of(gate.dropped, 4)  # the requests in flight went with it
        text = (tmp_path / "out.txt").read_text()
        if number != signal.SIGKILL:
            assert status == 130, text
            assert "stopped; what had ended is kept" in text
            assert "Traceback" not in text
            assert (tmp_path / "results/report.html").is_file()
        _, alive = await asyncio.to_thread(psutil.wait_procs, children, LIMIT_S / 2)
        assert not alive, "sandboxes outlive the evaluation"
        assert len(kept(tmp_path / "results")) == 6
        gate.open.set()
        before = len(server.bodies)
        async with evaluation(tmp_path, *words) as process:
            assert await ended(process) == 0, (tmp_path / "out.txt").read_text()
        assert {asked(body)[8] for body in server.bodies[before:]} == {"6", "7", "8", "9"}
    assert [sample.reward for sample in kept(tmp_path / "results")] == [1.0] * 10


async def test_two_sessions_never_write_into_one_folder(tmp_path: Path) -> None:
    gate = Gate(through=0)
    async with ChatServer(calculates, gate).running() as server:
        words = ["sao/PythonTIR-v0", "--url", server.url, "--model", "m", "--env-arg", PROBLEMS, "--out", "results"]
        async with evaluation(tmp_path, *words):
            await all_of(gate.held, 1)
            async with evaluation(tmp_path, *words) as second:
                assert await ended(second) == 2
        assert "another session writes into results" in (tmp_path / "out.txt").read_text()


async def test_an_own_environment_in_an_empty_folder_at_a_real_engine(tmp_path: Path) -> None:
    """The module lies in the working folder; the engine is a process with a tiny model that says anything."""
    (tmp_path / "game.py").write_text((Path(__file__).parent / "own_envs.py").read_text())
    shape = TinyModelConfig(vocab_size=300, hidden_size=32, layers=2, experts=0, max_context=256)
    write_tiny_model(tmp_path / "model", shape, ["after 5"], seed=0)
    (tmp_path / "engine").mkdir()
    with local_engine_process(tmp_path / "model", tmp_path / "engine", "--max-context", "256") as url:
        words = ["game:Counting", "--engine", url, "--model-folder", "model", "--max-tokens", "16", "--seed", "1"]
        words += ["--env-arg", "seeds={count: 2}", "--samples", "2"]
        async with evaluation(tmp_path, *words) as process:
            assert await ended(process) == 0, (tmp_path / "out.txt").read_text()
    samples = kept(tmp_path / "evaluations/game-Counting-model")
    assert len(samples) == 4
    assert all(sample.tokens.completion and sample.versions == (0, 0) for sample in samples)
    assert len({sample.transcript[1].text for sample in samples}) > 1
