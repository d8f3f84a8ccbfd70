"""The official clients of OpenAI and Anthropic on a real server: what they may ask, and what is learned from it."""

from __future__ import annotations

import math
from collections.abc import AsyncIterator
from typing import Any

import anthropic
import openai
import pytest
from serve_tools import NAME, Client, ServerProcess

pytestmark = pytest.mark.xdist_group("serve-shared")

HI: Any = [{"role": "user", "content": "Hi"}]
LOOK: Any = {
    "type": "function",
    "function": {"name": "look", "parameters": {"type": "object", "properties": {"at": {"type": "string"}}}},
}


@pytest.fixture
async def them(server: ServerProcess) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0) as client:
        yield client


async def test_several_choices_are_episodes_each_with_its_own_receipt(them: openai.AsyncOpenAI, api: Client) -> None:
    whole: Any = await them.chat.completions.create(model=NAME, messages=HI, n=3, max_tokens=6, seed=4)
    assert [choice.index for choice in whole.choices] == [0, 1, 2]
    assert len({choice.message.content for choice in whole.choices}) > 1, "one seed, and yet not one reply three times"
    assert whole.usage.completion_tokens <= 18
    ids = [choice.response_id for choice in whole.choices]
    assert (len(set(ids)), ids[0]) == (3, whole.id)
    for i, name in enumerate(ids):
        status, given = await api.feedback(name, reward=i / 2)
        assert (status, given["trainable"], given["in_store"]) == (200, True, True)
    stream = await them.chat.completions.create(model=NAME, messages=HI, n=3, max_tokens=6, seed=4, stream=True)
    texts, receipts = ["", "", ""], ["", "", ""]
    async for chunk in stream:
        choice: Any = chunk.choices[0]
        texts[choice.index] += choice.delta.content or ""
        receipts[choice.index] = getattr(choice, "response_id", "")
    assert texts == [choice.message.content for choice in whole.choices]
    assert len(set(receipts)) == 3
    with pytest.raises(openai.BadRequestError, match="n must be"):
        await them.chat.completions.create(model=NAME, messages=HI, n=1000)


async def test_two_choices_in_a_session_are_branches_of_it(them: openai.AsyncOpenAI) -> None:
    extra = {"session": "branches"}
    first: Any = await them.chat.completions.create(model=NAME, messages=HI, max_tokens=4, extra_body=extra)
    said = {"role": "assistant", "content": first.choices[0].message.content}
    more: Any = [*HI, said, {"role": "user", "content": "more"}]
    both: Any = await them.chat.completions.create(model=NAME, messages=more, n=2, max_tokens=4, extra_body=extra)
    names = [choice.conversation for choice in both.choices]
    assert first.conversation in names
    assert len(set(names)) == 2


async def test_log_probs_are_those_of_the_tokens_and_cost_no_learning(them: openai.AsyncOpenAI) -> None:
    options: Any = {"model": NAME, "messages": HI, "max_tokens": 8, "seed": 2, "logprobs": True, "top_logprobs": 3}
    whole: Any = await them.chat.completions.create(**options)
    assert whole.trainable is True
    entries = whole.choices[0].logprobs.content
    assert 0 < len(entries) <= 8
    for entry in entries:
        assert len(entry.top_logprobs) == 3
        ranked = [top.logprob for top in entry.top_logprobs]
        assert ranked == sorted(ranked, reverse=True)
        assert entry.logprob <= ranked[0] + 1e-6
        assert sum(map(math.exp, ranked)) <= 1 + 1e-4
    chunks: list[Any] = [chunk async for chunk in await them.chat.completions.create(**options, stream=True)]
    told = [entry for c in chunks for choice in c.choices if choice.logprobs for entry in choice.logprobs.content]
    assert [e.token for e in told] == [e.token for e in entries]
    completed: Any = await them.completions.create(model=NAME, prompt="Once", max_tokens=4, logprobs=2)
    assert len(completed.choices[0].logprobs.tokens) == len(completed.choices[0].logprobs.token_logprobs)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("temperature", 0.5),
        ("presence_penalty", 1.0),
        ("frequency_penalty", 0.5),
        ("logit_bias", {"40": 5}),
        ("min_tokens", 6),
        ("repetition_penalty", 1.2),
        ("min_p", 0.1),
    ],
)
async def test_what_bends_the_distribution_is_served_and_said_not_to_be_learned_from(
    them: openai.AsyncOpenAI, api: Client, key: str, value: Any
) -> None:
    body: Any = {"model": NAME, "messages": HI, "max_tokens": 6}
    whole: Any = await them.chat.completions.create(**body, extra_body={key: value})
    assert (whole.trainable, whole.untrainable_because) == (False, [key])
    if key == "min_tokens":
        assert whole.usage.completion_tokens == 6
    _, given = await api.feedback(whole.id, reward=1)
    assert (given["trainable"], given["in_store"]) == (False, False)


async def test_a_bias_of_a_hundred_is_the_only_word(them: openai.AsyncOpenAI, api: Client) -> None:
    _, found = await api.call("POST", "/tokenize", {"prompt": "x", "add_special_tokens": False})
    [token] = found["tokens"]
    body: Any = {"model": NAME, "messages": HI, "max_tokens": 5, "logit_bias": {str(token): 100}}
    whole = await them.chat.completions.create(**body)
    assert whole.choices[0].message.content == "xxxxx"
    banned: Any = await them.chat.completions.create(**{**body, "logit_bias": {str(token): -100}}, temperature=0)
    assert "x" not in (banned.choices[0].message.content or "")
    assert banned.untrainable_because == ["temperature", "logit_bias"]


@pytest.mark.parametrize(
    ("param", "more"),
    [
        ("response_format", {"response_format": {"type": "json_object"}}),
        ("guided_regex", {"extra_body": {"guided_regex": "a+"}}),
        ("tool_choice", {"tools": [LOOK], "tool_choice": "required"}),
        ("frobnicate", {"extra_body": {"frobnicate": 1}}),
        ("reasoning_effort", {"reasoning_effort": "high"}),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
async def test_what_this_engine_cannot_do_is_refused_by_name(
    them: openai.AsyncOpenAI, param: str, more: dict[str, Any], stream: bool
) -> None:
    with pytest.raises(openai.BadRequestError, match=param) as refused:
        await them.chat.completions.create(model=NAME, messages=HI, stream=stream, **more)
    assert refused.value.param == param


async def test_completions_go_on_from_bare_text_and_tokens(them: openai.AsyncOpenAI) -> None:
    options: Any = {"model": NAME, "max_tokens": 5, "seed": 3}
    whole: Any = await them.completions.create(prompt=["Once", "upon"], n=2, **options)
    assert [choice.index for choice in whole.choices] == [0, 1, 2, 3]
    assert len({choice.response_id for choice in whole.choices}) == 4
    assert whole.trainable is True
    stream = await them.completions.create(prompt="Once", stream=True, **options)
    assert "".join([chunk.choices[0].text async for chunk in stream]) == whole.choices[0].text
    with pytest.raises(openai.BadRequestError, match="prompt"):
        await them.completions.create(prompt=[[2**30]], **options)
    with pytest.raises(openai.BadRequestError, match="echo"):
        await them.completions.create(prompt="Once", echo=True, **options)


async def test_responses_go_on_from_the_one_they_name_as_one_episode(them: openai.AsyncOpenAI, api: Client) -> None:
    options: Any = {"model": NAME, "max_output_tokens": 6, "instructions": "Be brief.", "metadata": {"a": "b"}}
    first: Any = await them.responses.create(input="one", **options)
    assert first.metadata == {"a": "b"}
    assert first.usage.output_tokens <= 6
    stream: Any = await them.responses.create(input="two", previous_response_id=first.id, stream=True, **options)
    events: list[Any] = [event async for event in stream]
    text = "".join([e.delta for e in events if e.type == "response.output_text.delta"])
    assert events[-1].type in ("response.completed", "response.incomplete"), "cut at six tokens, or ended before"
    second = events[-1].response
    assert second.output_text == text
    assert second.conversation.id == first.conversation.id, "the tokens as sampled, and what is new"
    assert second.usage.input_tokens > first.usage.input_tokens + first.usage.output_tokens
    branch: Any = await them.responses.create(input="three", previous_response_id=first.id, **options)
    assert branch.conversation.id != first.conversation.id
    status, given = await api.feedback(second.id, reward=1)
    assert (status, given["in_store"]) == (200, True)
    with pytest.raises(openai.BadRequestError, match="resp-nothing") as unknown:
        await them.responses.create(input="x", previous_response_id="resp-nothing", **options)
    assert unknown.value.param == "previous_response_id"


@pytest.mark.parametrize(
    ("param", "more"),
    [
        ("background", {"background": True}),
        ("tools", {"tools": [{"type": "web_search"}]}),
        ("input", {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]}),
        ("frobnicate", {"extra_body": {"frobnicate": 1}}),
        ("text", {"text": {"format": {"type": "json_schema", "name": "a", "schema": 3}}}),
    ],
)
async def test_what_responses_do_not_serve_is_refused_by_name(
    them: openai.AsyncOpenAI, param: str, more: dict[str, Any]
) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        await them.responses.create(**{"model": NAME, "input": "x", **more})
    assert str(refused.value.param).startswith(param)


async def test_anthropics_client_works_unmodified(server: ServerProcess, api: Client) -> None:
    async with anthropic.AsyncAnthropic(base_url=server.url, api_key="none", max_retries=0) as them:
        options: Any = {"model": NAME, "max_tokens": 12, "messages": HI, "system": "Be brief."}
        whole: Any = await them.messages.create(**options)
        assert whole.usage.output_tokens <= 12
        assert whole.stop_reason in ("end_turn", "max_tokens")
        async with them.messages.stream(**options) as stream:
            text = "".join([piece async for piece in stream.text_stream])
            last = await stream.get_final_message()
        assert text == "".join(block.text for block in last.content if block.type == "text")
        assert last.usage.input_tokens == whole.usage.input_tokens
        counted = await them.messages.count_tokens(model=NAME, messages=HI, system="Be brief.")
        assert counted.input_tokens == whole.usage.input_tokens
        status, given = await api.feedback(whole.id, thumbs="up")
        assert (status, given["in_store"]) == (200, True)
        tool: Any = {"name": "look", "input_schema": {"type": "object"}}
        with pytest.raises(anthropic.BadRequestError, match="tool_choice") as refused:
            await them.messages.create(**options, tools=[tool], tool_choice={"type": "any"})
        assert refused.value.response.headers["request-id"].startswith("req_")
        with pytest.raises(anthropic.BadRequestError, match="frobnicate"):
            await them.messages.create(**options, extra_body={"frobnicate": 1})
        with pytest.raises(anthropic.NotFoundError):
            await them.messages.create(**{**options, "model": "another"})


async def test_tokens_and_texts_are_told_in_vllms_shape(api: Client) -> None:
    _, found = await api.call("POST", "/tokenize", {"model": NAME, "prompt": "好的 ok", "return_token_strs": True})
    assert (found["count"], found["max_model_len"]) == (len(found["tokens"]), 512)
    assert len(found["token_strs"]) == found["count"]
    _, back = await api.call("POST", "/detokenize", {"model": NAME, "tokens": found["tokens"]})
    assert back == {"prompt": "好的 ok"}
    _, chat = await api.call("POST", "/tokenize", {"messages": HI})
    answer = await api.chat("Hi")
    assert chat["count"] == answer["usage"]["prompt_tokens"]
    for path, body in (
        ("/tokenize", {"prompt": 3}),
        ("/detokenize", {"tokens": ["a"]}),
        ("/detokenize", {"tokens": [-1]}),
    ):
        status, answer = await api.call("POST", path, body)
        assert (status, answer["error"]["type"]) == (400, "invalid_request_error")


async def test_a_request_has_an_id_in_its_answer_its_error_and_the_log(server: ServerProcess, api: Client) -> None:
    body = {"model": NAME, "messages": HI, "max_tokens": 2, "stream": True}
    async with api.session.post(
        server.url + "/v1/chat/completions", json=body, headers={"x-request-id": "mine-1"}
    ) as r:
        assert r.headers["x-request-id"] == "mine-1"
        assert (r.headers["X-Accel-Buffering"], r.headers["Cache-Control"]) == ("no", "no-cache")
        await r.read()
    async with api.session.post(server.url + "/v1/chat/completions", data=b"{", headers={"x-request-id": "a b"}) as r:
        made = r.headers["x-request-id"]
        assert made.startswith("req_")
        assert (await r.json())["error"]["request_id"] == made


async def test_health_answers_where_load_balancers_look(api: Client) -> None:
    status, answer = await api.call("GET", "/health")
    assert (status, answer["status"]) == (200, "ok")
