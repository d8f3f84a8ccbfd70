"""What the benchmarks of the server share: `python -m agent.serve` as a process, and clients that stream and judge."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
import shutil
import signal
import sys
import time
from asyncio.subprocess import DEVNULL, Process
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp

from agent.child_processes import log_tail
from agent.simulate.processes import cold_start
from envs.style_shift.prompts import tasks

RECIPE = Path("recipes/style_shift_tiny.yaml")
_START_S = 300.0
_STOP_S = 90.0
_POLL_S = 0.05
# All clients come from one address, without a key: the default rates are meant for one user of many.
NO_RATES = (
    "serve.requests_per_minute=1000000",
    "serve.feedback_per_minute=1000000",
    "serve.burst=100000",
    "serve.doors.open=true",
)


@dataclass
class ServedRun:
    """The run `name` in `runs`, served on a free loopback port; `start`, then `stop` or `kill`, as often as wanted."""

    recipe: Path
    runs: Path
    name: str
    overrides: Sequence[str] = ()
    url: str = ""
    _process: Process | None = None

    @property
    def folder(self) -> Path:
        """The folder of the run."""
        return self.runs / self.name

    async def prepare(self) -> None:
        """A folder with the cold-started model, which is made once for all runs in `runs`."""
        model = await cold_start(self.recipe, self.runs, ())
        await asyncio.to_thread(shutil.rmtree, self.folder, ignore_errors=True)
        await asyncio.to_thread(shutil.copytree, model, self.folder / "sft")

    async def start(self, *, learn: bool) -> None:
        """Serve; `RuntimeError` with the end of the log if it does not."""
        port, log = self.folder / "port", self.folder / "server.log"
        port.unlink(missing_ok=True)
        with log.open("ab") as output:
            self._process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "agent.serve", str(self.recipe), "--port-file", str(port)),
                *(["--learn"] if learn else []),
                *(f"runs_dir={self.runs}", f"name={self.name}", "serve.port=0", *NO_RATES, *self.overrides),
                stdin=DEVNULL,
                stdout=output,
                stderr=output,
                env={**os.environ, "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")},
            )
        deadline = time.monotonic() + _START_S
        while not port.exists():
            if self._process.returncode is not None or time.monotonic() > deadline:
                raise RuntimeError(f"the server did not start:\n{log_tail(log)}")
            await asyncio.sleep(_POLL_S)
        self.url = f"http://127.0.0.1:{int(port.read_text())}"

    async def kill(self) -> None:
        """SIGKILL to the server alone; its children end by themselves."""
        await self._end(signal.SIGKILL)

    async def stop(self) -> None:
        """SIGTERM, and SIGKILL if that takes too long. Harmless if it does not run."""
        try:
            async with asyncio.timeout(_STOP_S):
                await self._end(signal.SIGTERM)
        except TimeoutError:
            await self._end(signal.SIGKILL)

    async def _end(self, how: signal.Signals) -> None:
        if self._process is not None and self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                self._process.send_signal(how)
            await self._process.wait()


@dataclass
class Reply:
    """One streamed answer. Moments are seconds of the Unix clock: sent, and when each piece of text arrived."""

    sent: float
    pieces: list[float] = field(default_factory=list)
    id: str = ""
    conversation: str = ""
    versions: list[int] = field(default_factory=list)
    fault: str = ""

    @property
    def gaps(self) -> list[tuple[float, float]]:
        """(from, to) between two pieces of text."""
        return list(itertools.pairwise(self.pieces))


@contextlib.asynccontextmanager
async def session(timeout_s: float = 120.0) -> AsyncIterator[aiohttp.ClientSession]:
    """As many connections as wanted."""
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(total=timeout_s)) as opened:
        yield opened


def questions() -> list[str]:
    """What the tiny model has learned to answer."""
    return [task.prompt for task in tasks("tiny")]


async def ask(http: aiohttp.ClientSession, url: str, model: str, question: str, seed: int) -> Reply:
    """Stream one answer. What is not as it should be is in `fault`; a connection that breaks raises."""
    body = {"model": model, "messages": [{"role": "user", "content": question}], "stream": True, "seed": seed}
    reply = Reply(time.time())
    async with http.post(f"{url}/v1/chat/completions", json=body) as answer:
        if answer.status != 200:
            reply.fault = f"{answer.status}: {(await answer.text())[:200]}"
            return reply
        async for line in answer.content:
            if not line.startswith(b"data: {"):
                continue
            now, chunk = time.time(), json.loads(line[6:])
            if "error" in chunk:
                reply.fault = str(chunk["error"])[:200]
                return reply
            choice = chunk["choices"][0]
            if choice["delta"].get("content"):
                reply.pieces.append(now)
            if choice["finish_reason"]:
                reply.id, reply.conversation = chunk["id"], chunk["conversation"]
                reply.versions = chunk["policy_versions"]
    if not reply.id:
        reply.fault = "the stream had no end"
    return reply


async def judge(http: aiohttp.ClientSession, url: str, reply: Reply, reward: float) -> tuple[int, dict[str, Any]]:
    """Give final feedback; the status and the answer."""
    async with http.post(f"{url}/v1/feedback", json={"response_id": reply.id, "reward": reward}) as answer:
        return answer.status, await answer.json()


async def get(http: aiohttp.ClientSession, url: str, path: str) -> dict[str, Any]:
    """A JSON page of the server."""
    async with http.get(url + path) as answer:
        page: dict[str, Any] = await answer.json()
        return page
