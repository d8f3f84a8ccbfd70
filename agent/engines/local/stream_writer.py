"""A generation of the `local` engine as server-sent events, in the chunks that `vllm serve` sends."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any

from aiohttp import web

from agent.engines.local.loop import LoopDead, ModelLoop
from agent.engines.local.scheduler import Generation
from agent.event_stream import EventWriter, SlowClient

_WRITE_S = 600.0
_BUFFER_BYTES = 1 << 16


async def stream(
    request: web.Request, engine: ModelLoop, generation: Generation, *, with_logprobs: bool
) -> web.StreamResponse:
    """Run `generation` and send its tokens as they are sampled. A client that goes away aborts it (by cancelling).

    Each chunk has the tokens since the last one; the last has the finish reason and the versions of all tokens.
    What fails after the first byte is sent as a chunk with `error`.
    """
    writer = EventWriter(request, write_s=_WRITE_S, buffer_bytes=_BUFFER_BYTES)
    sampled = asyncio.Event()
    generation.on_token = sampled.set
    running = asyncio.create_task(engine.generate(generation))
    try:
        await writer.start()
        sent = 0
        while not running.done():
            waiting = asyncio.create_task(sampled.wait())
            await asyncio.wait((running, waiting), return_when=asyncio.FIRST_COMPLETED)
            waiting.cancel()
            sampled.clear()
            # Written by the model thread, versions last: what has a version is complete.
            known = len(generation.versions)
            if known > sent and not running.done():
                await writer.send(_chunk(generation, _choice(generation, sent, known, with_logprobs)))
                sent = known
        try:
            await running
            if generation.finish_reason == "error":
                raise LoopDead(f"the weights of version {engine.version} give NaN; publish sound ones")
        except LoopDead as error:
            failure = {"message": str(error), "type": "InternalServerError", "param": None, "code": 500}
            await writer.send({"error": failure})
        else:
            last = _choice(generation, sent, len(generation.versions), with_logprobs)
            last["finish_reason"], last["stop_reason"] = generation.finish_reason, generation.stop_reason
            last["weight_versions"] = version_spans(generation.versions) or None
            await writer.send(_chunk(generation, last))
        await writer.end()
    except SlowClient:
        pass  # it is told nothing more, and the generation ends
    finally:
        running.cancel()
        with contextlib.suppress(asyncio.CancelledError, LoopDead):
            await running
    return writer.response


def logprob_entries(generation: Generation, start: int, end: int) -> list[dict[str, Any]]:
    """Entries of `logprobs.content` for the sampled tokens `start` to `end`."""
    tokens = generation.tokens[generation.prompt_length + start : generation.prompt_length + end]
    tops = generation.top[start:end] or [[]] * len(tokens)
    return [
        {"token_id": t, "logprob": p, "rank": None, "top_logprobs": [{"token_id": i, "logprob": q} for i, q in top]}
        for t, p, top in zip(tokens, generation.logprobs[start:end], tops, strict=True)
    ]


def version_spans(versions: list[int]) -> list[dict[str, Any]]:
    """Runs of equal versions, as [{version, start, end}, ...] over the sampled tokens."""
    spans: list[dict[str, Any]] = []
    for index, version in enumerate(versions):
        if spans and spans[-1]["version"] == str(version):
            spans[-1]["end"] = index + 1
        else:
            spans.append({"version": str(version), "start": index, "end": index + 1})
    return spans


def _choice(generation: Generation, start: int, end: int, with_logprobs: bool) -> dict[str, Any]:
    begin = generation.prompt_length
    return {
        "index": 0,
        "finish_reason": None,
        "stop_reason": None,
        "token_ids": generation.tokens[begin + start : begin + end],
        "logprobs": {"content": logprob_entries(generation, start, end)} if with_logprobs else None,
        "weight_versions": None,
    }


def _chunk(generation: Generation, choice: dict[str, Any]) -> dict[str, Any]:
    return {"request_id": generation.id, "choices": [choice], "usage": None}
