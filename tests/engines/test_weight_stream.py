"""Weights from memory to memory, without vLLM: no tensor is lost or bent, and nobody waits for the dead."""

from __future__ import annotations

import asyncio
import gc
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from aiohttp import web
from engine_tools import make_model
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from torch import Tensor

from agent.engines.base import EngineFault, EngineRefused
from agent.engines.client import HttpEngine
from agent.engines.local.launch import local_engine
from agent.engines.weight_stream import (
    Kind,
    WeightStreamer,
    broadcast,
    buckets,
    join,
    manifest_of,
    opened_buffer,
    pack,
    packed_bytes,
    shared_buffer,
    unpack,
)
from agent.episode import SamplingParams

CPU = torch.device("cpu")
HOST = "127.0.0.1"
START_S = 90.0  # a child that imports torch on a busy machine

_DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.bool, torch.uint8]
_SHAPES = st.lists(st.sampled_from([0, 1, 1, 2, 3, 5]), max_size=4).map(tuple)


def _bits(tensor: Tensor) -> bytes:
    # Not torch.equal: a NaN is to arrive as well, and with the same bits.
    return bytes(tensor.contiguous().flatten().view(torch.uint8).tolist())


@st.composite
def _tensor(draw: st.DrawFn) -> Tensor:
    dtype, shape = draw(st.sampled_from(_DTYPES)), draw(_SHAPES)
    count = int(torch.Size(shape).numel()) * dtype.itemsize
    raw = draw(st.binary(min_size=count, max_size=count))
    if dtype == torch.bool:
        raw = bytes(byte & 1 for byte in raw)
    tensor = torch.tensor(list(raw), dtype=torch.uint8).view(dtype).view(shape)
    if len(shape) >= 2 and draw(st.booleans()):
        tensor = tensor.transpose(0, 1)  # the trainer's tensors need not lie in one piece
    return tensor


_NAMED = st.lists(_tensor(), max_size=8).map(lambda tensors: [(f"t{i}", t) for i, t in enumerate(tensors)])


@settings(deadline=None, max_examples=150)
@given(named=_NAMED, limit=st.integers(0, 400))
def test_no_tensor_is_lost_or_bent_on_its_way_through_buckets(named: list[tuple[str, Tensor]], limit: int) -> None:
    manifest = {
        name: (dtype, tuple(shape)) for name, (dtype, shape) in json.loads(json.dumps(manifest_of(named))).items()
    }
    assert manifest == manifest_of(named)
    parts = list(buckets(iter(named), limit))
    assert [name for part in parts for name, _ in part] == [name for name, _ in named]
    arrived = []
    for part in parts:
        names = [name for name, _ in part]
        size = packed_bytes(manifest, names)
        assert size <= limit or len(part) == 1
        packed = torch.full((size,), 0xAB, dtype=torch.uint8)
        pack([tensor for _, tensor in part], packed)
        arrived += unpack(packed, manifest, names)
    for (name, sent), (other, got) in zip(named, arrived, strict=True):
        assert (name, sent.dtype, sent.shape, _bits(sent)) == (other, got.dtype, got.shape, _bits(got))


def test_buckets_are_as_full_as_they_may_be() -> None:
    named = [(f"t{i}", torch.zeros(4)) for i in range(7)]  # 16 bytes each
    assert [len(part) for part in buckets(named, 48)] == [3, 3, 1]


# Two processes. The child prints a line before each step and waits for one, so that the test decides what comes when.

_RECEIVER = """
import sys, torch
from agent.engines.weight_stream import broadcast, join
limit_s = float(sys.argv[1])
print("ready", flush=True)
port = int(sys.stdin.readline())
group = join("127.0.0.1", port, 1, 2, torch.device("cpu"), limit_s=limit_s)
for line in sys.stdin:
    buffer = torch.zeros(int(line), dtype=torch.uint8)
    broadcast(group, buffer)
    print(int(buffer.sum()), flush=True)
"""

_OPENER = """
import json, sys, torch
from agent.engines.weight_stream import opened_buffer
print("ready", flush=True)
for line in sys.stdin:
    try:
        print(bytes(opened_buffer(json.loads(line), torch.device("cpu")).tolist()).hex(), flush=True)
    except (RuntimeError, ValueError, OSError) as error:
        print("error:", str(error).replace(chr(10), " "), flush=True)
"""


class Child:
    """A Python process that is spoken to in lines."""

    def __init__(self, code: str, *words: str) -> None:
        env = {**os.environ, "OMP_NUM_THREADS": "1"}
        self.process = subprocess.Popen(
            [sys.executable, "-c", code, *words], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=env
        )
        assert self.hear() == "ready"

    def say(self, line: object) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(f"{line}\n")
        self.process.stdin.flush()

    def hear(self) -> str:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, f"the child has ended with {self.process.wait(10)}"
        return line.strip()


@contextmanager
def _child(code: str, *words: str) -> Iterator[Child]:
    child = Child(code, *words)
    try:
        yield child
    finally:
        child.process.kill()
        child.process.communicate()


@asynccontextmanager
async def _pair(limit_s: float) -> AsyncIterator[tuple[Child, Any]]:
    """A receiver in a process of its own, and the group of it and this one."""
    with _child(_RECEIVER, str(limit_s)) as child:
        listener = socket.create_server((HOST, 0))
        port = listener.getsockname()[1]
        child.say(port)
        group = await asyncio.to_thread(join, HOST, port, 0, 2, CPU, limit_s=limit_s, listener=listener.detach())
        try:
            yield child, group
        finally:
            group.abort()


async def test_a_broadcast_reaches_another_process_again_and_again() -> None:
    async with _pair(START_S) as (child, group):
        for size in (16, 1, 3_000_000):
            buffer = (torch.arange(size) % 251).to(torch.uint8)
            child.say(size)
            await asyncio.to_thread(broadcast, group, buffer)
            assert int(await asyncio.to_thread(child.hear)) == int(buffer.sum())


async def test_a_receiver_that_is_killed_in_the_middle_is_an_error_and_not_a_hang() -> None:
    """The limit is far beyond the test's own: an error comes from the broken connection."""
    async with _pair(1000.0) as (child, group):
        child.say(1000)
        await asyncio.to_thread(broadcast, group, torch.ones(1000, dtype=torch.uint8))
        assert await asyncio.to_thread(child.hear) == "1000"
        # The child was told of no second one, so this one waits for it.
        sending = asyncio.create_task(asyncio.to_thread(broadcast, group, torch.ones(50_000_000, dtype=torch.uint8)))
        await asyncio.sleep(0)
        child.process.kill()
        with pytest.raises(RuntimeError):
            await asyncio.wait_for(sending, 60)


async def test_a_receiver_that_takes_nothing_is_an_error_at_the_limit() -> None:
    async with _pair(5.0) as (_, group):
        started = time.monotonic()
        with pytest.raises(RuntimeError, match=r"(?i)time"):
            await asyncio.to_thread(broadcast, group, torch.ones(50_000_000, dtype=torch.uint8))
        assert 4 < time.monotonic() - started < 60


# A server that answers as an engine would, refusing what it is told to.


@asynccontextmanager
async def _refusing(path: str) -> AsyncIterator[tuple[str, list[str]]]:
    """An engine that takes everything but `path`; gives its URL and the paths that it was asked for."""
    asked: list[str] = []

    async def answer(request: web.Request) -> web.Response:
        asked.append(request.path)
        if request.path == path:
            return web.json_response({"error": {"message": "no group with you"}}, status=500)
        return web.json_response({"world_size": 1})

    app = web.Application()
    app.router.add_route("*", "/{path:.*}", answer)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, HOST, 0)
    await site.start()
    try:
        yield f"http://{HOST}:{runner.addresses[0][1]}", asked
    finally:
        await runner.cleanup()


def _streamer(kind: Kind, **options: Any) -> WeightStreamer:
    return WeightStreamer(lambda: iter([("a", torch.ones(3)), ("b", torch.ones(2, 2))]), kind=kind, **options)


def _listening() -> set[int]:
    found = psutil.Process().net_connections("tcp")
    return {connection.laddr.port for connection in found if connection.status == psutil.CONN_LISTEN}


async def test_an_engine_that_refuses_the_group_is_heard_and_nothing_of_it_is_left() -> None:
    limit_s = 4.0
    loop = asyncio.get_running_loop()
    async with _refusing("/init_weight_transfer_engine") as (url, asked):
        before = _listening()
        engine = HttpEngine(url)
        started = time.monotonic()
        try:
            with pytest.raises(EngineFault, match="no group with you"):
                await engine.publish(1, _streamer("broadcast", limit_s=limit_s))
        finally:
            await engine.close()
        assert "/pause" not in asked, "nobody waits for an engine that was not reached"
        assert "/start_weight_update" not in asked
        # The thread that waits for the engine in vain ends by itself; with it the executor does, and its socket goes.
        await asyncio.wait_for(asyncio.to_thread(lambda: None), 60)
        await asyncio.wait_for(loop.shutdown_default_executor(), 60)
        assert time.monotonic() - started < 10 * limit_s
        gc.collect()  # an exception's frames hold the group
        assert _listening() <= before


@pytest.mark.parametrize("path", ["/start_weight_update", "/update_weights", "/finish_weight_update"])
async def test_an_engine_that_refuses_later_is_heard_and_resumed(path: str) -> None:
    async with _refusing(path) as (url, asked):
        engine = HttpEngine(url)
        try:
            with pytest.raises(EngineFault, match=f"{path}: 500: no group with you"):
                await engine.publish(1, _streamer("ipc"))
        finally:
            await engine.close()
    assert asked[-1] == "/resume"


@pytest.mark.parametrize("kind", ["ipc", "broadcast"])
async def test_an_engine_that_is_not_there_is_a_fault(kind: Kind) -> None:
    async with _refusing("/health") as (url, _):
        pass
    engine = HttpEngine(url)
    try:
        with pytest.raises(EngineFault, match="is it running"):
            await engine.publish(1, _streamer(kind, limit_s=2.0))
    finally:
        await engine.close()


# Memory that two processes see


def _own_memory_files() -> list[str]:
    found = []
    for file in Path("/proc/self/fd").iterdir():
        try:
            found.append(os.readlink(file))
        except OSError:  # the listing's own
            continue
    return [name for name in found if "sao-weights" in name]


def test_another_process_sees_a_shared_buffer_while_its_block_lasts_and_no_longer() -> None:
    at_rest = set(os.listdir("/dev/shm"))
    with _child(_OPENER) as child:
        with shared_buffer(1000, CPU) as (buffer, handle):
            buffer.copy_(torch.arange(1000) % 253)
            line = json.dumps(handle)
            child.say(line)
            assert bytes.fromhex(child.hear()) == bytes(i % 253 for i in range(1000))
            buffer.zero_()
            child.say(line)
            assert bytes.fromhex(child.hear()) == bytes(1000), "it is the same memory, not a copy of what was there"
            new = set(os.listdir("/dev/shm")) - at_rest
            assert not [name for name in new if "sao" in name]
        assert not _own_memory_files()
        child.say(line)
        assert child.hear().startswith("error:")


def test_what_was_opened_stays_when_the_buffer_is_gone_and_writes_nothing_back() -> None:
    with shared_buffer(64, CPU) as (buffer, handle):
        buffer.fill_(7)
        opened = opened_buffer(handle, CPU)
        opened[0] = 9
        assert buffer[0] == 7
        buffer.zero_()
    assert opened[1:].tolist() == [7] * 63


def test_a_handle_whose_number_is_another_file_by_now_is_refused_and_that_file_is_as_it_was(tmp_path: Path) -> None:
    """A late engine must neither load another file's bytes as weights nor stretch that file."""
    with shared_buffer(4096, CPU) as (_, handle):
        pass
    number = int(handle["path"].rpartition("/")[2])
    log = tmp_path / "log"
    log.write_bytes(b"words" * 10)
    file = os.open(log, os.O_RDWR)
    os.dup2(file, number)  # what the system may do by itself: the lowest free number is next
    try:
        with pytest.raises(ValueError, match="gone"):
            opened_buffer(handle, CPU)
    finally:
        os.close(number)
        if file != number:
            os.close(file)
    assert log.read_bytes() == b"words" * 10
    with shared_buffer(4096, CPU) as (_, later):
        if later["path"] == handle["path"]:
            with pytest.raises(ValueError, match="gone"):
                opened_buffer(handle, CPU)


def test_a_block_that_raises_leaves_no_memory_behind() -> None:
    with pytest.raises(KeyError), shared_buffer(1000, CPU):
        raise KeyError("x")
    assert not _own_memory_files()


# An engine that takes no streams


@pytest.mark.parametrize("kind", ["ipc", "broadcast"])
async def test_the_local_engine_refuses_a_stream_and_serves_on(kind: Kind, tmp_path: Path) -> None:
    torch.set_num_threads(1)
    model = make_model(tmp_path / "model", "dense", 1)
    other = make_model(tmp_path / "other", "dense", 2)
    sampling = SamplingParams(max_tokens=8, seed=5)
    named = sorted(load_file(other / "model.safetensors").items())
    async with local_engine(model, version=3, log=tmp_path / "log", max_context=64) as url:
        engine = HttpEngine(url)
        try:
            before = await engine.generate([1, 2, 3], sampling)
            with pytest.raises(EngineRefused, match="takes no stream"):
                await engine.publish(4, WeightStreamer(lambda: named, kind=kind, limit_s=5.0))
            assert b"false" in await engine._request("GET", "/is_paused", timeout_s=30)
            after = await engine.generate([1, 2, 3], sampling)
            assert (after.token_ids, after.logprobs, after.versions) == (before.token_ids, before.logprobs, (3,) * 8)
            await engine.publish(4, other)
            done = await engine.generate([1, 2, 3], sampling)
            assert set(done.versions) == {4}
            assert done.logprobs != before.logprobs
        finally:
            await engine.close()
