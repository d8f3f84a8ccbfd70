"""What the local server answers to those who speak its protocol by hand."""

from __future__ import annotations

import asyncio
from typing import Any

import aiohttp
import pytest
from byte_model import write_byte_model
from engine_tools import EngineUnderTest
from test_engine_contract import assert_same, reference
from tokenizers import Tokenizer

from agent.episode import SamplingParams

# Not every engine of the suite: vLLM's own server says other things, and some of these calls would harm it.
pytestmark = pytest.mark.parametrize("server", ["local-moe", "local-dense"], indirect=True, scope="session")


async def post(engine: EngineUnderTest, path: str, body: Any) -> tuple[int, Any]:
    async with aiohttp.ClientSession(engine.client.url) as session, session.post(path, json=body) as response:
        return response.status, await response.json()


async def test_a_stop_string_ends_the_action_at_the_token_that_completes_it(engine: EngineUnderTest) -> None:
    write_byte_model(engine.first)  # the folder that the server was started with; it reads its tokenizer when asked to
    decode = Tokenizer.from_file(str(engine.first / "tokenizer.json")).decode
    free = await engine.client.generate([1, 2], SamplingParams(max_tokens=60, seed=3))
    stop = decode(free.token_ids[30:33])
    end = next(i for i in range(1, 61) if stop in decode(free.token_ids[:i]))
    done = await engine.client.generate([1, 2], SamplingParams(max_tokens=60, seed=3, stop=(stop, "never said")))
    assert (done.token_ids, done.finish_reason) == (free.token_ids[:end], "stop")
    assert len(done.logprobs) == len(done.versions) == end


async def test_an_answer_has_the_shape_of_vllm(engine: EngineUnderTest) -> None:
    body = {
        "request_id": "abc",
        "token_ids": [1, 2],
        "sampling_params": {"max_tokens": 2, "logprobs": 1},
        "priority": 0,
    }
    status, answer = await post(engine, "/inference/v1/generate", body)
    assert (status, answer["request_id"]) == (200, "generate-tokens-abc")
    (choice,) = answer["choices"]
    assert choice["weight_versions"] == [{"version": str(engine.version), "start": 0, "end": 2}]
    assert [entry["token_id"] for entry in choice["logprobs"]["content"]] == choice["token_ids"]
    assert answer["usage"]["completion_tokens"] == 2


@pytest.mark.parametrize(
    ("change", "status"),
    [
        ({"sampling_params": {"frequency_penalties": 0.5}}, 400),
        ({"sampling_params": {"n": 2}}, 400),
        ({"sampling_params": {"logprobs": 2000}}, 400),
        ({"sampling_params": {"max_tokens": "many"}}, 400),
        ({"sampling_params": {"stop": [""]}}, 400),
        ({"model": "another"}, 404),
        ({"token_ids": "1, 2"}, 400),
        ({"token_ids": [2**70]}, 400),
    ],
)
async def test_what_cannot_be_done_is_refused_and_not_ignored(
    engine: EngineUnderTest, change: dict[str, Any], status: int
) -> None:
    """A parameter that is not known, or not in this measure, must not pass in silence."""
    got, answer = await post(
        engine, "/inference/v1/generate", {"token_ids": [1], "sampling_params": {"max_tokens": 1}} | change
    )
    assert got == status
    assert answer["error"]["message"]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/pause?mode=later", {}),
        ("/update_weights", {"path": "/tmp"}),
        ("/update_weights", []),
        ("/finish_weight_update", {"weight_version": "new"}),
        ("/finish_weight_update", {"weight_version": "5"}),
        ("/abort_requests", {"request_ids": "all"}),
    ],
)
async def test_bad_control_calls_change_nothing(engine: EngineUnderTest, path: str, body: Any) -> None:
    status, _ = await post(engine, path, body)
    assert status == 400
    assert (await engine.client.health()).version == engine.version


async def test_an_abort_without_ids_ends_everything(engine: EngineUnderTest) -> None:
    body = {"token_ids": [1], "sampling_params": {"max_tokens": engine.max_context - 1, "logprobs": 0}}
    running = [asyncio.create_task(post(engine, "/inference/v1/generate", body)) for _ in range(5)]
    while (await engine.client.health()).running < 5:  # noqa: ASYNC110
        await asyncio.sleep(0)
    status, answer = await post(engine, "/abort_requests", {})
    assert (status, answer["aborted"]) == (200, 5)
    assert [a["choices"][0]["finish_reason"] for _, a in await asyncio.gather(*running)] == ["abort"] * 5


async def test_an_abort_that_names_a_request_twice_ends_it_once(engine: EngineUnderTest) -> None:
    """The second time it has no future any more: that ended the model's thread, and the request never returned."""
    sampling = {"max_tokens": engine.max_context - 1, "logprobs": 0}
    body = {"request_id": "twice", "token_ids": [1], "sampling_params": sampling}
    running = asyncio.create_task(post(engine, "/inference/v1/generate", body))
    while (await engine.client.health()).running < 1:  # noqa: ASYNC110
        await asyncio.sleep(0)
    status, _ = await asyncio.wait_for(
        post(engine, "/abort_requests", {"request_ids": ["generate-tokens-twice"] * 2}), 60
    )
    assert status == 200
    _, answer = await asyncio.wait_for(running, 60)
    assert answer["choices"][0]["finish_reason"] == "abort"
    await engine.client.health()


async def test_a_top_k_beyond_every_integer_is_as_good_as_none(engine: EngineUnderTest) -> None:
    """It once ended the model's thread, and with it every other request."""
    body = {"token_ids": [1], "sampling_params": {"max_tokens": 1, "top_k": 2**63}}
    assert (await post(engine, "/inference/v1/generate", body))[0] == 200
    await engine.client.health()


async def test_new_weights_alone_drop_old_keys(engine: EngineUnderTest) -> None:
    """Case D6, for a caller that neither pauses nor resets the prefix cache: the server does it by itself."""
    prompt = list(range(60))
    first = await engine.client.generate(prompt, SamplingParams(max_tokens=4))
    assert (await post(engine, "/update_weights", {"update_info": {"path": str(engine.second)}}))[0] == 200
    assert (await engine.client.health()).version == engine.version, "not before it is finished"
    label = str(engine.version + 1)
    assert (await post(engine, "/finish_weight_update", {"weight_version": label}))[0] == 200
    context = [*prompt, *first.token_ids, 3]
    second = await engine.client.generate(context, SamplingParams(max_tokens=4))
    assert set(second.versions) == {engine.version + 1}
    assert_same(second.logprobs, reference(engine.second, context, second.token_ids))
