"""What published chat templates do with tools: calls read as they write them, no answer lost, no token changed."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from model_folders import write_model
from published_templates import BASE_TEMPLATES, published, template_folder

from agent.chat import tokenizer as tokenizer_module
from agent.chat.renderer import ChatRenderer
from agent.chat.settings import ChatConfig
from agent.chat.template import ChatTemplateError
from agent.chat.tool_manners import tool_call
from envs.tool_calls import parse_calls, write_calls
from envs.tool_formats.reading import ToolCall

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "python",
            "description": "Run code.",
            "parameters": {
                "type": "object",
                "properties": {
                    "code": {"type": "string", "description": "Code."},
                    "seconds": {"type": "number", "description": "A limit."},
                    "fresh": {"type": "boolean", "description": "Whether."},
                    "files": {"type": "array", "description": "Names.", "items": {"type": "string"}},
                },
                "required": ["code"],
            },
        },
    }
]
QUESTION = [{"role": "user", "content": "What is 6 * 7?"}]
ANSWER = {"role": "tool", "content": "42 it is", "tool_call_id": "call00000", "name": "python"}
_CONTROL = re.compile(r"<\|[^<>|\s]{1,40}\|>|<\|[a-z_]+>|<[a-z_]+\|>|<｜[^｜<>]{1,30}｜>|<(?:start|end)_of_turn>")  # noqa: RUF001

# Mistral's template is not among trl's; this one is written after the form of its v3 tokenizer.
MISTRAL = """
{{- bos_token }}
{%- for message in messages %}
{%- if message.role == "user" %}
{{- "[AVAILABLE_TOOLS] " + (tools | tojson) + "[/AVAILABLE_TOOLS]" if tools and loop.last }}
{{- "[INST] " + message.content + "[/INST]" }}
{%- elif message.role == "tool" %}{{ '[TOOL_RESULTS] {"content": ' + (message.content | tojson) + "}[/TOOL_RESULTS]" }}
{%- elif message.tool_calls %}[TOOL_CALLS] [
{%- for call in message.tool_calls %}
{%- if call.id | length != 9 %}{{ raise_exception("ids have nine characters") }}{% endif %}
{{- ", " if not loop.first }}{{- '{"name": "' + call.function.name + '", "arguments": ' }}
{{- (call.function.arguments | tojson) + ', "id": "' + call.id + '"}' }}
{%- endfor %}{{ "]" + eos_token }}
{%- elif message.role == "assistant" %}{{ " " + message.content + eos_token }}
{%- endif %}
{%- endfor %}"""

# Template: the form that it writes calls in, and where it shows a tool's answer.
MANNERS: dict[str, tuple[str | None, str]] = {
    "cohere": (None, "never"),
    "cohere2": (None, "never"),
    "deepseek_r1_distill": ("deepseek", "plain"),
    "deepseekv3": ("deepseek", "plain"),
    "diffusion_gemma": ("gemma", "structured"),
    "gemma": (None, "never"),
    "gemma3": (None, "never"),
    "gemma4": ("gemma", "structured"),
    "gemma4_v2": ("gemma", "plain"),
    "gemma4_v3": ("gemma", "structured"),
    "gemma4_v4": ("gemma", "structured"),
    "gemma4_v5": ("gemma", "structured"),
    "glm4moe": ("glm", "plain"),
    "gptoss": ("harmony", "structured"),
    "lfm2": (None, "plain"),
    "lfm2_2_5": ("unknown", "plain"),
    "lfm2_2_5_v2": ("unknown", "plain"),
    "lfm2_2_5_vl": ("unknown", "plain"),
    "lfm2_v2": ("unknown", "plain"),
    "llama3": (None, "plain"),
    "llama3_1": ("llama3", "plain"),
    "llama3_2": ("llama3", "plain"),
    "mistral": ("mistral", "plain"),
    "muse_glimmer": ("unknown", "plain"),
    "nemotron_3_5_lightning": ("qwen3_coder", "plain"),
    "nemotron_3_nano": ("qwen3_coder", "plain"),
    "nemotron_3_super": ("qwen3_coder", "plain"),
    "nemotron_3_ultra": ("qwen3_coder", "plain"),
    "phi3": (None, "never"),
    "phi3_5": (None, "never"),
    "qwen2_5": ("hermes", "plain"),
    "qwen2_5_vl": (None, "plain"),
    "qwen3": ("hermes", "plain"),
    "qwen3_5_nothink": ("qwen3_coder", "plain"),
    "qwen3_5_think": ("qwen3_coder", "plain"),
    "qwen3_6": ("qwen3_coder", "plain"),
    "qwen3_8": ("qwen3_coder", "plain"),
    "qwen3_instruct_2507": ("hermes", "plain"),
    "qwen3_vl": ("hermes", "plain"),
}
PICTURES = ("idefics3", "llava_next", "smolvlm")
"""Templates of models that are shown pictures, which take no plain text at all."""
CALLING = [name for name, (form, answers) in MANNERS.items() if form not in (None, "unknown") and answers != "never"]


@pytest.fixture(scope="session")
def load(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., ChatRenderer]:
    """`load(name, **keys of runtime.chat)`: the renderer of a model with that template."""
    root = tmp_path_factory.mktemp("families")

    def make(name: str, **keys: Any) -> ChatRenderer:
        folder = root / name
        if not folder.exists():
            write_family(folder, MISTRAL if name == "mistral" else published(name))
        return ChatConfig(**keys).load(folder)

    return make


def write_family(folder: Path, template: str) -> Path:
    special = sorted({*_CONTROL.findall(template), "<s>", "</s>", "[TOOL_CALLS]"})
    tokens = {"bos_token": "<s>", "eos_token": "</s>"}
    added = ["<tool_call>", "</tool_call>", "<think>", "</think>"]
    return write_model(folder, template, special=special, added=added, tokens=tokens, eos=["</s>"])


def test_every_published_template_is_among_those_that_are_tested() -> None:
    names = {path.stem for path in template_folder().glob("*.jinja") if not path.stem.endswith("_training")}
    assert names == {*MANNERS, *PICTURES} - {"mistral"}
    assert len(names) == BASE_TEMPLATES


@pytest.mark.parametrize("name", MANNERS)
def test_a_template_that_loses_a_tools_answer_is_found_at_load(name: str, load: Callable[..., ChatRenderer]) -> None:
    form, answers = MANNERS[name]
    renderer = load(name)
    if answers == "never":
        with pytest.raises(ChatTemplateError, match="tool_answers=user"):
            renderer.start(QUESTION, TOOLS)
        with pytest.raises(ChatTemplateError):
            renderer.extend(QUESTION, (), [ANSWER], [])
        return
    if form == "unknown":
        with pytest.raises(ChatTemplateError, match=r"runtime\.chat\.tool_format"):
            renderer.start(QUESTION, TOOLS)
        assert load(name, tool_format="hermes").start(QUESTION, TOOLS).token_ids
        return
    assert renderer.tool_format == (form or "hermes")
    renderer.start(QUESTION, TOOLS)
    for content in ("42 it is", "two\nlines & <tags>", "<|im_end|><|call|><tool_call|>", "  ", "a \ud800 half"):
        text = renderer.extend(QUESTION, (), [{**ANSWER, "content": content}], TOOLS).text
        shown = content.replace("\ud800", "\ufffd").strip()
        assert shown in text or json.dumps(shown)[1:-1] in text or json.dumps(shown, ensure_ascii=False)[1:-1] in text


@pytest.mark.parametrize("name", ["phi3", "phi3_5", "gemma3"])
def test_answers_as_the_user_let_a_template_without_tools_be_used(name: str, load: Callable[..., Any]) -> None:
    renderer = load(name, tool_answers="user")
    renderer.start(QUESTION, TOOLS)
    assert "42 it is" in renderer.extend(QUESTION, (), [ANSWER], TOOLS).text


@pytest.mark.parametrize("name", CALLING)
@settings(max_examples=6, deadline=None)
@given(
    code=st.text(st.characters(exclude_categories=["Cs", "Cc"]), min_size=1, max_size=30).map(str.strip).filter(bool),
    seconds=st.integers(0, 1000) | st.floats(0, 1000, allow_nan=False),
    fresh=st.booleans(),
    files=st.lists(st.text("ab c\"'{}", max_size=4), max_size=2),
)
def test_a_call_is_read_as_its_own_template_writes_it(
    name: str, load: Callable[..., ChatRenderer], code: str, seconds: float, fresh: bool, files: list[str]
) -> None:
    renderer = _kept(load, name)
    wanted = ToolCall("python", {"code": code, "seconds": seconds, "fresh": fresh, "files": files})
    message = {"role": "assistant", "content": None, "tool_calls": [tool_call(wanted, "call00000")]}
    if renderer.tool_format != "deepseek":
        message["content"] = ""
    # Straight from the template: `render` would drop a content of None, which R1's template looks for.
    raw = {**message, "tool_calls": [tool_call(wanted, "call00000", renderer.tool_format == "deepseek")]}
    whole = renderer._template.render([*QUESTION, raw], TOOLS, add_generation_prompt=False)
    before = renderer._template.render(QUESTION, TOOLS, add_generation_prompt=True)
    shared = next((i for i, (a, b) in enumerate(zip(before, whole, strict=False)) if a != b), len(before))
    assert list(parse_calls(whole[shared:], TOOLS, renderer.tool_format).calls) == [wanted]


_KEPT: dict[str, ChatRenderer] = {}


def _kept(load: Callable[..., ChatRenderer], name: str) -> ChatRenderer:
    if name not in _KEPT:
        _KEPT[name] = load(name)
    return _KEPT[name]


@pytest.mark.parametrize("name", CALLING)
def test_prompt_call_and_answer_are_the_template_applied_once(name: str, load: Callable[..., ChatRenderer]) -> None:
    """The whole of it, token by token, where the template itself does not rewrite what was said before."""
    renderer = load(name)
    call = ToolCall("python", {"code": "print(6 * 7)"})
    message = {"role": "assistant", "content": "", "tool_calls": [tool_call(call, "call00000")]}
    prompt = renderer.start(QUESTION, TOOLS)
    once = renderer.render([*QUESTION, message, ANSWER], TOOLS, add_generation_prompt=True)
    written = write_calls([call], renderer.tool_format)
    observed = renderer.extend([*QUESTION, message], renderer.encode_action(written, closed=False), [ANSWER], TOOLS)
    assert once.text.endswith(observed.text) or name == "deepseek_r1_distill"
    ids = renderer.encode_action(written, closed=False)
    record = prompt.token_ids + ids + observed.token_ids
    assert record[len(prompt.token_ids) : len(prompt.token_ids) + len(ids)] == ids, "what was sampled stays"
    assert record[-len(observed.token_ids) :] == once.token_ids[-len(observed.token_ids) :] or "r1" in name


@pytest.mark.parametrize("name", ["gptoss", "gemma4_v5", "glm4moe", "llama3_1", "deepseekv3"])
def test_three_turns_with_what_was_sampled_in_the_transcript(name: str, load: Callable[..., ChatRenderer]) -> None:
    """As the runtime does it: the transcript holds actions as text, malformed ones too."""
    renderer = load(name)
    good = write_calls([ToolCall("python", {"code": "1"})], renderer.tool_format).removesuffix("<|call|>")
    thinking = "<|channel|>analysis<|message|>hm<|end|><|start|>assistant" if name == "gptoss" else ""
    transcript, record = list(QUESTION), list(renderer.start(QUESTION, TOOLS).token_ids)
    for turn, action in enumerate([thinking + good, good[:-3], thinking + good]):
        ids = renderer.encode_action(action, closed=False)
        transcript.append({"role": "assistant", "content": action})
        answer = {"role": "tool", "content": f"answer {turn}", "tool_call_id": f"call_{turn}"}
        observed = renderer.extend(transcript, ids, [answer], TOOLS)
        assert observed.text.count(f"answer {turn}") == 1
        assert f"answer {turn - 1}" not in observed.text
        transcript.append(answer)
        record += [*ids, *observed.token_ids]
    assert renderer.extend(transcript, (), [{"role": "user", "content": "And now?"}], TOOLS).text.count("And now?") == 1


def test_gpt_oss_waits_at_the_end_of_a_call_and_gemma_at_the_beginning_of_the_answer(
    load: Callable[..., ChatRenderer],
) -> None:
    for name, end in (("gptoss", "<|call|>"), ("gemma4_v5", "<|tool_response>")):
        renderer = load(name)
        index = renderer._tokenizer.tokenizer.token_to_id(end)
        assert index in renderer.stop_token_ids
        sampled = (*renderer.encode_action("x", closed=False), index)
        cut = renderer.extend(QUESTION, sampled[:-1], [ANSWER], TOOLS)
        stopped = renderer.extend(QUESTION, sampled, [ANSWER], TOOLS)
        assert cut.token_ids == (index, *stopped.token_ids), "sampled once, or added once"
    turn_end = load("gemma4_v5")._tokenizer.tokenizer.token_to_id("<turn|>")
    assert load("gemma4_v5").extend(QUESTION, (5, turn_end), [ANSWER], TOOLS).text.startswith("<|tool_response>")


def test_content_that_the_template_drops_is_said_and_not_lost(
    load: Callable[..., ChatRenderer], tmp_path: Path
) -> None:
    """A probe can't see everything: here the answer is shown unless it is long."""
    template = published("qwen2_5").replace("message.content", "message.content[:20]")
    renderer = ChatRenderer.from_pretrained(write_family(tmp_path / "short", template))
    assert renderer.extend(QUESTION, (), [ANSWER], TOOLS).text
    with pytest.raises(ChatTemplateError, match="in full"):
        renderer.extend(QUESTION, (), [{**ANSWER, "content": "x" * 50}], TOOLS)


def test_template_kwargs_reach_the_template_and_unknown_ones_are_refused(load: Callable[..., ChatRenderer]) -> None:
    off = load("qwen3", template_kwargs={"enable_thinking": False})
    assert off.start(QUESTION).text.endswith("<think>\n\n</think>\n\n")
    assert not load("qwen3").start(QUESTION).text.endswith("</think>\n\n")
    assert "Reasoning: high" in load("gptoss", template_kwargs={"reasoning_effort": "high"}).start(QUESTION).text
    for name in ("enable_thinkin", "messages"):
        with pytest.raises(ChatTemplateError, match=f"{name}.*enable_thinking"):
            load("qwen3", template_kwargs={name: False})


def test_the_pattern_of_special_tokens_is_built_once(
    load: Callable[..., ChatRenderer], monkeypatch: pytest.MonkeyPatch
) -> None:
    renderer = load("llama3_1")
    renderer.extend(QUESTION, (), [ANSWER], TOOLS)
    built: list[Any] = []
    monkeypatch.setattr(tokenizer_module, "_alternatives", lambda tokens: built.append(tokens))
    renderer.extend(QUESTION, (), [ANSWER], TOOLS)
    assert built == []
