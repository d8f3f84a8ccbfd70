"""One reply: tokens from the engine, text to the caller as it comes, and the action segment that is recorded."""

from __future__ import annotations

import contextlib
import json
import uuid
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from typing import Any, Protocol

import msgspec

from agent.engines.base import Completion, EngineFault
from agent.engines.streaming import Partial
from agent.episode import SamplingParams, Segment
from agent.serve.text_stream import Detokenizer, TextFilter
from envs.tool_calls import OPEN, parse_action


class StreamingEngine(Protocol):
    """What is needed of `agent.engines.client.HttpEngine`."""

    def stream(
        self,
        prompt_ids: Sequence[int],
        sampling: SamplingParams,
        *,
        request_id: str | None = None,
        timeout_s: float | None = None,
    ) -> AsyncGenerator[Partial, None]: ...

    async def abort(self, request_id: str) -> None: ...


class Reply(msgspec.Struct, frozen=True):
    """A whole reply. `message` is the assistant's message as the client gets it, in canonical form.

    `action` is what was sampled, up to and including the token that completed a stop string. `rest` is content that
    was held back to the end and not sent yet.
    """

    message: dict[str, Any]
    action: Segment
    finish_reason: str
    rest: str

    @property
    def versions(self) -> list[int]:
        """The policy versions that sampled it, oldest first."""
        return sorted(set(self.action.versions))


async def sample_reply(
    engine: StreamingEngine,
    decode: Callable[[Sequence[int]], str],
    prompt_ids: Sequence[int],
    sampling: SamplingParams,
    *,
    stops: Sequence[str],
    tools: Sequence[dict[str, Any]],
    timeout_s: float,
    on_text: Callable[[str], Awaitable[None]],
) -> Reply:
    """Generate one reply. `on_text` gets every piece of text that is certain, as soon as it is.

    `decode` must give special tokens as text. Raises `EngineFault`; whatever ends it early ends the generation too.
    """
    detokenizer, text = Detokenizer(decode), TextFilter(stops, tools=bool(tools))
    request_id, ends = uuid.uuid4().hex, frozenset(sampling.stop_token_ids)
    seen, cut, completion = 0, 0, None
    async with contextlib.aclosing(
        engine.stream(prompt_ids, sampling, request_id=request_id, timeout_s=timeout_s)
    ) as partials:
        async for partial in partials:
            pieces = []
            for token in partial.token_ids if not cut else ():
                seen += 1
                delta = text.add(detokenizer.add([token] if token not in ends else []))
                pieces.append(delta.text)
                if delta.stopped:
                    cut = seen
                    break
            completion = partial.completion or completion
            if cut and completion is None:
                await engine.abort(request_id)  # its last chunk, which has the versions, comes all the same
            if piece := "".join(pieces):
                await on_text(piece)
    if completion is None:
        raise EngineFault("the engine's stream had no end")
    if cut:
        completion = _cut(completion, cut)
    else:
        if completion.finish_reason == "abort":
            raise EngineFault("the generation was aborted at the engine")
        cut_late = text.add(detokenizer.finish())
        if cut_late.text:
            await on_text(cut_late.text)
    rest = text.finish()
    if rest:
        await on_text(rest)
    return _reply(completion, text, decode, tools)


def _cut(completion: Completion, length: int) -> Completion:
    return Completion(completion.token_ids[:length], completion.logprobs[:length], completion.versions[:length], "stop")


def _reply(
    completion: Completion,
    text: TextFilter,
    decode: Callable[[Sequence[int]], str],
    tools: Sequence[dict[str, Any]],
) -> Reply:
    action = Segment(
        "action",
        completion.token_ids,
        text=decode(completion.token_ids),
        logprobs=completion.logprobs,
        versions=completion.versions,
        finish_reason=completion.finish_reason,
    )
    call = parse_action(text.text, tools).call if tools else None
    if call is None:
        message: dict[str, Any] = {"role": "assistant", "content": text.text}
        return Reply(message, action, completion.finish_reason, text.text[len(text.sent) :])
    # What stands before the call has been sent; a template's thinking before it is part of that.
    content = text.text[: text.text.find(OPEN)]
    arguments = json.dumps(call.arguments, ensure_ascii=False)
    function = {"name": call.name, "arguments": arguments}
    message = {
        "role": "assistant",
        "content": content,
        "tool_calls": [{"id": f"call_{uuid.uuid4().hex[:24]}", "type": "function", "function": function}],
    }
    return Reply(message, action, "tool_calls", "")
