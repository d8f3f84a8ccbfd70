"""Each wire's stream and its whole answer say the same, in the types of the official clients."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from anthropic.types import Message, RawMessageStreamEvent
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

from agent.wire.answer import Answer, Event, Said, Wire
from agent.wire.chat import ChatWire
from agent.wire.completions import CompletionWire
from agent.wire.errors import ApiError
from agent.wire.messages import MessagesWire
from agent.wire.responses_stream import ResponsesWire

HEAD = {"id": "r-1", "created": 1, "model": "tiny"}
CALLS = [
    {"id": f"call_{name}", "type": "function", "function": {"name": name, "arguments": '{"at": "x"}'}}
    for name in ("look", "go")
]
PIECES = [Said("hm, "), Said("well"), Said("", "Let "), Said("", "me ")]
ENTRY = {"token": "a", "logprob": -0.5, "bytes": [97], "top_logprobs": []}
ECHO = {"tools": [], "tool_choice": "auto", "parallel_tool_calls": True, "metadata": {}}


def answer(index: int = 0, *, calls: bool = True, reason: str = "") -> Answer:
    message = {"role": "assistant", "content": "Let me see.", **({"tool_calls": CALLS} if calls else {})}
    return Answer(
        index=index,
        response_id=f"r-{index + 1}",
        message=message,
        reasoning="hm, well",
        rest=Said("", "see."),
        finish_reason=reason or ("tool_calls" if calls else "stop"),
        prompt_tokens=7,
        completion_tokens=5,
        extras={"conversation": "c", "trainable": True},
    )


def stream(wire: Wire, *answers: Answer) -> Iterator[Event]:
    yield from wire.opening()
    for piece in PIECES:
        for one in answers:
            yield from wire.said(one.index, piece)
    for one in reversed(answers):
        yield from wire.answered(one)
    yield from wire.ending(answers)


def test_a_chat_has_its_calls_its_thinking_and_each_choice_its_own_id() -> None:
    wire = ChatWire(HEAD, include_usage=True)
    whole = ChatCompletion.model_validate(wire.whole([answer(), answer(1)]), strict=True)
    assert [choice.response_id for choice in whole.choices] == ["r-1", "r-2"]  # type: ignore[attr-defined]
    message: Any = whole.choices[1].message
    assert [call.function.name for call in message.tool_calls] == ["look", "go"]
    assert message.reasoning_content == message.reasoning == "hm, well"
    assert whole.usage is not None
    assert (whole.usage.prompt_tokens, whole.usage.completion_tokens) == (7, 10)
    events = [data for _, data in stream(ChatWire(HEAD, include_usage=True), answer(), answer(1))]
    chunks = [ChatCompletionChunk.model_validate(data) for data in events]
    for index in (0, 1):
        deltas: list[Any] = [c.delta for chunk in chunks for c in chunk.choices if c.index == index]
        assert deltas[0].role == "assistant"
        assert "".join(d.content or "" for d in deltas) == "Let me see."
        assert "".join(getattr(d, "reasoning_content", "") for d in deltas) == "hm, well"
        assert [call.index for d in deltas for call in d.tool_calls or ()] == [0, 1]
    assert chunks[-1].usage == whole.usage


@pytest.mark.parametrize("calls", [False, True])
def test_a_response_comes_to_be_as_the_official_events_say(calls: bool) -> None:
    head = {"id": "r-1", "created_at": 1.0, "model": "tiny"}
    whole = Response.model_validate(ResponsesWire(head, ECHO).whole([answer(calls=calls)]))
    assert whole.output_text == "Let me see."
    assert [item.type for item in whole.output] == ["reasoning", "message", *["function_call"] * (2 * calls)]
    events: list[Any] = []
    for name, data in stream(ResponsesWire(head, ECHO), answer(calls=calls)):
        assert name == data["type"]
        events.append(TypeAdapter(ResponseStreamEvent).validate_python(data))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert events[-1].type == "response.completed"
    assert events[-1].response.output == whole.output
    text = "".join(event.delta for event in events if event.type == "response.output_text.delta")
    assert text == whole.output_text
    cut = Response.model_validate(ResponsesWire(head, ECHO).whole([answer(calls=False, reason="length")]))
    assert cut.status == "incomplete"


def test_a_message_shows_thinking_only_to_who_asks_for_it() -> None:
    for shows, kinds in (
        (True, ["thinking", "text", "tool_use", "tool_use"]),
        (False, ["text", "tool_use", "tool_use"]),
    ):
        whole = Message.model_validate(MessagesWire("m", "tiny", shows_thinking=shows).whole([answer()]))
        assert [block.type for block in whole.content] == kinds
        assert whole.stop_reason == "tool_use"
        events: list[Any] = [
            TypeAdapter(RawMessageStreamEvent).validate_python(data)
            for _, data in stream(MessagesWire("m", "tiny", shows_thinking=shows), answer())
        ]
        begun = [event.content_block.type for event in events if event.type == "content_block_start"]
        assert begun == kinds
        assert [e.index for e in events if e.type == "content_block_stop"] == list(range(len(kinds)))
        text = "".join(e.delta.text for e in events if e.type == "content_block_delta" and e.delta.type == "text_delta")
        assert text == "Let me see."


def test_a_text_block_of_blanks_is_never_begun() -> None:
    wire = MessagesWire("m", "tiny", shows_thinking=False)
    assert not list(wire.said(0, Said("", "\n ")))
    names = [data.get("delta", {}).get("text") for _, data in wire.said(0, Said("", "x"))]
    assert names == [None, "\n x"]


def test_completions_count_each_prompt_once_and_place_their_tokens() -> None:
    wire = CompletionWire(HEAD, include_usage=True, n=2)
    body = wire.whole([answer(i, calls=False) for i in range(4)])
    assert body["usage"]["prompt_tokens"] == 14
    wire = CompletionWire(HEAD, include_usage=False)
    told = [data for part in (1, 2) for _, data in wire.said(0, Said("", "a" * part, [ENTRY] * part))]
    assert [data["choices"][0]["logprobs"]["text_offset"] for data in told] == [[0], [1, 2]]


def test_errors_in_a_stream_have_their_wires_shape() -> None:
    error = ApiError(503, "the engine failed", code="engine_failed")
    assert ChatWire(HEAD, include_usage=False).failed(error)[1]["error"]["code"] == "engine_failed"
    assert MessagesWire("m", "tiny", shows_thinking=True).failed(error)[1]["error"]["type"] == "api_error"
    name, data = ResponsesWire(HEAD, ECHO).failed(error)
    assert TypeAdapter(ResponseStreamEvent).validate_python(data).type == name == "error"
