"""The public API on a real server, engine and store, as OpenAI's client and others speak it."""

from __future__ import annotations

import asyncio
import json
import subprocess
from typing import Any

import aiohttp
import openai
import pytest
from serve_tools import NAME, Client, ServerProcess, client

pytestmark = pytest.mark.xdist_group("serve-shared")

TOOLS: Any = [
    {
        "type": "function",
        "function": {"name": "look", "parameters": {"type": "object", "properties": {"at": {"type": "string"}}}},
    }
]


async def running(api: Client) -> int:
    _, page = await api.call("GET", "/metrics")
    return int(
        float(next(line for line in page.splitlines() if line.startswith("sao_generations_running ")).split()[1])
    )


async def test_the_openai_client_works_unmodified(server: ServerProcess) -> None:
    async with openai.AsyncOpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0) as them:
        assert [m.id async for m in await them.models.list()] == [NAME]
        whole = await them.chat.completions.create(
            model=NAME, messages=[{"role": "user", "content": "Hi"}], max_tokens=12, seed=1, user="ann"
        )
        assert whole.id.startswith("chatcmpl-v0-")
        assert whole.policy_version == 0  # type: ignore[attr-defined]
        assert whole.usage is not None
        assert whole.usage.completion_tokens == 12
        stream = await them.chat.completions.create(
            model=NAME,
            messages=[{"role": "user", "content": "Hi"}],
            max_tokens=12,
            seed=1,
            stream=True,
            stream_options={"include_usage": True},
        )
        chunks = [chunk async for chunk in stream]
        text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
        assert text == whole.choices[0].message.content, "the same seed, with and without a stream"
        assert len({c.id for c in chunks}) == 1
        assert chunks[-2].choices[0].finish_reason == "length"
        assert chunks[-1].usage is not None
        assert chunks[-1].usage.completion_tokens == 12
        with pytest.raises(openai.NotFoundError, match="does not exist"):
            await them.chat.completions.create(model="gpt-4", messages=[{"role": "user", "content": "Hi"}])
        with pytest.raises(openai.BadRequestError, match="presence_penalty"):
            await them.chat.completions.create(
                model=NAME, messages=[{"role": "user", "content": "Hi"}], presence_penalty=9.0
            )


async def test_curl_gets_a_stream_as_it_is_made(server: ServerProcess) -> None:
    # Without a seed one reply in twelve ends by itself before it has many pieces.
    body = {
        "model": NAME,
        "stream": True,
        "max_tokens": 200,
        "seed": 0,
        "messages": [{"role": "user", "content": "Hi"}],
    }
    command = ["curl", "-sN", server.url + "/v1/chat/completions", "--json", json.dumps(body)]
    process = await asyncio.create_subprocess_exec(*command, stdout=subprocess.PIPE)
    assert process.stdout is not None
    async with asyncio.timeout(60):
        lines = [line async for line in process.stdout]
        assert await process.wait() == 0
    data = [line for line in lines if line.startswith(b"data: ")]
    assert data[-1] == b"data: [DONE]\n"
    assert len(data) > 20, "many small pieces and not one at the end"


async def test_a_client_that_goes_away_stops_its_generation(server: ServerProcess, api: Client) -> None:
    """Case G6."""
    body = {"model": NAME, "stream": True, "messages": [{"role": "user", "content": "Hi"}]}
    for _ in range(4):
        async with aiohttp.ClientSession() as session:
            response = await session.post(server.url + "/v1/chat/completions", json=body)
            await response.content.readline()
            response.close()
    async with asyncio.timeout(30):
        while await running(api):  # noqa: ASYNC110
            await asyncio.sleep(0.02)
    async with client(server.engine, server.key) as engine:
        _, page = await engine.call("GET", "/metrics")
    assert 'vllm:num_requests_running{model_name="' in page
    assert (
        float(next(line for line in page.splitlines() if line.startswith("vllm:num_requests_running")).split()[-1]) == 0
    )


@pytest.mark.parametrize(
    ("body", "status", "code"),
    [
        (b"{", 400, None),
        (b"\x00", 400, None),
        ({"model": "another", "messages": [{"role": "user", "content": "x"}]}, 404, "model_not_found"),
        ({"model": NAME, "messages": [{"role": "user", "content": "word " * 600}]}, 400, "context_length_exceeded"),
        ({"model": NAME, "messages": [{"role": "user", "content": "x" * 70_000}]}, 413, "body_too_large"),
        ({"model": NAME, "messages": [{"role": "user", "content": "x"}], "frobnicate": 3}, 400, "unknown_parameter"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
async def test_bad_input_has_an_answer_in_openais_shape(
    api: Client, body: Any, status: int, code: str | None, stream: bool
) -> None:
    if isinstance(body, dict):
        body = {**body, "stream": stream}
    got, answer = await api.call("POST", "/v1/chat/completions", body)
    assert got == status, answer
    assert answer["error"]["code"] == code
    assert answer["error"]["message"]
    assert {"type", "param"} <= answer["error"].keys()


async def test_unknown_paths_and_methods_are_json_errors(api: Client) -> None:
    assert (await api.call("GET", "/v1/nothing"))[0] == 404
    status, answer = await api.call("GET", "/v1/chat/completions")
    assert (status, answer["error"]["type"]) == (405, "invalid_request_error")


async def test_a_stop_string_ends_a_reply_and_is_not_in_it(api: Client) -> None:
    free = (await api.chat("stop here", seed=7, max_tokens=120))["choices"][0]["message"]["content"]
    stop = next(free[i : i + 2] for i in range(20, len(free)) if "\ufffd" not in free[i : i + 2])
    answer = await api.chat("stop here", seed=7, max_tokens=120, stop=[stop])
    choice = answer["choices"][0]
    assert choice["finish_reason"] == "stop"
    assert choice["message"]["content"] == free.partition(stop)[0]
    assert answer["usage"]["completion_tokens"] < 120


async def test_a_session_goes_on_with_the_tokens_as_sampled(api: Client) -> None:
    """Case B1: the second prompt is the first one, the reply as sampled, and what is new."""
    first = await api.chat("one", session="b1", user="ann", max_tokens=10)
    history = [{"role": "user", "content": "one"}, first["choices"][0]["message"], {"role": "user", "content": "two"}]
    second = await api.chat(messages=history, session="b1", user="ann", max_tokens=10)
    assert second["conversation"] == first["conversation"]
    # The chat template ends the turn that was cut, and opens two more.
    assert second["usage"]["prompt_tokens"] > first["usage"]["prompt_tokens"] + first["usage"]["completion_tokens"]
    edited = [{"role": "user", "content": "ONE"}, *history[1:]]
    fork = await api.chat(messages=edited, session="b1", user="ann")
    assert fork["conversation"] != first["conversation"]
    again = await api.chat(messages=history, session="b1", user="ann")
    assert again["conversation"] != first["conversation"], "a second answer to the same message forks"


async def test_two_users_never_share_a_session(api: Client) -> None:
    """Case G5: neither by a default nor by choosing the same name."""
    first = await api.chat("mine", session="same", user="ann")
    history = [{"role": "user", "content": "mine"}, first["choices"][0]["message"], {"role": "user", "content": "more"}]
    other = await api.chat(messages=history, session="same", user="bob")
    assert other["conversation"] != first["conversation"]
    alone = [await api.chat("mine") for _ in range(2)]
    assert alone[0]["conversation"] != alone[1]["conversation"]
    assert alone[0]["session"] is None


async def test_tools_are_rendered_and_text_without_a_call_is_content(api: Client) -> None:
    answer = await api.chat("call", tools=TOOLS, max_tokens=20, seed=3)
    message = answer["choices"][0]["message"]
    assert "tool_calls" not in message
    status, text = await api.call(
        "POST",
        "/v1/chat/completions",
        {
            "model": NAME,
            "messages": [{"role": "user", "content": "call"}],
            "tools": TOOLS,
            "max_tokens": 20,
            "seed": 3,
            "stream": True,
        },
    )
    assert status == 200
    chunks = [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: {")]
    assert "".join(c["choices"][0]["delta"].get("content", "") for c in chunks) == message["content"]


async def test_two_hundred_clients_at_once_are_all_answered(server: ServerProcess) -> None:
    async with client(server.url) as many:
        body = {"model": NAME, "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 4, "stream": True}
        answers = await asyncio.gather(*(many.call("POST", "/v1/chat/completions", body) for _ in range(200)))
    assert [status for status, _ in answers] == [200] * 200
    assert all(text.endswith("data: [DONE]\n\n") for _, text in answers)


async def test_other_temperatures_are_served_and_not_learned_from(api: Client) -> None:
    """Case A19's sense, online: a ratio of another distribution would be wrong."""
    answer = await api.chat("cold", temperature=0.2)
    assert answer["trainable"] is False
    status, given = await api.feedback(answer["id"], reward=1)
    assert (status, given["trainable"], given["in_store"]) == (200, False, False)
    _, kept = await api.call("GET", f"/v1/conversations/{answer['conversation']}")
    assert kept["status"] == "unlearned"


async def test_the_events_show_what_happens_and_no_words(server: ServerProcess, api: Client) -> None:
    seen: list[tuple[str, Any]] = []

    async def watch() -> None:
        async with (
            aiohttp.ClientSession() as session,
            session.get(server.url + "/v1/events?user=me", timeout=aiohttp.ClientTimeout(total=60)) as response,
        ):
            kind = ""
            async for line in response.content:
                if line.startswith(b"event: "):
                    kind = line[7:].decode().strip()
                elif line.startswith(b"data: "):
                    seen.append((kind, json.loads(line[6:])))
                    if kind == "hello":
                        hello.set()
                    if kind == "feedback":
                        return

    hello = asyncio.Event()
    watching = asyncio.create_task(watch())
    async with asyncio.timeout(60):
        await hello.wait()
        answer = await api.chat("a secret question", user="me")
        await api.feedback(answer["id"], reward=0.25, metadata={"style": "cute"})
        await watching
    kinds = [kind for kind, _ in seen]
    assert kinds[0] == "hello"
    assert "response" in kinds
    assert seen[-1][1]["reward"] == 0.25
    assert "cute" not in seen[-1][1]["style_share"], "not everybody's figure"
    assert "secret" not in json.dumps(seen)
