"""One reply: tokens from the engine, text to the caller as it comes, and the action segment that is recorded."""

from __future__ import annotations

import contextlib
import uuid
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from typing import Any, Protocol

import msgspec

from agent.engines.base import Completion, EngineFault
from agent.engines.steering import NO_STEERING, Steering
from agent.engines.stream_reader import Partial
from agent.engines.wire import Likely
from agent.episode import SamplingParams, Segment
from agent.serve.conversations.reasoning import ReasoningFilter
from agent.serve.conversations.reply_text import Detokenizer, TextFilter
from agent.wire.answer import Said
from agent.wire.reply import assistant_message, call_opens, forced_message
from envs.tool_calls import FamilyFormat
from envs.tool_formats.harmony import Harmony

_HARMONY = Harmony()


class StreamingEngine(Protocol):
    """What is needed of `agent.engines.client.HttpEngine`."""

    def stream(
        self,
        prompt_ids: Sequence[int],
        sampling: SamplingParams,
        *,
        request_id: str | None = None,
        timeout_s: float | None = None,
        steering: Steering = NO_STEERING,
    ) -> AsyncGenerator[Partial, None]:
        """Sample one action and give its tokens as they come."""
        ...

    async def abort(self, request_id: str) -> None:
        """End a generation; its stream ends with what there is."""
        ...


class Reply(msgspec.Struct, frozen=True):
    """A whole reply. `message` is the assistant's message as the client gets it, in canonical form, `reasoning` apart.

    `action` is what was sampled, up to and including the token that completed a stop string. `rest` is what was held
    back to the end and not told yet. `logprobs`: OpenAI's entries of the tokens that are shown, if they were asked for.
    """

    message: dict[str, Any]
    action: Segment
    finish_reason: str
    rest: Said
    reasoning: str = ""
    logprobs: list[dict[str, Any]] | None = None

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
    on_text: Callable[[Said], Awaitable[None]],
    steering: Steering = NO_STEERING,
    reasoning: ReasoningFilter | None = None,
    forced: str = "",
    one_call: bool = False,
    entry: Callable[[int, float, Sequence[Likely]], dict[str, Any]] | None = None,
) -> Reply:
    """Generate one reply. `on_text` gets every piece of text that is certain, as soon as it is.

    `steering`, `forced` and `one_call`: see `agent.wire.wishes`; a forced call is told at the end only.
    `entry` makes OpenAI's entry of a token, its log-prob and the likeliest ones; None where no log-probs are asked for.

    `decode` must give special tokens as text, and `tool_format` is the form in which the model writes calls. Raises
    `EngineFault`; whatever ends it early ends the generation too.
    """
    apart = reasoning or ReasoningFilter("none")
    entries: list[dict[str, Any]] = []
    told = 0

    async def tell(piece: str) -> None:
        nonlocal told
        if not forced and (said := apart.add(piece)):
            new, told = entries[told:], len(entries)
            await on_text(msgspec.structs.replace(said, logprobs=new) if new else said)

    detokenizer, text = Detokenizer(decode), TextFilter(stops, opens=call_opens(tools, tool_format))
    request_id, ends = uuid.uuid4().hex, frozenset(sampling.stop_token_ids)
    seen, cut, completion = 0, 0, None
    steered: dict[str, Any] = {} if steering is NO_STEERING else {"steering": steering}
    async with contextlib.aclosing(
        engine.stream(prompt_ids, sampling, request_id=request_id, timeout_s=timeout_s, **steered)
    ) as partials:
        async for partial in partials:
            pieces = []
            for place, token in enumerate(partial.token_ids if not cut else ()):
                seen += 1
                if entry is not None and token not in ends:
                    entries.append(entry(token, partial.logprobs[place], partial.top[place]))
                delta = text.add(detokenizer.add([token] if token not in ends else []))
                pieces.append(delta.text)
                if delta.stopped:
                    cut = seen
                    break
            completion = partial.completion or completion
            if cut and completion is None:
                await engine.abort(request_id)  # its last chunk, which has the versions, comes all the same
            if piece := "".join(pieces):
                await tell(piece)
    if completion is None:
        raise EngineFault("the engine's stream had no end")
    if cut:
        completion = _cut(completion, cut)
    else:
        if completion.finish_reason == "abort":
            raise EngineFault("the generation was aborted at the engine")
        cut_late = text.add(detokenizer.finish())
        if cut_late.text:
            await tell(cut_late.text)
    rest = text.finish()
    if rest:
        await tell(rest)
    reply = _reply(completion, text, apart, decode, tools, tool_format, forced=forced, one_call=one_call)
    if entry is None:
        return reply
    return msgspec.structs.replace(
        reply, rest=msgspec.structs.replace(reply.rest, logprobs=entries[told:]), logprobs=entries
    )


def _cut(completion: Completion, length: int) -> Completion:
    return Completion(completion.token_ids[:length], completion.logprobs[:length], completion.versions[:length], "stop")


def _reply(
    completion: Completion,
    text: TextFilter,
    apart: ReasoningFilter,
    decode: Callable[[Sequence[int]], str],
    tools: Sequence[dict[str, Any]],
    tool_format: FamilyFormat,
    *,
    forced: str,
    one_call: bool,
) -> Reply:
    action = Segment(
        "action",
        completion.token_ids,
        text=decode(completion.token_ids),
        logprobs=completion.logprobs,
        versions=completion.versions,
        finish_reason=completion.finish_reason,
    )
    if forced:
        message = forced_message(text.text, forced)
        rest = Said(content=message["content"])
        thought = ""
    else:
        message = assistant_message(text.text, tools, tool_format, sent=text.sent)
        held, end = apart.add(message["content"][len(text.sent) :]), apart.finish()
        # A turn with channels is told whole, and its thinking stands in one of them.
        channels = _HARMONY.reasoning(text.text) if tool_format == "harmony" and apart.form == "harmony" else ""
        rest = Said(channels + held.reasoning + end.reasoning, held.content + end.content)
        thought, message["content"] = channels + apart.reasoning, apart.content
    if one_call and "tool_calls" in message:
        message["tool_calls"] = message["tool_calls"][:1]
    reason = "tool_calls" if "tool_calls" in message else completion.finish_reason
    return Reply(message, action, reason, rest, thought)
