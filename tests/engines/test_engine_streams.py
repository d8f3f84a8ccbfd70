"""What every engine's stream must do, and what the client makes of broken ones."""

from __future__ import annotations

import asyncio
import contextlib
import itertools

import msgspec
import pytest
from engine_tools import EngineUnderTest
from hypothesis import given
from hypothesis import strategies as st
from test_engine_contract import assert_same, reference, until

from agent.engines.base import EngineFault, EngineRefused
from agent.engines.stream_reader import Partial, StreamReader
from agent.episode import SamplingParams


async def test_a_stream_gives_every_token_once_and_then_the_whole(engine: EngineUnderTest) -> None:
    sampling = SamplingParams(max_tokens=40, seed=3)
    partials = [p async for p in engine.client.stream([1, 2, 3], sampling)]
    done = partials[-1].completion
    assert done is not None
    assert all(p.completion is None for p in partials[:-1])
    assert len(partials) > 10, "tokens come one by one and not at the end"
    assert tuple(t for p in partials for t in p.token_ids) == done.token_ids
    assert tuple(x for p in partials for x in p.logprobs) == done.logprobs
    assert set(done.versions) == {engine.version}
    assert (len(done.token_ids), done.finish_reason) == (40, "length")
    assert_same(done.logprobs, reference(engine.first, [1, 2, 3], done.token_ids))


async def test_a_swap_in_mid_stream_neither_stops_nor_corrupts_it(engine: EngineUnderTest) -> None:
    """Case G6: a publication is seen in the versions and in nothing else."""
    partials: list[Partial] = []
    async with contextlib.aclosing(engine.client.stream([4, 5], SamplingParams(max_tokens=900))) as stream:
        async for partial in stream:
            partials.append(partial)
            if len(partials) == 5:
                publishing = asyncio.create_task(engine.client.publish(engine.version + 1, engine.second))
        await publishing
    done = partials[-1].completion
    assert done is not None
    assert len(done.token_ids) == 900
    assert set(done.versions) == {engine.version, engine.version + 1}
    cut = done.versions.index(engine.version + 1)
    assert_same(done.logprobs[:cut], reference(engine.first, [4, 5], done.token_ids)[:cut])
    assert_same(done.logprobs[cut:], reference(engine.second, [4, 5], done.token_ids)[cut:])


async def test_leaving_a_stream_stops_its_generation(engine: EngineUnderTest) -> None:
    """Case G6: nobody samples for a client that has gone."""
    async with contextlib.aclosing(engine.client.stream([7], SamplingParams(max_tokens=2000))) as stream:
        async for _ in stream:
            break
    await until(engine, lambda health: health.running == 0 and health.waiting == 0)
    assert (await engine.client.health()).tokens_generated >= 1


async def test_cancelling_a_stream_stops_its_generation(engine: EngineUnderTest) -> None:
    """Case G6."""

    async def read() -> None:
        async with contextlib.aclosing(engine.client.stream([7, 8], SamplingParams(max_tokens=2000))) as stream:
            async for _ in stream:
                pass

    task = asyncio.create_task(read())
    await until(engine, lambda health: health.running == 1)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await until(engine, lambda health: health.running == 0)


async def test_an_abort_ends_a_stream_with_what_there_is(engine: EngineUnderTest) -> None:
    count, done = 0, None
    sampling = SamplingParams(max_tokens=2000)
    async with contextlib.aclosing(engine.client.stream([7, 9], sampling, request_id="stopped")) as stream:
        async for partial in stream:
            count += 1
            if count == 4:
                await engine.client.abort("stopped")
            done = partial.completion
    assert done is not None
    assert done.finish_reason == "abort"
    assert 4 <= len(done.token_ids) == len(done.versions) < 2000


async def test_a_bad_request_is_refused_before_the_stream(engine: EngineUnderTest) -> None:
    with pytest.raises(EngineRefused):
        async for _ in engine.client.stream([], SamplingParams(max_tokens=2)):
            pass


async def test_the_time_limit_ends_a_stream(engine: EngineUnderTest) -> None:
    with pytest.raises(EngineFault, match="no end within"):
        async for _ in engine.client.stream([7, 1], SamplingParams(max_tokens=2000), timeout_s=0.05):
            pass
    await until(engine, lambda health: health.running == 0)


async def test_weights_that_give_nan_end_a_stream_with_a_fault(engine: EngineUnderTest) -> None:
    await engine.client.publish(engine.version + 1, engine.broken)
    with pytest.raises(EngineFault):
        async for _ in engine.client.stream([1, 2], SamplingParams(max_tokens=4)):
            pass


async def test_many_streams_at_once_all_end(engine: EngineUnderTest) -> None:
    async def run(i: int) -> int:
        partials = [p async for p in engine.client.stream([1, i % 90], SamplingParams(max_tokens=1 + i % 9))]
        return sum(len(p.token_ids) for p in partials)

    assert await asyncio.gather(*(run(i) for i in range(100))) == [1 + i % 9 for i in range(100)]


def _chunk(tokens: list[int], finish: str | None = None) -> bytes:
    choice = {
        "token_ids": tokens,
        "finish_reason": finish,
        "logprobs": {"content": [{"token_id": t, "logprob": -0.5} for t in tokens]},
        "weight_versions": [{"version": "2", "start": 0, "end": 6}] if finish else None,
    }
    return b"data: " + msgspec.json.encode({"choices": [choice]}) + b"\n\n"


STREAM = _chunk([1, 2]) + _chunk([3]) + _chunk([4, 5, 6], "stop") + b"data: [DONE]\n\n"


@given(st.lists(st.integers(0, len(STREAM)), max_size=30))
def test_a_stream_cut_anywhere_reads_the_same(cuts: list[int]) -> None:
    reader, edges = StreamReader("http://x"), sorted({0, *cuts, len(STREAM)})
    blocks = [STREAM[a:b] for a, b in itertools.pairwise(edges)]
    partials = [p for block in blocks for p in reader.feed(block)]
    assert [p.token_ids for p in partials] == [(1, 2), (3,), (4, 5, 6)]
    assert partials[-1].completion is not None
    assert partials[-1].completion.versions == (2,) * 6


@pytest.mark.parametrize(
    "data",
    [
        b"data: {\n",
        b'data: {"error": {"message": "out of memory"}}\n',
        b'data: {"choices": [{"token_ids": [1], "logprobs": null}]}\n',
        b'data: {"choices": [{"token_ids": [1], "logprobs": {"content": [{"token_id": 1, "logprob": null}]}}]}\n',
        _chunk([1], "stop"),  # versions of six tokens
        STREAM + _chunk([1]),
    ],
)
def test_a_broken_stream_is_a_fault_and_is_never_repaired(data: bytes) -> None:
    """Case B4, in a stream."""
    with pytest.raises(EngineFault):
        list(StreamReader("http://x").feed(data))
