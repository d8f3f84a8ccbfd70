"""Whether there is a vLLM to test on."""

from __future__ import annotations

import os

from agent.engines.base import EngineFault
from agent.engines.vllm.launch import vllm_python


def have_vllm() -> bool:
    """Whether tests on vLLM are collected: where its environment is, and where it is required, to fail there."""
    if os.environ.get("SAO_REQUIRE_VLLM") == "1":
        return True
    try:
        return vllm_python().exists()
    except EngineFault:
        return False
