"""A reply from its tokens: tool calls, stop strings, aborts. The engine is a real one that says what it is told to."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from pathlib import Path
from typing import Any

import pytest

from agent.chat.renderer import ChatRenderer
from agent.engines.base import Completion, EngineFault
from agent.engines.stream_reader import Partial
from agent.episode import SamplingParams
from agent.serve.conversations.reasoning import ReasoningFilter
from agent.serve.conversations.reply import Reply, sample_reply
from agent.wire.answer import Said
from agent.wire.reply import forced_message
from agent.wire.request import canonical

TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": "look",
            "parameters": {"type": "object", "properties": {"at": {"type": "string"}}, "required": ["at"]},
        },
    }
]
CALL = '<tool_call>{"name": "look", "arguments": {"at": "好的"}}</tool_call>'


class Says:
    """Streams `ids` one by one under version 1, the second half under version 2; an abort ends it with what it has."""

    def __init__(self, ids: Sequence[int], finish_reason: str = "stop") -> None:
        self.ids, self.finish_reason = ids, finish_reason
        self.aborted = False

    async def stream(
        self,
        prompt_ids: Sequence[int],
        sampling: SamplingParams,
        *,
        request_id: str | None = None,
        timeout_s: float | None = None,
    ) -> AsyncGenerator[Partial, None]:
        said = 0
        for token in self.ids:
            if self.aborted:
                break
            said += 1
            yield Partial((token,), (-0.5,))
        versions = tuple(1 if i < len(self.ids) // 2 else 2 for i in range(said))
        reason = "abort" if self.aborted else self.finish_reason
        yield Partial((), (), Completion(tuple(self.ids[:said]), (-0.5,) * said, versions, reason))

    async def abort(self, request_id: str) -> None:
        self.aborted = True


@pytest.fixture(scope="session")
def renderer(models: tuple[Path, Path]) -> ChatRenderer:
    return ChatRenderer.from_pretrained(models[0])


async def reply(
    renderer: ChatRenderer,
    text: str,
    *,
    stops: Sequence[str] = (),
    tools: Sequence[dict[str, Any]] = (),
    tool_format: Any = "hermes",
    **engine: Any,
) -> tuple[Reply, str]:
    sent: list[str] = []

    async def take(piece: Said) -> None:
        sent.append(piece.content)

    sampling = SamplingParams(stop_token_ids=renderer.stop_token_ids)
    says = Says(renderer.encode_action(text), **engine)
    made = await sample_reply(
        says,
        renderer.decode,
        (1,),
        sampling,
        stops=stops,
        tools=tools,
        tool_format=tool_format,
        timeout_s=5,
        on_text=take,
    )
    return made, "".join(sent)


async def test_a_tool_call_is_given_as_one_and_its_text_is_not(renderer: ChatRenderer) -> None:
    made, sent = await reply(renderer, "Let me see. " + CALL, tools=TOOLS)
    assert sent == made.message["content"] == "Let me see. "
    [call] = made.message["tool_calls"]
    assert call["function"] == {"name": "look", "arguments": '{"at": "好的"}'}
    assert made.finish_reason == "tool_calls"
    assert made.action.token_ids == renderer.encode_action("Let me see. " + CALL), "the record is what was sampled"
    assert canonical(made.message) == made.message, "what the client sends back is recognised"
    assert made.versions == [1, 2]


@pytest.mark.parametrize("text", ["<tool_call>{broken</tool_call>", "x <tool_call>", CALL + "<tool_call>", CALL[:-3]])
async def test_what_is_no_sound_call_is_content(renderer: ChatRenderer, text: str) -> None:
    made, sent = await reply(renderer, text, tools=TOOLS)
    assert "tool_calls" not in made.message
    assert sent + made.rest.content == made.message["content"] == text


async def test_two_calls_in_one_reply_are_two(renderer: ChatRenderer) -> None:
    made, sent = await reply(renderer, f"Both: {CALL}\n{CALL}", tools=TOOLS)
    assert sent + made.rest.content == made.message["content"] == "Both: "
    assert [call["function"]["arguments"] for call in made.message["tool_calls"]] == ['{"at": "好的"}'] * 2
    assert len({call["id"] for call in made.message["tool_calls"]}) == 2
    assert canonical(made.message) == made.message


@pytest.mark.parametrize("thought", ["<think>a <tool_call> maybe</think>", "a <tool_call> maybe</think>"])
async def test_a_tag_inside_thinking_does_not_cut_the_content(renderer: ChatRenderer, thought: str) -> None:
    made, sent = await reply(renderer, f"{thought}Let me see. {CALL}", tools=TOOLS)
    assert sent + made.rest.content == made.message["content"] == f"{thought}Let me see. "
    assert len(made.message["tool_calls"]) == 1


async def test_a_tag_in_an_argument_does_not_let_half_a_call_out(renderer: ChatRenderer) -> None:
    call = CALL.replace("好的", "<think></think>")
    made, sent = await reply(renderer, call, tools=TOOLS)
    assert sent == made.rest.content == made.message["content"] == ""
    assert len(made.message["tool_calls"]) == 1


async def test_calls_of_another_family_are_read_in_its_form(renderer: ChatRenderer) -> None:
    text = '{"name": "look", "parameters": {"at": "x"}}; {"name": "look", "parameters": {"at": "y"}}'
    made, sent = await reply(renderer, text, tools=TOOLS, tool_format="llama3")
    assert sent == made.message["content"] == ""
    assert [call["function"]["arguments"] for call in made.message["tool_calls"]] == ['{"at": "x"}', '{"at": "y"}']


async def test_of_a_turn_with_channels_only_what_is_said_is_content(renderer: ChatRenderer) -> None:
    text = "<|channel|>analysis<|message|>hm<|end|><|start|>assistant<|channel|>final<|message|>42"
    made, sent = await reply(renderer, text, tool_format="harmony")
    assert (sent, made.rest.content, made.message["content"]) == ("", "42", "42")
    assert made.action.token_ids == renderer.encode_action(text)


async def test_without_tools_a_call_is_only_text(renderer: ChatRenderer) -> None:
    made, sent = await reply(renderer, CALL)
    assert sent == made.message["content"] == CALL


async def test_a_stop_string_ends_the_action_at_the_token_that_completed_it(renderer: ChatRenderer) -> None:
    made, sent = await reply(renderer, "one two three four", stops=["thr"])
    assert sent == made.message["content"] == "one two "
    assert made.finish_reason == "stop"
    text = renderer.decode(made.action.token_ids)
    assert "thr" in text
    assert "thr" not in renderer.decode(made.action.token_ids[:-1])
    assert len(made.action.logprobs) == len(made.action.versions) == len(made.action.token_ids)


async def test_an_abort_from_outside_is_a_fault_and_not_a_reply(renderer: ChatRenderer) -> None:
    with pytest.raises(EngineFault, match="aborted"):
        await reply(renderer, "half", finish_reason="abort")


async def test_an_empty_reply_is_a_reply(renderer: ChatRenderer) -> None:
    made, sent = await reply(renderer, "")
    assert (sent, made.message["content"], made.finish_reason) == ("", "", "stop")
    assert len(made.action.token_ids) == 1


async def test_thinking_is_told_apart_and_the_calls_behind_it_are_calls(renderer: ChatRenderer) -> None:
    pieces: list[Said] = []

    async def take(said: Said) -> None:
        pieces.append(said)

    made = await sample_reply(
        Says(renderer.encode_action(f"<think>\na <tool_call> maybe\n</think>\n\nBoth: {CALL}\n{CALL}")),
        renderer.decode,
        (1,),
        SamplingParams(stop_token_ids=renderer.stop_token_ids),
        stops=(),
        tools=TOOLS,
        timeout_s=5,
        on_text=take,
        reasoning=ReasoningFilter("think"),
        one_call=True,
    )
    assert made.reasoning == "a <tool_call> maybe"
    assert made.message["content"] == "Both: "
    assert "".join(p.content for p in pieces) + made.rest.content == "Both: "
    assert "".join(p.reasoning for p in pieces) + made.rest.reasoning == made.reasoning
    assert len(made.message["tool_calls"]) == 1, "the client has asked for one call at a time"


async def test_what_gpt_oss_thinks_is_the_channel_that_nobody_is_told(renderer: ChatRenderer) -> None:
    text = "<|channel|>analysis<|message|>hm<|end|><|start|>assistant<|channel|>final<|message|>42"
    made = await sample_reply(
        Says(renderer.encode_action(text)),
        renderer.decode,
        (1,),
        SamplingParams(stop_token_ids=renderer.stop_token_ids),
        stops=(),
        tools=(),
        tool_format="harmony",
        timeout_s=5,
        on_text=lambda said: asyncio.sleep(0),
        reasoning=ReasoningFilter("harmony"),
    )
    assert (made.rest.reasoning, made.rest.content, made.message["content"]) == ("hm", "42", "42")


@pytest.mark.parametrize(
    ("forced", "text", "names"),
    [
        ("look", '{"at": "x"}', ["look"]),
        ("*", '[{"name": "look", "parameters": {"at": "x"}}, {"name": "go", "parameters": {}}]', ["look", "go"]),
        ("*", '[{"name": "look", "parameters": {"at": "x"', None),
    ],
)
def test_a_reply_that_was_held_to_calls_is_read_as_calls(forced: str, text: str, names: list[str] | None) -> None:
    message = forced_message(text, forced)
    if names is None:
        assert message == {"role": "assistant", "content": text}, "cut off: shown as it is"
    else:
        assert [call["function"]["name"] for call in message["tool_calls"]] == names
        assert canonical(message) == message
