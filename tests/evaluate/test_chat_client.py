"""The one client of chat endpoints, against a real HTTP server that fails in every way endpoints do."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from typing import Any

import pytest
from aiohttp import web
from chat_server import ChatServer, call, completion, refuses

from agent.evaluate.config import Endpoint, EvaluationError, Pacing, Sampling, WrongArgument
from agent.evaluate.endpoint.client import (
    FIRST_TRIES,
    ChatClient,
    ContextFull,
    Counts,
    EndpointFault,
    EndpointUnusable,
)
from agent.evaluate.endpoint.wire import Reply
from agent.runtime.episode_clock import EpisodeClock

KEY = "sk-this-is-secret-0123456789"
QUESTION = [{"role": "user", "content": "hello"}]


def hello(body: dict[str, Any]) -> dict[str, Any]:
    return {"content": "hi"}


@pytest.fixture
async def server() -> AsyncIterator[ChatServer]:
    async with ChatServer(hello).running() as running:
        yield running


@pytest.fixture
async def client(server: ChatServer, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[ChatClient]:
    made = make(server, monkeypatch)
    yield made
    await made.aclose()


def make(
    server: ChatServer, monkeypatch: pytest.MonkeyPatch, sampling: Sampling | None = None, **pacing: float
) -> ChatClient:
    monkeypatch.setenv("TEST_KEY", KEY)
    endpoint = Endpoint(url=server.url, model="m", api_key_env="TEST_KEY")
    return ChatClient(endpoint, sampling or Sampling(), Pacing.model_validate(pacing))


async def ask(client: ChatClient, counts: Counts | None = None, **options: Any) -> Reply:
    return await client.ask(QUESTION, [], clock=options.pop("clock", EpisodeClock(60)), counts=counts, **options)


def fails(times: int, answer: Any) -> Any:
    async def door(number: int, body: dict[str, Any]) -> web.Response | None:
        return answer() if number <= times else None

    return door


async def test_a_turn_and_what_it_cost(client: ChatClient, server: ChatServer) -> None:
    server.script = lambda body: {
        "content": "hi",
        "reasoning": "hm",
        "tool_calls": [call("python", {"code": "1"}, "a")],
        "usage": {
            "prompt_tokens": 7,
            "completion_tokens": 5,
            "prompt_tokens_details": {"cached_tokens": 4},
            "completion_tokens_details": {"reasoning_tokens": 3},
        },
    }
    reply = await ask(client)
    assert (reply.content, reply.reasoning, reply.finish) == ("hi", "hm", "tool_calls")
    assert [(c.id, c.name, c.arguments) for c in reply.calls] == [("a", "python", '{"code": "1"}')]
    assert (reply.tokens.prompt, reply.tokens.completion, reply.tokens.cached, reply.tokens.reasoning) == (7, 5, 4, 3)
    assert server.headers[0]["Authorization"] == f"Bearer {KEY}"
    assert set(server.bodies[0]) == {"model", "messages"}  # what was not asked for is the endpoint's own choice


async def test_what_is_asked_for_is_sent(server: ChatServer, monkeypatch: pytest.MonkeyPatch) -> None:
    endpoint = Endpoint(url=server.url, model="m", calls="text", body={"reasoning_effort": "low"})
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    client = ChatClient(endpoint, Sampling(temperature=0, top_p=0.9, max_tokens=5), Pacing())
    try:
        tools = [{"type": "function", "function": {"name": "f"}}]
        await client.ask(QUESTION, tools, clock=EpisodeClock(60), seed=3)
    finally:
        await client.aclose()
    body = server.bodies[0]
    assert {key: body[key] for key in ("temperature", "top_p", "max_tokens", "seed")} == {
        "temperature": 0, "top_p": 0.9, "max_tokens": 5, "seed": 3,
    }  # fmt: skip
    assert (body["tools"], body["tool_choice"], body["reasoning_effort"]) == (tools, "none", "low")
    assert "Authorization" not in server.headers[0]


@pytest.mark.parametrize(("status", "header"), [(429, "seconds"), (503, "date")])
async def test_what_the_endpoint_asks_to_wait_is_waited(
    client: ChatClient, server: ChatServer, status: int, header: str
) -> None:
    def answer() -> web.Response:
        # A date has whole seconds: two from now are more than one.
        when = format_datetime(datetime.now(UTC) + timedelta(seconds=2), usegmt=True) if header == "date" else "1"
        return refuses(status, "slow down", Retry_After=when)

    server.door = fails(1, answer)
    counts = Counts()
    assert (await ask(client, counts)).content == "hi"
    assert (counts.requests, counts.retries) == (2, 1)
    assert server.times[1] - server.times[0] >= 0.9


async def test_one_that_is_told_to_wait_holds_the_others_too(
    client: ChatClient, server: ChatServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    server.door = fails(1, lambda: refuses(429, Retry_After="1"))
    held, hold = asyncio.Event(), client.pace.hold
    monkeypatch.setattr(client.pace, "hold", lambda seconds: (hold(seconds), held.set()))
    first = asyncio.create_task(ask(client))
    async with asyncio.timeout(20):
        await held.wait()
    await asyncio.gather(first, *(ask(client) for _ in range(5)))
    assert len(server.times) == 7
    assert server.times[1] - server.times[0] >= 0.9


@pytest.mark.parametrize("status", [408, 429, 500, 503, 529])
async def test_a_failure_for_a_while_is_tried_again(client: ChatClient, server: ChatServer, status: int) -> None:
    server.door = fails(1, lambda: refuses(status))
    counts = Counts()
    assert (await ask(client, counts)).content == "hi"
    assert counts.retries == 1


@pytest.mark.parametrize(
    "answer",
    [
        lambda: web.Response(text="<html>busy</html>"),
        lambda: web.json_response({"choices": []}),
        lambda: web.json_response([1]),
        lambda: web.json_response({"error": {"code": 502, "message": "upstream"}}),
    ],
    ids=["html", "no-choice", "list", "error-in-200"],
)
async def test_a_broken_answer_is_tried_again(client: ChatClient, server: ChatServer, answer: Any) -> None:
    server.door = fails(1, answer)
    counts = Counts()
    assert (await ask(client, counts)).content == "hi"
    assert counts.retries == 1


async def test_a_request_without_an_answer_is_cut_and_tried_again(
    server: ChatServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def door(number: int, body: dict[str, Any]) -> None:
        if number == 1:
            await asyncio.sleep(60)

    server.door = door
    client = make(server, monkeypatch, request_s=0.3)
    try:
        assert (await ask(client)).content == "hi"
    finally:
        await client.aclose()
    assert len(server.bodies) == 2


async def test_patience_ends_as_a_fault_of_the_sample(server: ChatServer, monkeypatch: pytest.MonkeyPatch) -> None:
    server.door = fails(10**9, lambda: refuses(429, "slow down", Retry_After="3600"))
    client = make(server, monkeypatch, patience_s=5)
    try:
        with pytest.raises(EndpointFault, match="asks to wait 3600 s: raise --patience"):
            await ask(client)
    finally:
        await client.aclose()
    assert len(server.bodies) == 1


@pytest.mark.parametrize(
    ("status", "text", "named"),
    [
        (401, f"Incorrect API key provided: {KEY}", "the key in TEST_KEY is missing or wrong"),
        (403, "forbidden", "may not use this model"),
        (404, "The model m does not exist", "check --url"),
        (405, "method not allowed", "mostly in /v1"),
        (402, "pay", "no credit"),
        (429, "You exceeded your current quota (insufficient_quota)", "quota is used up"),
        (400, "Unsupported parameter: use 'max_completion_tokens' instead", "--body max_completion_tokens=N"),
        (400, '"auto" tool choice requires --enable-auto-tool-choice', "--calls text"),
        (422, "unknown field", "unknown field"),
    ],
    ids=["401", "403", "404", "405", "402", "quota", "max_tokens", "tools", "422"],
)
async def test_what_will_never_work_is_said_at_once_and_without_the_key(
    client: ChatClient, server: ChatServer, status: int, text: str, named: str
) -> None:
    server.door = fails(10**9, lambda: refuses(status, text))
    with pytest.raises(EndpointUnusable) as caught:
        await ask(client)
    said = str(caught.value)
    assert f"answered {status}" in said
    assert named.lower() in said.lower()
    assert KEY not in said
    assert "\n" not in said
    assert len(server.bodies) == 1


async def test_a_missing_key_is_called_missing(server: ChatServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    client = ChatClient(Endpoint(url=server.url, model="m"), Sampling(), Pacing())
    server.door = fails(1, lambda: refuses(401))
    try:
        with pytest.raises(EndpointUnusable, match=r"OPENAI_API_KEY \(which is not set\)"):
            await ask(client)
    finally:
        await client.aclose()


async def test_a_redirect_is_not_followed_with_the_key(client: ChatClient, server: ChatServer) -> None:
    elsewhere = "https://elsewhere.example/v1"
    server.door = fails(1, lambda: web.Response(status=307, headers={"Location": elsewhere}))
    with pytest.raises(EndpointUnusable, match=elsewhere):
        await ask(client)


async def test_a_refusal_of_one_prompt_is_that_samples_fault(client: ChatClient, server: ChatServer) -> None:
    server.door = fails(1, lambda: refuses(400, "flagged by our content policy"))
    with pytest.raises(EndpointFault, match="content policy"):
        await ask(client)
    assert (await ask(client)).content == "hi"
    server.door = fails(10**9, lambda: refuses(400, "bad tool message"))
    with pytest.raises(EndpointFault, match="bad tool message"):  # once something has worked, it is this request's
        await ask(client)


@pytest.mark.parametrize(
    "text",
    [
        "This model's maximum context length is 8192 tokens. However, you requested 9000 tokens",
        "Error code: context_length_exceeded",
        "the request exceeds the available context size, try increasing it",
        "prompt is too long: 210000 tokens > 200000 maximum",
        "The input token count (1200000) exceeds the maximum number of tokens allowed",
    ],
    ids=["openai", "code", "llama.cpp", "anthropic", "gemini"],
)
async def test_a_full_context_is_no_fault(client: ChatClient, server: ChatServer, text: str) -> None:
    server.door = fails(10**9, lambda: refuses(400, text))
    with pytest.raises(ContextFull):
        await ask(client)
    assert len(server.bodies) == 1


async def test_a_turn_that_does_not_fit_whole_uses_the_room_that_is_left(
    server: ChatServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def door(number: int, body: dict[str, Any]) -> web.Response | None:
        full = "'max_tokens' is too large: 4096. This model's maximum context length is 2048 tokens"
        return refuses(400, full) if "max_tokens" in body or "max_completion_tokens" in body else None

    server.door = door
    other = Endpoint(url=server.url, model="m", body={"max_completion_tokens": 4096})
    for client in (make(server, monkeypatch, Sampling(max_tokens=4096)), ChatClient(other, Sampling(), Pacing())):
        try:
            assert (await ask(client)).content == "hi"
        finally:
            await client.aclose()


async def test_nobody_there_is_said_soon_and_once(unused_url: str) -> None:
    client = ChatClient(Endpoint(url=unused_url, model="m"), Sampling(), Pacing())
    counts = Counts()
    try:
        with pytest.raises(EndpointUnusable, match="nothing has answered there yet: check --url"):
            await ask(client, counts)
    finally:
        await client.aclose()
    assert counts.requests == FIRST_TRIES


@pytest.fixture
async def unused_url() -> str:
    listener = await asyncio.start_server(lambda reader, writer: None, "127.0.0.1", 0)
    port = listener.sockets[0].getsockname()[1]
    listener.close()
    await listener.wait_closed()
    return f"http://127.0.0.1:{port}/v1"


async def test_waiting_for_the_endpoint_is_not_the_episodes_time(client: ChatClient, server: ChatServer) -> None:
    server.door = fails(1, lambda: refuses(429, Retry_After="2"))
    clock = EpisodeClock(1.5)
    assert (await ask(client, clock=clock)).content == "hi"


async def test_a_request_past_the_episodes_end_is_dropped_at_the_server(client: ChatClient, server: ChatServer) -> None:
    gone = asyncio.Event()

    async def door(number: int, body: dict[str, Any]) -> None:
        try:
            await asyncio.sleep(60)
        finally:
            gone.set()

    server.door = door
    with pytest.raises(TimeoutError):
        await ask(client, clock=EpisodeClock(0.3))
    async with asyncio.timeout(20):
        await gone.wait()


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"url": "localhost:8000"}, "url"),
        ({"url": "https://user:secret@host/v1"}, "environment variable"),
        ({"url": "https://host/v1?key=secret"}, "url"),
        ({"body": {"messages": []}}, "messages"),
        ({"model": ""}, "model"),
        ({"tool_fromat": "glm"}, "tool_fromat"),
    ],
    ids=["no-scheme", "password", "query", "own-key", "no-model", "unknown"],
)
def test_a_wrong_setting_is_refused_by_name(changes: dict[str, Any], named: str) -> None:
    with pytest.raises(ValueError, match=named) as caught:
        Endpoint.model_validate({"url": "https://host/v1", "model": "m", **changes})
    if "secret" in str(changes):
        assert "secret@" not in str(caught.value).partition("[type=")[0]


def test_a_key_that_is_no_header_is_refused_before_anything_is_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "two\nlines")
    with pytest.raises(WrongArgument, match="OPENAI_API_KEY"):
        ChatClient(Endpoint(url="https://host/v1", model="m"), Sampling(), Pacing())
    assert issubclass(WrongArgument, EvaluationError)


def test_a_whole_address_is_taken_for_its_base() -> None:
    assert Endpoint(url="https://host/v1/chat/completions", model="m").url == "https://host/v1"


def test_parts_and_old_fields_of_a_reply_are_read() -> None:
    from agent.evaluate.endpoint.wire import read_reply

    parts = [{"type": "thinking", "thinking": [{"type": "text", "text": "hm"}]}, {"type": "text", "text": "hi"}]
    reply = read_reply(completion({"content": parts}))
    assert (reply.content, reply.reasoning) == ("hi", "hm")
    old = read_reply(completion({"function_call": {"name": "f", "arguments": {"a": 1}}}))
    assert (old.calls[0].name, json.loads(old.calls[0].arguments)) == ("f", {"a": 1})
    assert read_reply(completion({"refusal": "I will not."})).content == "I will not."
    assert read_reply(completion({"content": "\ud800"})).content == "?"
    for said in ("length", "model_length", "MAX_TOKENS"):
        assert read_reply(completion({"content": "", "finish_reason": said})).finish == "length"
