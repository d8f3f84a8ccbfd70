"""Start an engine as a child process, and leave nothing of it. Works without torch (the child needs it)."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import sys
from asyncio.subprocess import DEVNULL, PIPE, Process
from collections.abc import AsyncIterator, Iterator, Sequence
from pathlib import Path
from typing import BinaryIO

import aiohttp
import psutil

from agent.engines import vllm_plugin
from agent.engines.base import EngineFault

_POLL_S = 0.02
VLLM_FOLDER = ".venv-vllm"  # what `make vllm` makes


async def launch_local(
    model: Path,
    *,
    version: int,
    log: Path,
    max_sequences: int = 64,
    max_context: int = 4096,
    threads: int = 1,
    port: int = 0,
    device: str = "cpu",
    ready_timeout_s: float = 120.0,
) -> tuple[Process, str]:
    """Start a `local` engine for the model folder `model`; returns the process and its URL once it listens.

    Its output is appended to `log`. It ends by itself when this process does, by SIGKILL too. Raises `EngineFault`
    (with the end of the log) if it dies or is not ready within `ready_timeout_s`; nothing is left running then.
    End it with `stop_local`.
    """
    _check(model)
    output = _open(log)
    port_file = log.with_suffix(".port")
    port_file.unlink(missing_ok=True)
    # A session of its own: Ctrl-C in the terminal reaches the parent, which takes the engine down in its own time.
    command = [sys.executable, "-m", "agent.engines.local", "--exit-with-parent", "--model", str(model)]
    command += ["--version", str(version), "--port", str(port), "--port-file", str(port_file), "--device", device]
    command += ["--max-sequences", str(max_sequences), "--max-context", str(max_context), "--threads", str(threads)]
    # Before torch is imported there: later, some of its thread pools have their size already.
    env = {**os.environ, "OMP_NUM_THREADS": str(threads)}
    try:
        process = await asyncio.create_subprocess_exec(
            *command, stdin=PIPE, stdout=output, stderr=output, env=env, start_new_session=True
        )
    finally:
        output.close()
    try:
        async with asyncio.timeout(ready_timeout_s):
            while not port_file.exists():
                if process.returncode is not None:
                    raise EngineFault(f"the engine ended with code {process.returncode} at its start:\n{log_tail(log)}")
                await asyncio.sleep(_POLL_S)
        url = f"http://127.0.0.1:{int(port_file.read_text())}"
    except TimeoutError as error:
        await stop_local(process, grace_s=0)
        raise EngineFault(f"the engine was not ready within {ready_timeout_s:g} s:\n{log_tail(log)}") from error
    except BaseException:
        await stop_local(process, grace_s=0)
        raise
    finally:
        port_file.unlink(missing_ok=True)
    return process, url


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
    ready_timeout_s: float = 300.0,
) -> tuple[Process, str]:
    """Start `vllm serve` for the model folder `model`, as `launch_local` does; end it with `stop_local`.

    `environment` is the virtual environment with vLLM (see `vllm_python`), `options` are further words for its
    command line, `devices` its CUDA_VISIBLE_DEVICES (None: this process's). All of the server's processes end when
    this one does, or the server's first: see `vllm_plugin`.
    On a CPU the environment variable VLLM_CPU_KVCACHE_SPACE (GiB, default 1) bounds its keys and values.
    """
    _check(model)
    python = vllm_python(environment)
    me = psutil.Process()
    env = {
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # the cores are shared with the learner
        **{name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PYTHONHOME")},
        "OMP_NUM_THREADS": str(threads),
        "VLLM_SERVER_DEV_MODE": "1",  # the paths for pauses and weights
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
        vllm_plugin.OWNER: f"{me.pid}:{me.create_time()}",
    }
    if devices is not None:
        env["CUDA_VISIBLE_DEVICES"] = devices
    with _reserved(port) as port:
        command = [str(python), "-m", "vllm.entrypoints.cli.main", "serve", str(model), "--host", "127.0.0.1"]
        command += ["--port", str(port), "--enable-scale-out", "--logprobs-mode", "processed_logprobs"]
        command += ["--weight-transfer-config", f'{{"backend": "{vllm_plugin.BACKEND}"}}', "--dtype", dtype]
        command += ["--max-model-len", str(max_context), "--max-num-seqs", str(max_sequences)]
        command += ["--disable-uvicorn-access-log", *(["--enforce-eager"] if eager else []), *options]
        if not (model / "tokenizer.json").exists():
            command += ["--skip-tokenizer-init"]  # with one, ids beyond the vocabulary are refused
        output = _open(log)
        try:
            process = await asyncio.create_subprocess_exec(
                *command, stdin=DEVNULL, stdout=output, stderr=output, env=env, start_new_session=True
            )
        finally:
            output.close()
        url = f"http://127.0.0.1:{port}"
        try:
            async with asyncio.timeout(ready_timeout_s), aiohttp.ClientSession(url) as session:
                while not await _answers(session):
                    if process.returncode is not None:
                        raise EngineFault(f"vLLM ended with code {process.returncode} at its start:\n{log_tail(log)}")
                    await asyncio.sleep(10 * _POLL_S)
                async with session.post("/update_weight_version", json={"new_version": str(version)}) as response:
                    response.raise_for_status()
        except TimeoutError as error:
            await stop_local(process, grace_s=0)
            raise EngineFault(f"vLLM was not ready within {ready_timeout_s:g} s:\n{log_tail(log)}") from error
        except aiohttp.ClientError as error:
            await stop_local(process, grace_s=0)
            raise EngineFault(f"vLLM does not take a version ({error}):\n{log_tail(log)}") from error
        except BaseException:
            await stop_local(process, grace_s=0)
            raise
    return process, url


def vllm_python(environment: Path | None = None) -> Path:
    """The interpreter of vLLM's environment: `environment`, or $SAO_VLLM, or .venv-vllm here or beside the code."""
    given = environment or os.environ.get("SAO_VLLM")
    places = [Path(given)] if given else [Path.cwd() / VLLM_FOLDER, Path(__file__).parents[2] / VLLM_FOLDER]
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


async def stop_local(process: Process, *, grace_s: float = 10.0) -> int:
    """End an engine: SIGTERM, after `grace_s` SIGKILL, and what is left of its group. Returns its exit code.

    Harmless on one that has ended.
    """
    if process.returncode is None:
        try:
            return await _stop(process, grace_s)
        finally:
            end_group(process)
    return await _stop(process, grace_s)


def end_group(process: Process) -> None:
    """SIGKILL to what an engine that has just ended has left: it had a session of its own, so the group is its own."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)


async def _stop(process: Process, grace_s: float) -> int:
    if process.returncode is None:
        with contextlib.suppress(ProcessLookupError):
            process.terminate()
        try:
            async with asyncio.timeout(grace_s):
                await process.wait()
        except TimeoutError:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
        except asyncio.CancelledError:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            raise
    if process.stdin is not None:
        process.stdin.close()
    return await process.wait()


@contextlib.asynccontextmanager
async def local_engine(model: Path, *, version: int = 0, log: Path, **options: int | float | str) -> AsyncIterator[str]:
    """`launch_local` and `stop_local` as a block; gives the URL."""
    process, url = await launch_local(model, version=version, log=log, **options)  # type: ignore[arg-type]
    try:
        yield url
    finally:
        await stop_local(process)


def _check(model: Path) -> None:
    # The engine says so as well, but only after it has imported torch.
    if not (model / "config.json").is_file():
        raise EngineFault(f"no model in {model}: it must be a folder with config.json and model.safetensors")


def _open(log: Path) -> BinaryIO:
    log.parent.mkdir(parents=True, exist_ok=True)
    return log.open("ab")


def log_tail(log: Path, characters: int = 2000) -> str:
    """The end of a child's log, for an error message; "" if there is none."""
    return log.read_text(errors="replace")[-characters:] if log.exists() else ""
