"""Recorded traces for a cold start on the demo set of `sao/SWEBench-v0`.

The scripted engineer of `envs.swe_bench.demo` played them in real containers, and what it saw ships with the package:
a cold start needs no container and is the same everywhere. `RECORDED` says how they were made.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Mapping
from importlib import resources
from typing import Any

from envs.core import Message

ENV_ID = "sao/SWEBench-v0"
RECORDED = "python -m envs.swe_bench.demo traces envs/swe_bench/demo/traces.jsonl --count 80 --error-rate 0.5"
_MALFORMED = "Malformed tool call"


def has_recorded(env_id: str, kwargs: Mapping[str, Any]) -> bool:
    """Whether there are traces for this environment: the demo set, with the tools of the `bash` scaffold."""
    return env_id == ENV_ID and kwargs.get("instances", "demo") == "demo" and kwargs.get("scaffold") == "bash"


def recorded_traces() -> tuple[list[list[Message]], list[list[Message]]]:
    """All of them: those that solve their issue without a malformed call, and those with a mistake."""
    clean: list[list[Message]] = []
    mistaken: list[list[Message]] = []
    text = (resources.files("envs.swe_bench.demo") / "traces.jsonl").read_text(encoding="utf-8")
    for line in text.splitlines():
        trace = json.loads(line)
        messages: list[Message] = trace["messages"]
        sound = trace["reward"] > 0 and not any(m["content"].startswith(_MALFORMED) for m in messages)
        (clean if sound else mistaken).append(messages)
    return clean, mistaken


def swe_traces(count: int, *, bad: float, seed: int) -> Iterator[list[Message]]:
    """`count` of them drawn with `seed`, again and again if there are not so many; a share `bad` has a mistake."""
    rng = random.Random(seed)
    clean, mistaken = recorded_traces()
    for _ in range(count):
        yield rng.choice(mistaken if rng.random() < bad else clean)
