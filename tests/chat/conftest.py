"""Model folders of the three template families, with tokenizers trained here.

The templates are written for these tests after the families' public formats; tokenizers are byte-level BPEs with the
families' special tokens, flags (`<tool_call>` and `<think>` are added but not special in Qwen) and pre-tokenizers.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from model_folders import write_model
from published_templates import template_folder
from tokenizers import normalizers

from agent.chat.renderer import ChatRenderer

_TOOLS_BLOCK = r"""
{%- macro tool_block(tools) -%}
# Tools

Call functions as needed. Their signatures are within <tools></tools>:
<tools>
{%- for tool in tools %}
{{ "\n" + (tool | tojson) }}
{%- endfor %}
{{ "\n</tools>\n\nAnswer each call as <tool_call>\n{\"name\": <name>, \"arguments\": <object>}\n</tool_call>" }}
{%- endmacro -%}
{%- macro head(first, tools, default) -%}
{%- if tools or first.role == "system" or default -%}
<|im_start|>system{{ "\n" }}
{%- if first.role == "system" %}{{ first.content }}{% else %}{{ default }}{% endif %}
{%- if tools %}{{ "\n\n" if first.role == "system" or default }}{{ tool_block(tools) }}{% endif %}
{{- "<|im_end|>\n" }}
{%- endif -%}
{%- endmacro -%}
{%- macro calls(message, content) -%}
{%- for call in message.tool_calls or [] %}
{%- set call = call.function if call.function else call %}
{{- "\n" if not loop.first or content }}
{{- '<tool_call>\n{"name": "' + call.name + '", "arguments": ' + (call.arguments | tojson) + "}\n</tool_call>" }}
{%- endfor -%}
{%- endmacro -%}
{%- macro tool_turn(messages, i) -%}
{%- if i == 0 or messages[i - 1].role != "tool" %}{{ "<|im_start|>user" }}{% endif %}
{{- "\n<tool_response>\n" + messages[i].content + "\n</tool_response>" }}
{%- if i == messages | length - 1 or messages[i + 1].role != "tool" %}{{ "<|im_end|>\n" }}{% endif %}
{%- endmacro -%}
"""

CHATML = (
    _TOOLS_BLOCK
    + r"""
{{- head(messages[0], tools, "You are a helpful assistant.") }}
{%- for message in messages %}
{%- if message.role == "tool" %}{{ tool_turn(messages, loop.index0) }}
{%- elif message.role == "assistant" and message.tool_calls %}
{{- "<|im_start|>assistant" }}{{ "\n" + message.content if message.content }}
{%- set text = calls(message, "x") %}{{ text + "<|im_end|>\n" }}
{%- elif not (message.role == "system" and loop.first) %}
{{- "<|im_start|>" + message.role + "\n" + message.content + "<|im_end|>\n" }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ "<|im_start|>assistant\n" }}{% endif %}
"""
)

# Thinking is kept after the last real question (tool answers are not questions) and stripped before it.
QWEN3 = (
    _TOOLS_BLOCK
    + r"""
{{- head(messages[0], tools, "") }}
{%- set ns = namespace(last=messages | length - 1, found=false) %}
{%- for message in messages[::-1] %}
{%- set tool_like = message.content is string and message.content.startswith("<tool_response>")
    and message.content.endswith("</tool_response>") %}
{%- if not ns.found and message.role == "user" and not tool_like %}
{%- set ns.found = true %}{%- set ns.last = messages | length - 1 - loop.index0 %}
{%- endif %}
{%- endfor %}
{%- for message in messages %}
{%- if message.role == "tool" %}{{ tool_turn(messages, loop.index0) }}
{%- elif message.role == "assistant" %}
{%- set content = message.content or "" %}
{%- set thought = "" %}
{%- if message.reasoning_content is string %}{%- set thought = message.reasoning_content %}
{%- elif "</think>" in content %}
{%- set thought = content.split("</think>")[0].rstrip("\n").split("<think>")[-1].lstrip("\n") %}
{%- set content = content.split("</think>")[-1].lstrip("\n") %}
{%- endif %}
{{- "<|im_start|>assistant\n" }}
{%- if loop.index0 > ns.last and (loop.last or thought) %}
{{- "<think>\n" + thought.strip("\n") + "\n</think>\n\n" + content.lstrip("\n") }}
{%- else %}{{ content }}{%- endif %}
{{- calls(message, content) + "<|im_end|>\n" }}
{%- elif not (message.role == "system" and loop.first) %}
{{- "<|im_start|>" + message.role + "\n" + message.content + "<|im_end|>\n" }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
{{- "<|im_start|>assistant\n" }}
{%- if prefill_think is defined and prefill_think %}{{ "<think>\n" }}{% endif %}
{%- if enable_thinking is defined and not enable_thinking %}{{ "<think>\n\n</think>\n\n" }}{% endif %}
{%- endif %}
"""
)

LLAMA3 = r"""
{%- macro turn(role) %}{{ "<|start_header_id|>" + role + "<|end_header_id|>\n\n" }}{% endmacro -%}
{{- bos_token }}
{%- set system = "" %}
{%- if messages[0].role == "system" %}
{%- set system = messages[0].content | trim %}{%- set messages = messages[1:] %}
{%- endif %}
{{- turn("system") }}{{ "Environment: ipython\n" if tools }}Cutting Knowledge Date: December 2023
Today Date: {{ date_string or "26 Jul 2024" }}{{ "\n\n" + system + "<|eot_id|>" }}
{%- for message in messages %}
{%- if message.role == "user" and loop.first and tools %}
{{- turn("user") + "Answer with a JSON function call from:\n\n" }}
{%- for tool in tools %}{{ (tool | tojson(indent=4)) + "\n\n" }}{% endfor %}
{{- message.content | trim }}{{ "<|eot_id|>" }}
{%- elif message.role in ["tool", "ipython"] %}
{{- turn("ipython") }}
{%- if message.content is mapping or message.content is iterable %}{{ message.content | tojson }}
{%- else %}{{ message.content }}{% endif %}
{{- "<|eot_id|>" }}
{%- elif message.tool_calls %}
{%- if message.tool_calls | length != 1 %}{{ raise_exception("one tool call a turn") }}{% endif %}
{%- set call = message.tool_calls[0].function %}
{{- turn("assistant") + '{"name": "' + call.name + '", "parameters": ' + (call.arguments | tojson) + "}<|eot_id|>" }}
{%- else %}
{{- turn(message.role) + message.content | trim + "<|eot_id|>" }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ turn("assistant") }}{% endif %}
"""

_QWEN_SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
_QWEN_ADDED = ["<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>"]
_LLAMA_SPECIAL = [
    "<|begin_of_text|>",
    "<|end_of_text|>",
    "<|start_header_id|>",
    "<|end_header_id|>",
    "<|eom_id|>",
    "<|eot_id|>",
    "<|python_tag|>",
]


def _qwen(folder: Path, template: str) -> Path:
    return write_model(
        folder,
        template,
        special=_QWEN_SPECIAL,
        added=_QWEN_ADDED,
        tokens={"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"},
        eos=["<|im_end|>", "<|endoftext|>"],
        normalizer=normalizers.NFC(),
    )


def _llama(folder: Path, template: str) -> Path:
    return write_model(
        folder,
        template,
        special=_LLAMA_SPECIAL,
        added=[],
        tokens={"bos_token": "<|begin_of_text|>", "eos_token": "<|eot_id|>"},
        eos=["<|end_of_text|>", "<|eom_id|>", "<|eot_id|>"],
        ignore_merges=True,
    )


def published_templates() -> dict[str, Path]:
    """The families' published templates."""
    names = ("qwen3", "qwen3_instruct_2507", "qwen2_5", "llama3", "llama3_1", "llama3_2")
    return {f"published-{name}": template_folder() / f"{name}.jinja" for name in names}


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """`family`: every template; `thinking_family`: those that strip thinking."""
    published = list(published_templates())
    if "thinking_family" in metafunc.fixturenames:
        metafunc.parametrize("thinking_family", ["qwen3", *(name for name in published if name == "published-qwen3")])
    if "family" in metafunc.fixturenames:
        metafunc.parametrize("family", ["qwen3", "chatml", "llama3", *published])


@pytest.fixture(scope="session")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Model folders by family."""
    root = tmp_path_factory.mktemp("models")
    makers: dict[str, tuple[Callable[[Path, str], Path], str]] = {
        "qwen3": (_qwen, QWEN3),
        "chatml": (_qwen, CHATML),
        "llama3": (_llama, LLAMA3),
    }
    for name, path in published_templates().items():
        makers[name] = (_llama if "llama" in name else _qwen, path.read_text())
    return {name: make(root / name, template) for name, (make, template) in makers.items()}


@pytest.fixture(scope="session")
def renderer_of(folders: dict[str, Path]) -> Callable[..., ChatRenderer]:
    """`renderer_of(family, **template_kwargs)`."""

    @functools.cache
    def load(family: str, **template_kwargs: bool) -> ChatRenderer:
        return ChatRenderer.from_pretrained(folders[family], template_kwargs=template_kwargs)

    return load


@pytest.fixture(scope="session")
def reference_of(folders: dict[str, Path]) -> Callable[[str], Any]:
    """`reference_of(family)`: transformers' own tokenizer of the same folder."""
    transformers = pytest.importorskip("transformers")
    return functools.cache(lambda family: transformers.AutoTokenizer.from_pretrained(folders[family]))
