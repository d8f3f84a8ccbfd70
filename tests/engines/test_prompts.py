"""The growing prompt of an episode: what is sent, what is encoded, and what holds a session's requests together."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import msgspec
import pytest
from aiohttp import web
from hypothesis import given
from hypothesis import strategies as st

from agent.engines import prompt as prompt_module
from agent.engines.client import HttpEngine
from agent.engines.pool import EnginePool
from agent.engines.prompt import Prompt, json_of
from agent.engines.wire import generate_body
from agent.episode import SamplingParams

ids = st.lists(st.integers(0, 2**31 - 1), max_size=8)


@given(st.lists(ids, max_size=6))
def test_a_prompt_that_grew_is_not_the_list_that_it_stands_for(parts: list[list[int]]) -> None:
    prompt, plain = Prompt(), list[int]()
    for part in parts:
        longer = prompt + tuple(part)
        assert list(prompt) == plain, "a prompt that was sent does not change"
        prompt, plain = longer, plain + part
    assert (len(prompt), list(prompt), prompt[:3]) == (len(plain), plain, plain[:3])
    assert prompt == plain
    assert (prompt == [*plain, 1]) is False
    assert prompt == Prompt(plain)
    assert hash(prompt) == hash(Prompt(plain))
    assert msgspec.json.decode(b"[%b]" % prompt.json) == plain
    assert json_of(plain) == prompt.json
    body = msgspec.json.decode(generate_body("r", prompt, SamplingParams(stop=("a",), seed=3), stream=False))
    assert body["token_ids"] == plain
    assert (body["request_id"], body["stream"]) == ("r", False)
    assert body["sampling_params"]["stop"] == ["a"]


def test_each_turn_encodes_what_was_encoded_before(monkeypatch: pytest.MonkeyPatch) -> None:
    encoded: list[int] = []
    usual = prompt_module._encoded
    monkeypatch.setattr(prompt_module, "_encoded", lambda new: encoded.append(len(new)) or usual(new))
    prompt = Prompt(range(200))
    for _ in range(300):
        prompt += (1, 2, 3)
        generate_body("r", prompt, SamplingParams(), stream=False)
    assert sum(encoded) == len(prompt) == 200 + 900


class Server:
    """An engine of `ranks` data-parallel engines that notes the headers and the connection of each request."""

    def __init__(self) -> None:
        self.ranks = 1
        self.asked: list[tuple[dict[str, str], int]] = []
        self.url = ""

    async def generate(self, request: web.Request) -> web.Response:
        self.asked.append((dict(request.headers), id(request.transport)))
        entries = [{"token_id": 4, "logprob": -0.5}]
        choice = {"token_ids": [4], "finish_reason": "stop", "logprobs": {"content": entries}}
        return web.json_response({"choices": [choice | {"weight_versions": [{"version": "0", "start": 0, "end": 1}]}]})

    async def metrics(self, request: web.Request) -> web.Response:
        name = "vllm:num_requests_running"
        return web.Response(text="\n".join(f'{name}{{engine="{i}",model_name="m"}} 1.0' for i in range(self.ranks)))


@pytest.fixture
async def server() -> AsyncIterator[Server]:
    found = Server()

    async def say(answer: Any) -> web.Response:
        return web.json_response(answer)

    app = web.Application()
    app.router.add_post("/inference/v1/generate", found.generate)
    app.router.add_get("/metrics", found.metrics)
    app.router.add_get("/health", lambda _: say({}))
    app.router.add_get("/weight_info", lambda _: say({"weight_version": "0"}))
    app.router.add_get("/v1/models", lambda _: say({"data": [{"id": "m", "max_model_len": 100}]}))
    runner = web.AppRunner(app, shutdown_timeout=0.1, keepalive_timeout=60.0)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    found.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    yield found
    await runner.cleanup()


@pytest.mark.parametrize("ranks", [1, 3])
async def test_an_episodes_requests_go_to_an_engine_without_its_prefix(server: Server, ranks: int) -> None:
    server.ranks = ranks
    engine = HttpEngine(server.url)
    pool = EnginePool({"e": engine}, patience_s=30.0)
    running = asyncio.create_task(pool.run())
    try:
        for _ in range(6):
            async with pool.seat() as seat:
                for _ in range(2):
                    await seat.generate([1], SamplingParams(max_tokens=1))
    finally:
        running.cancel()
        await asyncio.wait({running})
        await engine.close()
    seats = [server.asked[2 * i : 2 * i + 2] for i in range(6)]
    sessions = [{headers["X-Session-ID"] for headers, _ in seat} for seat in seats]
    assert [len(session) for session in sessions] == [1] * 6, "the turns of an episode have one session"
    assert len(set.union(*sessions)) == 6
    places = [{headers.get("X-data-parallel-rank") for headers, _ in seat} for seat in seats]
    if ranks == 1:
        assert set.union(*places) == {None}
    else:
        assert [len(place) for place in places] == [1] * 6, "and one rank"
        assert sorted(place for [place] in places) == ["0", "0", "1", "1", "2", "2"], "episodes are spread evenly"


async def test_each_turn_connects_again(server: Server) -> None:
    engine = HttpEngine(server.url, keepalive_s=60.0)
    for _ in range(3):
        await engine.generate([1], SamplingParams(max_tokens=1))
    await engine.close()
    assert len({connection for _, connection in server.asked}) == 1
    assert engine._keepalive_s == 60.0
