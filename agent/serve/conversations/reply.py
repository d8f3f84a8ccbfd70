"""One reply: tokens from the engine, text to the caller as it comes, and the action segment that is recorded."""

from __future__ import annotations

import contextlib
import uuid
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from typing import Any, Protocol

import msgspec

from agent.engines.base import Completion, EngineFault
from agent.engines.stream_reader import Partial
from agent.episode import SamplingParams, Segment
from agent.serve.conversations.reply_text import Detokenizer, TextFilter
from agent.wire.reply import assistant_message, call_opens
from envs.tool_calls import FamilyFormat


class StreamingEngine(Protocol):
    """What is needed of `agent.engines.client.HttpEngine`."""

    def stream(
        self,
        prompt_ids: Sequence[int],
        sampling: SamplingParams,
        *,
        request_id: str | None = None,
        timeout_s: float | None = None,
    ) -> AsyncGenerator[Partial, None]:
        """Sample one action and give its tokens as they come."""
        ...

    async def abort(self, request_id: str) -> None:
        """End a generation; its stream ends with what there is."""
        ...


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
    tool_format: FamilyFormat = "hermes",
    timeout_s: float,
    on_text: Callable[[str], Awaitable[None]],
) -> Reply:
    """Generate one reply. `on_text` gets every piece of text that is certain, as soon as it is.

    `decode` must give special tokens as text, and `tool_format` is the form in which the model writes calls. Raises
    `EngineFault`; whatever ends it early ends the generation too.
    """
    detokenizer, text = Detokenizer(decode), TextFilter(stops, opens=call_opens(tools, tool_format))
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
    return _reply(completion, text, decode, tools, tool_format)


def _cut(completion: Completion, length: int) -> Completion:
    return Completion(completion.token_ids[:length], completion.logprobs[:length], completion.versions[:length], "stop")


def _reply(
    completion: Completion,
    text: TextFilter,
    decode: Callable[[Sequence[int]], str],
    tools: Sequence[dict[str, Any]],
    tool_format: FamilyFormat,
) -> Reply:
    action = Segment(
        "action",
        completion.token_ids,
        text=decode(completion.token_ids),
        logprobs=completion.logprobs,
        versions=completion.versions,
        finish_reason=completion.finish_reason,
    )
    message = assistant_message(text.text, tools, tool_format, sent=text.sent)
    reason = "tool_calls" if "tool_calls" in message else completion.finish_reason
    return Reply(message, action, reason, message["content"][len(text.sent) :])
