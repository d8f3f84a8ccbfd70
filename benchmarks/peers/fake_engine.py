"""An engine that answers at once: the token protocol of `vllm serve`, as far as the runtimes here use it.

The project and verifiers ask `/inference/v1/generate`, TRL asks `/v1/completions`. The answer is a tool call until the
prompt holds `turns - 1` observations, then a text; its bytes are made once. Runs in the project's Python.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
from aiohttp import web

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT)]

from agent.descriptors import raise_limit  # noqa: E402
from benchmarks.peers.rollout_script import read  # noqa: E402

START_S = 60.0


class Asked(msgspec.Struct):
    """Both bodies: only the one or the other has a prompt under that name."""

    token_ids: list[int] = []
    prompt: list[int] = []


def generated(ids: list[int]) -> bytes:
    """An answer of /inference/v1/generate."""
    entries = [
        {"token": f"token_id:{i}", "token_id": i, "logprob": -0.5, "bytes": None, "top_logprobs": []} for i in ids
    ]
    choice = {
        "index": 0,
        "token_ids": ids,
        "finish_reason": "stop",
        "logprobs": {"content": entries},
        "weight_versions": [{"version": "0", "start": 0, "end": len(ids)}],
    }
    return msgspec.json.encode({"request_id": "r", "choices": [choice], "prompt_logprobs": None})


def completed(ids: list[int]) -> bytes:
    """An answer of /v1/completions."""
    logprobs = {"token_logprobs": [-0.5] * len(ids), "tokens": [f"token_id:{i}" for i in ids]}
    choice = {"index": 0, "text": "", "token_ids": ids, "finish_reason": "stop", "logprobs": logprobs}
    return msgspec.json.encode({"id": "r", "object": "text_completion", "model": "m", "choices": [choice]})


class FakeEngine:
    """The application; `connections` counts those that were opened."""

    def __init__(self, script: dict[str, Any], turns: int, think_s: float = 0.0) -> None:
        self._mark, self._turns, self._think_s = script["tool_response_id"], turns, think_s
        self._replies = {make: [make(script[k]) for k in ("call_ids", "final_ids")] for make in (generated, completed)}
        self._asked = msgspec.json.Decoder(Asked)

    def app(self) -> web.Application:
        """With the routes of a sound engine of version 0."""
        app = web.Application(client_max_size=2**28)
        app.add_routes(
            [
                web.post("/inference/v1/generate", self._generate),
                web.post("/v1/completions", self._complete),
                web.post("/abort_requests", self._nothing),
                web.get("/health", self._nothing),
                web.get("/metrics", self._nothing),
                web.get("/weight_info", self._version),
                web.get("/v1/models", self._models),
            ]
        )
        return app

    def _answer(self, prompt: list[int], make: Any) -> web.Response:
        over = prompt.count(self._mark) >= self._turns - 1
        return web.Response(body=self._replies[make][over], content_type="application/json")

    async def _generate(self, request: web.Request) -> web.Response:
        if self._think_s:
            await asyncio.sleep(random.uniform(0.0, self._think_s))
        return self._answer(self._asked.decode(await request.read()).token_ids, generated)

    async def _complete(self, request: web.Request) -> web.Response:
        return self._answer(self._asked.decode(await request.read()).prompt, completed)

    async def _nothing(self, _: web.Request) -> web.Response:
        return web.json_response({})

    async def _version(self, _: web.Request) -> web.Response:
        return web.json_response({"weight_version": "0"})

    async def _models(self, _: web.Request) -> web.Response:
        return web.json_response({"data": [{"id": "m", "max_model_len": 1_000_000}]})


async def serve(folder: Path, length: str, turns: int, port_file: Path, think_s: float) -> None:
    """Serve until the process is ended."""
    raise_limit(12_000, "the fake engine")
    app = FakeEngine(read(folder, length), turns, think_s).app()
    # As long as the project's own engine keeps a connection that nobody uses.
    runner = web.AppRunner(app, access_log=None, keepalive_timeout=75.0)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0, backlog=8192).start()
    part = port_file.with_suffix(".part")
    part.write_text(str(runner.addresses[0][1]))
    part.replace(port_file)
    await asyncio.Event().wait()


@contextlib.contextmanager
def fake_engine(folder: Path, length: str, turns: int, think_s: float = 0.0) -> Iterator[str]:
    """Its address while the block runs. It takes up to `think_s` for an answer, by chance."""
    with tempfile.TemporaryDirectory() as scratch:
        port = Path(scratch) / "port"
        process = subprocess.Popen([sys.executable, __file__, str(folder), length, str(turns), str(port), str(think_s)])
        try:
            ends = time.monotonic() + START_S
            while not port.exists():
                if process.poll() is not None or time.monotonic() > ends:
                    raise RuntimeError("the fake engine did not start")
                time.sleep(0.05)
            yield f"http://127.0.0.1:{port.read_text()}"
        finally:
            process.terminate()
            process.wait()


if __name__ == "__main__":
    asyncio.run(serve(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), Path(sys.argv[4]), float(sys.argv[5])))
