"""Whole episodes of models that write tool calls in their own families' forms."""

from __future__ import annotations

from pathlib import Path

import pytest
from model_folders import write_model
from published_templates import published
from pydantic import ValidationError
from runtime_tools import ScriptedEngine, settings, ticket

from agent.chat.renderer import ChatRenderer
from agent.chat.settings import ChatConfig
from agent.runtime.rollout import rollout
from agent.runtime.settings import EnvConfig, RuntimeConfig
from envs import make_core
from envs.tool_calls import write_calls
from envs.tool_formats.reading import ToolCall
from learner.config.services import RuntimeSection

PROBLEM = [{"problem": "What is 6 * 7?", "answer": "42"}]


def model(folder: Path, name: str) -> ChatRenderer:
    special = ["<s>", "</s>", "<|eot_id|>", "<|start_header_id|>", "<|end_header_id|>", "<|python_tag|>", "<|user|>"]
    special += ["<|assistant|>", "<|observation|>", "<|start|>", "<|end|>", "<|message|>", "<|channel|>", "<|call|>"]
    special += [
        "<|return|>",
        "<turn|>",
        "<|turn>",
        "<|tool_call>",
        "<tool_call|>",
        "<|tool_response>",
        "<tool_response|>",
    ]
    eos = ["</s>", "<|observation|>"]
    tokens = {"bos_token": "<s>", "eos_token": "</s>"}
    write_model(folder, published(name), special=special, added=[], tokens=tokens, eos=eos)
    return ChatRenderer.from_pretrained(folder)


@pytest.mark.parametrize("name", ["llama3_1", "glm4moe", "gptoss", "qwen3_5_think", "gemma4_v5"])
async def test_a_call_in_the_familys_form_is_carried_out_and_its_answer_seen(name: str, tmp_path: Path) -> None:
    renderer = model(tmp_path / name, name)
    good = write_calls([ToolCall("python", {"code": "print(6 * 7)"})], renderer.tool_format).removesuffix("<|call|>")
    final = "<|channel|>final<|message|>" if name == "gptoss" else ""
    actions = [good[:-4], good, final + r"\boxed{42}"]
    engine = ScriptedEngine(renderer, lambda prompt, turn: actions[turn])
    env = make_core("sao/PythonTIR-v0", problems=PROBLEM)
    try:
        episode = await rollout(ticket(), env, engine, renderer, settings(max_context_tokens=20_000))
    finally:
        await env.aclose()
    assert episode.reward == 1.0
    assert (episode.metrics["tool_calls"], episode.metrics["malformed_calls"]) == (1, 1)
    observations = [segment.text for segment in episode.segments if segment.kind == "observation"]
    assert "Malformed tool call" in observations[0]
    assert "42" in observations[1]
    assert [segment.token_ids for segment in episode.actions] == [renderer.encode_action(action) for action in actions]
    for turn, (prompt, _) in enumerate(engine.requests):
        before = [token for segment in episode.segments[: 2 * turn + 1] for token in segment.token_ids]
        assert prompt == before, "each prompt is the record so far"


def test_the_keys_of_a_recipe_reach_the_runtime_and_its_requests() -> None:
    keys = {"template_kwargs": {"enable_thinking": False}, "tool_format": "glm", "tool_answers": "user"}
    section = RuntimeSection.model_validate({"chat": keys, "sampling": {"stop": ["Observation:"]}})
    given = section.model_dump(
        mode="json", exclude={"launch", "python", "count", "engine_keepalive_s"}
    )  # as the learner hands it to its runtime
    config = RuntimeConfig(store="http://s", engines=("http://e",), model="m", env=EnvConfig(id="x"), **given)
    assert config.chat == ChatConfig(**keys)
    assert config.sampling.params(max_tokens=1, stop_token_ids=()).stop == ("Observation:",)
    with pytest.raises(ValidationError, match="hermes"):
        RuntimeSection.model_validate({"chat": {"tool_format": "xml"}})
    with pytest.raises(ValidationError, match="template_kwarg"):
        RuntimeSection.model_validate({"chat": {"template_kwarg": {}}})
    with pytest.raises(ValidationError, match="stop"):
        RuntimeSection.model_validate({"sampling": {"stop": [""]}})
