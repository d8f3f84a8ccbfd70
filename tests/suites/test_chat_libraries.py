"""LangChain and LiteLLM talk to the server as they talk to others, in an environment of their own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from suite_pythons import CLIENTS_PYTHON, ROOT, have

sys.path.insert(0, str(ROOT / "tests" / "serve"))
from serve_tools import NAME, ServerProcess, serving, write_models, write_recipe

pytestmark = [
    pytest.mark.suites,
    pytest.mark.xdist_group("chat-libraries"),
    pytest.mark.timeout(300),
    pytest.mark.skipif(not have(CLIENTS_PYTHON), reason="LangChain and LiteLLM are not here: make suites"),
]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    folder = tmp_path_factory.mktemp("chat_libraries")
    with serving(write_recipe(folder, write_models(folder)[0])) as running:
        yield running


def told(server: ServerProcess, library: str) -> dict[str, Any]:
    script = Path(__file__).with_name("chat_libraries_client.py")
    # Nothing is fetched from outside, and no path of ours shadows what is installed there.
    env = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"} | {"LITELLM_LOCAL_MODEL_COST_MAP": "True"}
    words = [str(CLIENTS_PYTHON), str(script), library, server.url, NAME]
    done = subprocess.run(words, capture_output=True, text=True, timeout=240, env=env)
    assert done.returncode == 0, done.stderr[-4000:]
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def test_langchain_chats_streams_binds_tools_and_reads_log_probs(server: ServerProcess) -> None:
    found = told(server, "langchain")
    assert found["id"].startswith("chatcmpl-v0-"), "the receipt for feedback reaches the program"
    assert 0 < found["tokens"] <= 8
    assert found["choices"] == 2
    assert 0 < found["logprobs"] <= 8
    assert isinstance(found["streamed"], str)
    assert found["responses"] in ("completed", "incomplete")


def test_litellm_speaks_both_wires_and_is_refused_by_name(server: ServerProcess) -> None:
    found = told(server, "litellm")
    assert found["id"].startswith("chatcmpl-v0-")
    assert 0 < found["tokens"] <= 8
    assert 0 < found["anthropic"] <= 8
    assert "n must be from 1" in found["refused"]
