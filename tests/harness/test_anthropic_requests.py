"""Anthropic's messages as the same requests as OpenAI's: nothing gets lost, and what is not served is named."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent.harness.chains import key_of
from agent.wire.anthropic import message_events, message_json, read_messages_request
from agent.wire.errors import ApiError
from agent.wire.request import ChatRequest, canonical

USER = {"role": "user", "content": "hello"}
TOOL = {"name": "python", "description": "Runs code.", "input_schema": {"type": "object", "properties": {}}}


def read(*messages: Any, **keys: Any) -> ChatRequest:
    body = {"model": "m", "max_tokens": 10, "messages": list(messages), **keys}
    return read_messages_request(json.dumps(body).encode())


def test_a_turn_of_tools_becomes_messages_in_the_order_in_which_they_were_said() -> None:
    asked = read(
        USER,
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "hm", "signature": "s"},
                {"type": "text", "text": "I look."},
                {"type": "tool_use", "id": "a", "name": "python", "input": {"code": "1"}},
                {"type": "tool_use", "id": "b", "name": "python", "input": {}},
            ],
        },
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "a", "content": "one"},
                {"type": "tool_result", "tool_use_id": "b", "content": [{"type": "text", "text": "two"}]},
                {"type": "text", "text": "And now?", "cache_control": {"type": "ephemeral"}},
            ],
        },
        system=[{"type": "text", "text": "Be brief."}],
        tools=[TOOL],
        stop_sequences=["END"],
    )
    assert [m["role"] for m in asked.messages] == ["system", "user", "assistant", "tool", "tool", "user"]
    assert [m["content"] for m in asked.messages] == ["Be brief.", "hello", "I look.", "one", "two", "And now?"]
    assert [call["function"]["name"] for call in asked.messages[2]["tool_calls"]] == ["python", "python"]
    assert [m.get("tool_call_id") for m in asked.messages[3:5]] == ["a", "b"]
    assert asked.tools == [
        {
            "type": "function",
            "function": {"name": "python", "parameters": TOOL["input_schema"], "description": "Runs code."},
        }
    ]
    assert (asked.stops, asked.max_tokens) == (("END",), 10)


@pytest.mark.parametrize(
    ("keys", "named"),
    [
        ({"max_tokens": None}, "max_tokens"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"tool_choice": {"type": "tool", "name": "python"}}, "tool_choice='tool'"),
        ({"stop_sequences": [""]}, "stop_sequences"),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "web_search_20250305"),
        ({"tools": [{"name": "x", "input_schema": 3}]}, "tools"),
        ({"messages": []}, "nothing to answer"),
        ({"messages": [USER, {"role": "assistant", "content": "I begin"}]}, "nothing to answer"),
        ({"messages": [{"role": "system", "content": "x"}]}, "role"),
        ({"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]}, "'image'"),
        ({"messages": [{"role": "user", "content": [{"type": "tool_result", "content": "x"}]}]}, "tool_call_id"),
        ({"messages": [{"role": "assistant", "content": [{"type": "tool_use", "name": "x"}]}, USER]}, "tool_use"),
        ({"messages": [{"role": "user", "content": 3}]}, "content"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_is_not_served_is_refused_by_name(keys: dict[str, Any], named: str) -> None:
    with pytest.raises(ApiError, match=named) as refused:
        read_messages_request(json.dumps({"model": "m", "max_tokens": 10, "messages": [USER], **keys}).encode())
    assert refused.value.status == 400
    assert refused.value.anthropic_body["error"]["type"] == "invalid_request_error"


@given(st.binary(max_size=60))
def test_any_bytes_are_a_request_or_an_error_of_the_clients(data: bytes) -> None:
    with pytest.raises(ApiError):
        read_messages_request(data)


_CALLS = st.lists(
    st.tuples(st.sampled_from(["a", "b"]), st.dictionaries(st.text(max_size=3), st.integers())), max_size=2
)


@given(st.text(), _CALLS)
def test_a_reply_that_is_sent_back_is_known_again(content: str, calls: list[tuple[str, dict[str, int]]]) -> None:
    """Whatever its text and its calls: else every turn would begin a branch."""
    content = content.encode("utf-8", "replace").decode()
    message = canonical(
        {
            "role": "assistant",
            "content": content,
            "tool_calls": [
                {"id": f"c{i}", "function": {"name": name, "arguments": json.dumps(arguments)}}
                for i, (name, arguments) in enumerate(calls)
            ],
        }
    )
    body = message_json(message, model="m", finish_reason="stop", tokens=(3, 4))
    asked = read(USER, {"role": "assistant", "content": body["content"]}, USER)
    assert key_of(asked.messages[1]) == key_of(message)
    told = [data for _, data in message_events(body)]
    texts = "".join(d["delta"].get("text", "") for d in told if d["type"] == "content_block_delta")
    assert texts == (content if content.strip() else "")
    assert [d["type"] for d in told].count("content_block_stop") == len(body["content"])
