"""The runtime's scripted engine and environment are used here as well."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from byte_model import write_byte_model
from model_folders import write_model
from published_templates import published

from agent.chat.renderer import ChatRenderer

sys.path.insert(0, str(Path(__file__).parents[1] / "runtime"))


@pytest.fixture(scope="session")
def renderer(tmp_path_factory: pytest.TempPathFactory) -> ChatRenderer:
    """Of a model with a token a byte, that knows no tools."""
    return ChatRenderer.from_pretrained(write_byte_model(tmp_path_factory.mktemp("bytes")))


@pytest.fixture(scope="session")
def tool_renderer(tmp_path_factory: pytest.TempPathFactory) -> ChatRenderer:
    """Of a model that writes tool calls in the form of Qwen 3."""
    folder = write_model(
        tmp_path_factory.mktemp("qwen"),
        published("qwen3"),
        special=["<|im_start|>", "<|im_end|>", "<|endoftext|>"],
        added=["<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>"],
        tokens={"eos_token": "<|im_end|>"},
        eos=["<|im_end|>"],
    )
    return ChatRenderer.from_pretrained(folder)
