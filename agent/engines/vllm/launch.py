"""Start vLLM as a child process, with this project's plugin inside. Works without torch and without vLLM here."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
from asyncio.subprocess import Process
from collections.abc import Iterator, Sequence
from pathlib import Path

import aiohttp
import psutil

from agent.child_processes import log_tail, start_child, stop_child
from agent.doors.door import KEY_VARIABLE, bearer
from agent.doors.keys import given_key
from agent.engines import adapters
from agent.engines.base import EngineFault, check_model_folder
from agent.engines.vllm import door, plugin

VLLM_FOLDER = ".venv-vllm"  # what `make vllm` makes
_POLL_S = 0.2
_KEPT_BACK = ("PYTHONPATH", "PYTHONHOME", KEY_VARIABLE)  # of this process's environment

KEEPALIVE_S = 90
"""How long it keeps a connection that nobody uses; with its own 5 s, turns that take longer connect each time."""


async def launch_vllm(
    model: Path,
    *,
    version: int,
    log: Path,
    max_sequences: int = 64,
    max_context: int = 4096,
    threads: int = 1,
    port: int = 0,
    dtype: str = "auto",
    eager: bool = True,
    environment: Path | None = None,
    options: Sequence[str] = (),
    devices: str | None = None,
    returns_experts: bool = False,
    key: str | None = None,
    ready_timeout_s: float = 300.0,
) -> tuple[Process, str]:
    """Start `vllm serve` for the model folder `model`, as `launch_local` does; end it with `stop_child`.

    An adapter's folder is served beside its base model, and further ones may be published to it.

    `environment` is the virtual environment with vLLM (see `vllm_python`), `options` are further words for its
    command line, `devices` its CUDA_VISIBLE_DEVICES (None: this process's). All of the server's processes end when
    this one does, or the server's first: see `agent.engines.vllm.plugin`.
    `key`: as in `launch_local`; vLLM calls it its API key. It travels in VLLM_API_KEY, and covers all paths but /health
    (see `agent.engines.vllm.door`).
    `returns_experts`: its answers hold which experts each token went to (`Completion.experts`).
    On a CPU the environment variable VLLM_CPU_KVCACHE_SPACE (GiB, default 1) bounds its keys and values.
    """
    python = vllm_python(environment)
    key = given_key() if key is None else key
    env = _environment(threads, devices)
    if (base := adapters.base_of(model)) is not None:
        env["VLLM_ALLOW_RUNTIME_LORA_UPDATING"] = "1"
        named = f"{adapters.NAME}={adapters.address(model)}"
        rank = str(adapters.room_for(model))
        options = ("--enable-lora", "--max-lora-rank", rank, "--lora-modules", named, *options)
        model = base
    check_model_folder(model)
    if returns_experts:
        env["VLLM_USE_V2_MODEL_RUNNER"] = "1"  # the only one that keeps them
        options = ("--enable-return-routed-experts", *options)
    if key:
        env[door.KEY_VARIABLE] = key
        options = ("--middleware", f"{door.Door.__module__}.{door.Door.__qualname__}", *options)
    with _reserved(port) as port:
        words = ["--host", "127.0.0.1", "--port", str(port), "--enable-scale-out"]
        words += ["--logprobs-mode", "processed_logprobs", "--dtype", dtype]
        words += ["--weight-transfer-config", f'{{"backend": "{plugin.BACKEND}"}}']
        words += ["--max-model-len", str(max_context), "--max-num-seqs", str(max_sequences)]
        words += ["--disable-uvicorn-access-log", *(["--enforce-eager"] if eager else []), *options]
        if not (model / "tokenizer.json").exists():
            words += ["--skip-tokenizer-init"]  # with one, ids beyond the vocabulary are refused
        process = await start_child(
            *(str(python), "-m", "vllm.entrypoints.cli.main", "serve", str(model), *words), log=log, env=env
        )
        url = f"http://127.0.0.1:{port}"
        try:
            await _ready(process, url, version, log, ready_timeout_s, key)
        except BaseException:
            await stop_child(process, grace_s=0)
            raise
    return process, url


def _environment(threads: int, devices: str | None) -> dict[str, str]:
    me = psutil.Process()
    env = {
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # the cores are shared with the learner
        "VLLM_HTTP_TIMEOUT_KEEP_ALIVE": str(KEEPALIVE_S),
        **{name: value for name, value in os.environ.items() if name not in _KEPT_BACK},
        "OMP_NUM_THREADS": str(threads),
        "VLLM_SERVER_DEV_MODE": "1",  # the paths for pauses and weights
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
        plugin.OWNER: f"{me.pid}:{me.create_time()}",
    }
    if devices is not None:
        env["CUDA_VISIBLE_DEVICES"] = devices
    return env


async def _ready(process: Process, url: str, version: int, log: Path, limit_s: float, key: str) -> None:
    """Return once the server answers and calls its weights `version`; raises `EngineFault`."""
    try:
        async with asyncio.timeout(limit_s), aiohttp.ClientSession(url, headers=bearer(key)) as session:
            while not await _answers(session):
                if process.returncode is not None:
                    raise EngineFault(f"vLLM ended with code {process.returncode} at its start:\n{log_tail(log)}")
                await asyncio.sleep(_POLL_S)
            async with session.post("/update_weight_version", json={"new_version": str(version)}) as response:
                response.raise_for_status()
    except TimeoutError as error:
        raise EngineFault(f"vLLM was not ready within {limit_s:g} s:\n{log_tail(log)}") from error
    except aiohttp.ClientError as error:
        raise EngineFault(f"vLLM does not take a version ({error}):\n{log_tail(log)}") from error


def vllm_python(environment: Path | None = None) -> Path:
    """The interpreter of vLLM's environment: `environment`, or $SAO_VLLM, or .venv-vllm here or beside the code."""
    given = environment or os.environ.get("SAO_VLLM")
    places = [Path(given)] if given else [Path.cwd() / VLLM_FOLDER, Path(__file__).parents[3] / VLLM_FOLDER]
    for place in places:
        if (python := place / "bin" / "python").exists():
            return python
    raise EngineFault(
        f"no vLLM in {' or '.join(map(str, places))}: run `make vllm`, or set SAO_VLLM to its environment"
    )


@contextlib.contextmanager
def _reserved(port: int) -> Iterator[int]:
    """A port that nobody else is given while the server starts, which binds it beside us (SO_REUSEPORT)."""
    with socket.socket() as holder:
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        try:
            holder.bind(("127.0.0.1", port))
        except OSError as error:
            raise EngineFault(f"port {port} is taken: {error}") from error
        yield holder.getsockname()[1]


async def _answers(session: aiohttp.ClientSession) -> bool:
    try:
        async with session.get("/health", timeout=aiohttp.ClientTimeout(total=5)) as response:
            return response.status == 200
    except (aiohttp.ClientError, TimeoutError):
        return False
