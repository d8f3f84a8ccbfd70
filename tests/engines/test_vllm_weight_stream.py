"""Weights that go from this process's memory to a real vLLM server, and what becomes of it when they do not arrive."""

from __future__ import annotations

import asyncio
import functools
import os
import signal
import threading
import time
from asyncio.subprocess import Process
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import psutil
import pytest
from aiohttp import web
from engine_tools import VLLM_READY_S, VLLM_TEST_S, VOCABULARY, EngineUnderTest, make_model
from safetensors.torch import load_file
from test_engine_contract import assert_same, reference
from torch import Tensor
from vllm_tools import have_vllm

from agent.child_processes import log_tail, stop_child
from agent.engines.base import Call, Completion, EngineFault
from agent.engines.client import HttpEngine
from agent.engines.vllm.launch import launch_vllm
from agent.engines.weight_stream import Kind, WeightStreamer, manifest_of
from agent.episode import SamplingParams

BUCKET_BYTES = 60_000  # less than a layer
LIMIT_S = 60.0
PROMPT = [(7 * i) % VOCABULARY for i in range(300)]  # longer than a block of the cache
SAMPLING = SamplingParams(max_tokens=12, seed=11)
LONG = 1500  # tokens: as in test_engine_contract.py

_slow = [pytest.mark.vllm, pytest.mark.timeout(VLLM_TEST_S)]
# The servers of the contract suite, once each.
on_every_vllm = pytest.mark.parametrize(
    "server",
    [pytest.param(name, marks=[*_slow, pytest.mark.xdist_group(name)]) for name in ("vllm-dense", "vllm-moe")],
    indirect=True,
)
on_one_vllm = pytest.mark.parametrize(
    "server", [pytest.param("vllm-dense", marks=[*_slow, pytest.mark.xdist_group("vllm-dense")])], indirect=True
)
by_both_ways = pytest.mark.parametrize("kind", ["broadcast", "ipc"])


@functools.cache
def _tensors(folder: Path) -> list[tuple[str, Tensor]]:
    return sorted(load_file(folder / "model.safetensors").items())


def _stream(folder: Path, kind: Kind, **options: Any) -> WeightStreamer:
    return WeightStreamer(lambda: _tensors(folder), kind=kind, bucket_bytes=BUCKET_BYTES, limit_s=LIMIT_S, **options)


async def _is_paused(client: HttpEngine) -> bool:
    async with aiohttp.ClientSession() as session, session.get(client.url + "/is_paused") as response:
        return bool((await response.json())["is_paused"])


async def _assert_serves(engine: EngineUnderTest, version: int, logprobs: tuple[float, ...]) -> None:
    assert not await _is_paused(engine.client)
    done = await engine.client.generate(PROMPT, SAMPLING)
    assert set(done.versions) == {version}
    assert (await engine.client.health()).version == version
    assert done.logprobs == pytest.approx(logprobs, abs=1e-6)


def _assert_swapped(engine: EngineUnderTest, prompt: list[int], done: Completion, old: int) -> None:
    """Its tokens are of `first` under the version `old`, and then of `second`, which sees the old ones as its own."""
    assert sorted(done.versions) == list(done.versions)
    assert set(done.versions) == {old, old + 1}
    cut = done.versions.index(old + 1)
    assert_same(done.logprobs[:cut], reference(engine.first, prompt, done.token_ids)[:cut])
    assert_same(done.logprobs[cut:], reference(engine.second, prompt, done.token_ids)[cut:])


async def _expected(engine: EngineUnderTest) -> tuple[Completion, Completion]:
    """What `second` and then `first` give when they come as folders, from versions 1 and 2 on; `first` is served."""
    given = []
    for folder in (engine.second, engine.first):
        engine.version += 1
        await engine.client.publish(engine.version, folder)
        given.append(await engine.client.generate(PROMPT, SAMPLING))
    second, first = given
    assert max(abs(a - b) for a, b in zip(first.logprobs, second.logprobs, strict=True)) > 1e-2
    return first, second


if have_vllm():  # or else not collected, as in conftest.py

    @on_every_vllm
    async def test_streamed_weights_are_the_published_ones(engine: EngineUnderTest) -> None:
        """Bit for bit what comes of the same snapshot's folder; back and forth, so that no old packed copy is read."""
        first, second = await _expected(engine)
        largest_layer = max(sum(t.nbytes for n, t in _tensors(engine.second) if f"layers.{i}." in n) for i in range(24))
        assert largest_layer > BUCKET_BYTES, "no layer is split over buckets"
        for kind in ("broadcast", "ipc"):
            for folder, expected in ((engine.second, second), (engine.first, first)):
                engine.version += 1
                await engine.client.publish(engine.version, _stream(folder, kind))
                await _assert_serves(engine, engine.version, expected.logprobs)
                assert_same(expected.logprobs, reference(folder, PROMPT, expected.token_ids))

    @on_every_vllm
    @by_both_ways
    async def test_a_stream_in_flight_keeps_tokens_and_marks_versions(engine: EngineUnderTest, kind: Kind) -> None:
        """Case A20, from memory."""
        client, old = engine.client, engine.version
        start = (await client.health()).tokens_generated
        running = [
            asyncio.create_task(
                client.generate([1, 2, i], SamplingParams(max_tokens=LONG), request_id=f"{kind}-flight-{i}")
            )
            for i in range(4)
        ]
        await _until_sampled(client, start + 100)
        await client.publish(old + 1, _stream(engine.second, kind))
        await _until_sampled(client, (await client.health()).tokens_generated + 100)
        for i in range(4):
            await client.abort(f"{kind}-flight-{i}")
        for i, done in enumerate(await asyncio.gather(*running)):
            _assert_swapped(engine, [1, 2, i], done, old)

    @on_one_vllm
    @pytest.mark.parametrize(
        ("kind", "fault"), [("ipc", "missing"), ("ipc", "unknown"), ("ipc", "shape"), ("broadcast", "shape")]
    )
    async def test_another_models_stream_is_refused_and_changes_nothing(
        engine: EngineUnderTest, kind: Kind, fault: str
    ) -> None:
        before = await engine.client.generate(PROMPT, SAMPLING)
        named = list(_tensors(engine.second))
        name, tensor = named.pop()
        if fault == "unknown":
            named += [(name, tensor), ("model.extra.weight", tensor)]
        elif fault == "shape":
            named.append((name, tensor[:-1]))
        with pytest.raises(EngineFault):
            await engine.client.publish(
                engine.version + 1, WeightStreamer(lambda: named, kind=kind, bucket_bytes=BUCKET_BYTES, limit_s=LIMIT_S)
            )
        await _assert_serves(engine, engine.version, before.logprobs)
        await engine.client.publish(engine.version + 1, _stream(engine.second, kind))
        done = await engine.client.generate(PROMPT, SAMPLING)
        assert set(done.versions) == {engine.version + 1}
        assert done.logprobs != before.logprobs

    @on_one_vllm
    @by_both_ways
    async def test_a_source_that_fails_before_a_bucket_harms_nobody(engine: EngineUnderTest, kind: Kind) -> None:
        first, second = await _expected(engine)
        with pytest.raises(OutOfMemory):
            await engine.client.publish(engine.version + 1, _failing(engine.second, kind, buckets=0))
        await _assert_serves(engine, engine.version, first.logprobs)
        await engine.client.publish(engine.version + 1, _stream(engine.second, kind))
        await _assert_serves(engine, engine.version + 1, second.logprobs)

    @on_one_vllm
    @by_both_ways
    async def test_a_publication_that_is_cancelled_before_the_first_bucket_harms_nobody(
        engine: EngineUnderTest, kind: Kind
    ) -> None:
        first, second = await _expected(engine)
        loop, asked, may_go = asyncio.get_running_loop(), asyncio.Event(), threading.Event()
        passes = 0

        def source() -> Iterator[tuple[str, Tensor]]:
            nonlocal passes
            passes += 1
            if passes == 2:  # the first one makes the manifest
                loop.call_soon_threadsafe(asked.set)
                may_go.wait(LIMIT_S)
            yield from _tensors(engine.second)

        weights = WeightStreamer(source, kind=kind, bucket_bytes=BUCKET_BYTES, limit_s=LIMIT_S)
        publishing = asyncio.create_task(engine.client.publish(engine.version + 1, weights))
        await asyncio.wait_for(asked.wait(), LIMIT_S)
        assert await _is_paused(engine.client)
        publishing.cancel()
        try:
            with pytest.raises(asyncio.CancelledError):
                await publishing
        finally:
            may_go.set()
        await _assert_serves(engine, engine.version, first.logprobs)
        await engine.client.publish(engine.version + 1, _stream(engine.second, kind))
        await _assert_serves(engine, engine.version + 1, second.logprobs)

    @on_one_vllm
    async def test_a_publication_that_is_cancelled_at_its_start_leaves_no_update_open(engine: EngineUnderTest) -> None:
        """The start has reached the engine, its answer has not come back: the next publication must not be refused."""
        first, second = await _expected(engine)
        async with _slow_road(engine.client.url, "/start_weight_update") as (url, arrived):
            client = HttpEngine(url)
            publishing = asyncio.create_task(client.publish(engine.version + 1, _stream(engine.second, "ipc")))
            await asyncio.wait_for(arrived.wait(), LIMIT_S)
            publishing.cancel()
            with pytest.raises(asyncio.CancelledError):
                await publishing
            await client.close()
        await _assert_serves(engine, engine.version, first.logprobs)
        await engine.client.publish(engine.version + 1, _stream(engine.second, "ipc"))
        await _assert_serves(engine, engine.version + 1, second.logprobs)

    @on_one_vllm
    async def test_a_publication_that_is_cancelled_at_its_end_serves_no_old_cache(engine: EngineUnderTest) -> None:
        """Case D6: the new weights are in, so the keys and values of the old ones must go all the same."""
        old, start = engine.version, (await engine.client.health()).tokens_generated
        sampling = SamplingParams(max_tokens=LONG)
        running = asyncio.create_task(engine.client.generate(PROMPT, sampling, request_id="at-the-end"))
        await _until_sampled(engine.client, start + 50)
        async with _slow_road(engine.client.url, "/finish_weight_update", hold=False) as (url, arrived):
            client = HttpEngine(url)
            publishing = asyncio.create_task(client.publish(engine.version + 1, _stream(engine.second, "ipc")))
            await asyncio.wait_for(arrived.wait(), LIMIT_S)
            publishing.cancel()
            with pytest.raises(asyncio.CancelledError):
                await publishing
            await client.close()
        assert not await _is_paused(engine.client)
        await _until_sampled(engine.client, (await engine.client.health()).tokens_generated + 50)
        await engine.client.abort("at-the-end")
        _assert_swapped(engine, PROMPT, await running, old)

    @on_one_vllm
    async def test_an_update_that_a_killed_trainer_left_open_is_cleared_up(engine: EngineUnderTest) -> None:
        """The first publication after it may fail, the second does not."""
        first, second = await _expected(engine)
        async with aiohttp.ClientSession(engine.client.url) as session:
            for path in ("/pause?mode=keep", "/start_weight_update"):
                async with session.post(path) as response:
                    assert response.status == 200
        with pytest.raises(EngineFault, match="start_weight_update"):
            await engine.client.publish(engine.version + 1, _stream(engine.second, "broadcast"))
        await _assert_serves(engine, engine.version, first.logprobs)
        await engine.client.publish(engine.version + 1, _stream(engine.second, "broadcast"))
        await _assert_serves(engine, engine.version + 1, second.logprobs)

    @on_one_vllm
    async def test_memory_that_is_gone_before_anything_was_loaded_is_refused(engine: EngineUnderTest) -> None:
        first, second = await _expected(engine)
        with pytest.raises(EngineFault):
            await engine.client.publish(engine.version + 1, _Gone(_tensors(engine.second)))
        await _assert_serves(engine, engine.version, first.logprobs)
        await engine.client.publish(engine.version + 1, _stream(engine.second, "ipc"))
        await _assert_serves(engine, engine.version + 1, second.logprobs)

    @on_one_vllm
    @by_both_ways
    async def test_sound_weights_after_nan_are_sound(engine: EngineUnderTest, kind: Kind) -> None:
        first, _ = await _expected(engine)
        await engine.client.publish(engine.version + 1, _stream(engine.broken, kind))
        with pytest.raises(EngineFault):
            await engine.client.generate(PROMPT, SAMPLING)
        await engine.client.publish(engine.version + 2, _stream(engine.first, kind))
        await _assert_serves(engine, engine.version + 2, first.logprobs)

    # Engines that must end have a server of their own each.

    @pytest.mark.vllm
    @pytest.mark.timeout(VLLM_TEST_S)
    @pytest.mark.xdist_group("vllm-dense")
    async def test_an_engine_with_half_of_its_weights_new_ends_itself(tmp_path: Path) -> None:
        """A token that is sampled from half of the weights would be worse than none."""
        async with _doomed(tmp_path) as (process, client, second):
            with pytest.raises(OutOfMemory):
                await client.publish(1, _failing(second, "ipc", buckets=2))
            await asyncio.wait_for(process.wait(), 120)
            assert "abandoned after" in log_tail(tmp_path / "log", 100_000)

    @pytest.mark.vllm
    @pytest.mark.timeout(VLLM_TEST_S)
    @pytest.mark.xdist_group("vllm-moe")
    async def test_an_engine_that_is_killed_in_the_middle_of_a_broadcast_is_a_fault(tmp_path: Path) -> None:
        async with _doomed(tmp_path) as (process, client, second):
            passes = 0

            def source() -> Iterator[tuple[str, Tensor]]:
                nonlocal passes
                passes += 1
                for i, named in enumerate(_tensors(second)):
                    if passes == 2 and i == 6:  # some buckets are through
                        os.killpg(process.pid, signal.SIGKILL)
                    yield named

            started = time.monotonic()
            with pytest.raises(EngineFault):
                await client.publish(1, WeightStreamer(source, kind="broadcast", bucket_bytes=1, limit_s=20.0))
            assert passes == 2
            assert time.monotonic() - started < 100
            await asyncio.wait_for(process.wait(), 60)


class OutOfMemory(Exception):
    """What a trainer's source may fail with: no fault of an engine's."""


def _failing(folder: Path, kind: Kind, *, buckets: int) -> WeightStreamer:
    """A stream of buckets with one tensor each, which fails after some."""
    passes = 0

    def source() -> Iterator[tuple[str, Tensor]]:
        nonlocal passes
        passes += 1
        for i, named in enumerate(_tensors(folder)):
            # A bucket goes out when the next tensor has come.
            if passes == 2 and i == (buckets and buckets + 1):
                raise OutOfMemory
            yield named

    return WeightStreamer(source, kind=kind, bucket_bytes=1, limit_s=LIMIT_S)


class _Gone:
    """A stream whose first bucket is in memory that is not there any more."""

    def __init__(self, named: list[tuple[str, Tensor]]) -> None:
        self._named = named

    @asynccontextmanager
    async def connected(self, url: str, call: Call) -> AsyncIterator[Callable[[], Awaitable[object]]]:
        async def send() -> None:
            handle = {"path": f"/proc/{os.getpid()}/fd/999999", "size": 64, "name": "sao-weights-x"}
            await call("POST", "/update_weights", {"update_info": {"manifest": manifest_of(self._named)}})
            await call("POST", "/update_weights", {"update_info": {"bucket": [self._named[0][0]], "shared": handle}})

        yield send


@asynccontextmanager
async def _doomed(tmp: Path) -> AsyncIterator[tuple[Process, HttpEngine, Path]]:
    """A server of one layer, its client, and another snapshot; none of its processes is left in the end."""
    first, second = (make_model(tmp / str(i), "dense", i, head_dim=32, num_hidden_layers=1) for i in (1, 2))
    limits = {"max_context": 64, "max_sequences": 2, "ready_timeout_s": VLLM_READY_S}
    process, url = await launch_vllm(first, version=0, log=tmp / "log", dtype="float32", **limits)
    children = psutil.Process(process.pid).children(recursive=True)
    client = HttpEngine(url)
    try:
        yield process, client, second
    finally:
        await client.close()
        await stop_child(process)
    await asyncio.to_thread(psutil.wait_procs, children, 60)
    assert not [child for child in children if child.is_running() and child.status() != psutil.STATUS_ZOMBIE]


@asynccontextmanager
async def _slow_road(url: str, path: str, *, hold: bool = True) -> AsyncIterator[tuple[str, asyncio.Event]]:
    """A proxy that says when the engine has answered `path`, and with `hold` keeps the answer to itself."""
    arrived, over = asyncio.Event(), asyncio.Event()

    async def forward(request: web.Request) -> web.Response:
        call = session.request(request.method, url + str(request.rel_url), data=await request.read() or None)
        if request.path == path and not hold:
            arrived.set()
        async with call as response:
            content = await response.read()
        if request.path == path and hold:
            arrived.set()
            await over.wait()
        return web.Response(body=content, status=response.status)

    app = web.Application()
    app.router.add_route("*", "/{path:.*}", forward)
    runner = web.AppRunner(app, shutdown_timeout=5)
    headers = {"Content-Type": "application/json", "Connection": "close"}
    async with aiohttp.ClientSession(headers=headers) as session:
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        try:
            yield f"http://127.0.0.1:{runner.addresses[0][1]}", arrived
        finally:
            over.set()
            await runner.cleanup()


async def _until_sampled(client: HttpEngine, tokens: int) -> None:
    deadline = time.monotonic() + 120
    while (await client.health()).tokens_generated < tokens:
        assert time.monotonic() < deadline
        await asyncio.sleep(0.005)
