"""Serving with vLLM as the engine: the same API, publications included."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
from serve_tools import NAME, ServerProcess, client, serving, write_models, write_recipe
from vllm_tools import have_vllm

from agent.engines.client import HttpEngine

pytestmark = [pytest.mark.vllm, pytest.mark.xdist_group("serve-vllm"), pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def big_heads(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A dense model, whose heads are not too small for vLLM's CPU attention."""
    shape = {"experts": 0, "hidden_size": 64, "head_dim": 32, "expert_width": 64}
    return write_models(tmp_path_factory.mktemp("vllm_models"), **shape)


@pytest.fixture(scope="module")
def server(big_heads: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    recipe = write_recipe(tmp_path_factory.mktemp("vllm"), big_heads[0])
    words = ["engine.launch=vllm", "model.dtype=float32"]
    with serving(recipe, *words, within_s=600) as running:
        yield running


@pytest.mark.skipif(not have_vllm(), reason="vLLM's environment is not here: make vllm")
async def test_a_stream_goes_through_a_publication_on_vllm(server: ServerProcess, big_heads: tuple[Path, Path]) -> None:
    """Case G6."""
    learner = HttpEngine(server.engine, key=server.key)
    async with openai.AsyncOpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0, timeout=120) as them:
        stream = await them.chat.completions.create(
            model=NAME, messages=[{"role": "user", "content": "Hi"}], max_tokens=400, stream=True
        )
        chunks = []
        async for chunk in stream:
            chunks.append(chunk)
            if len(chunks) == 4:
                await learner.publish(1, big_heads[1])
    assert chunks[-1].choices[0].finish_reason in ("stop", "length")
    assert len(chunks) > 10
    async with client(server.url) as api:
        answer = await api.chat("after it")
        assert answer["policy_versions"] == [1]
        status, given = await api.feedback(answer["id"], thumbs="up")
        assert (status, given["in_store"]) == (200, True)
        status, back = await api.call("POST", "/v1/versions/rollback", {"version": 0})
        assert (status, back["version"]) == (200, 2)
        assert (await api.chat("and back"))["policy_versions"] == [2]
    await learner.close()


@pytest.mark.skipif(not have_vllm(), reason="vLLM's environment is not here: make vllm")
async def test_replies_are_held_to_a_form_on_vllm_and_not_learned_from(server: ServerProcess) -> None:
    messages: Any = [{"role": "user", "content": "Hi"}]
    schema = {"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"], "additionalProperties": False}
    form: Any = {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}
    function = {"name": "look", "parameters": schema}
    tools: Any = [{"type": "function", "function": function}]
    named: Any = {"type": "function", "function": {"name": "look"}}
    async with openai.AsyncOpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0, timeout=120) as them:
        options: Any = {"model": NAME, "messages": messages, "max_tokens": 200}
        held: Any = await them.chat.completions.create(**options, response_format=form)
        assert json.loads(held.choices[0].message.content)["a"] in (1, 2)
        assert (held.trainable, held.untrainable_because) == (False, ["response_format"])
        chosen: Any = await them.chat.completions.create(**options, extra_body={"guided_choice": ["yes", "no"]})
        assert chosen.choices[0].message.content in ("yes", "no")
        for choice in ("required", named):
            for _ in range(8):  # JSON may hold any white space, and random weights write as much of it as they may
                called: Any = await them.chat.completions.create(
                    **{**options, "max_tokens": 400}, tools=tools, tool_choice=choice, parallel_tool_calls=False
                )
                if called.choices[0].finish_reason != "length":
                    break
            [call] = called.choices[0].message.tool_calls
            assert call.function.name == "look"
            assert json.loads(call.function.arguments)["a"] in (1, 2)
            assert (called.choices[0].finish_reason, called.trainable) == ("tool_calls", False)
        likely: Any = await them.chat.completions.create(**options, logprobs=True, top_logprobs=2)
        assert all(len(entry.top_logprobs) == 2 for entry in likely.choices[0].logprobs.content)
        with pytest.raises(openai.BadRequestError, match="guided_regex"):
            await them.chat.completions.create(**options, extra_body={"guided_regex": "(unclosed"})
