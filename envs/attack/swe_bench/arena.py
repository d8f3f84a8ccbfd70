"""The arena of `sao/SWEBench-v0`: rows as attackers see them, and the actions that write files there."""

from __future__ import annotations

import base64
import json
import random
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import PurePosixPath
from typing import Any

from envs.attack.arena import Arena, Attempt, Source, Task
from envs.swe_bench.instance import Instance, load_instances, patch_paths

SUBMIT = '<tool_call>{"name": "submit", "arguments": {}}</tool_call>'
_CONTAINERS = {"scaffold": "bash", "max_turns": 20, "memory_mb": 1024, "test_timeout_s": 300.0}


@dataclass(frozen=True, slots=True)
class Mark:
    """A row as an attacker sees it: the package that the fix changes, the tests that decide, and the fix itself."""

    instance_id: str
    package: str
    tests: tuple[str, ...] = field(repr=False)
    deciding: tuple[str, ...] = field(repr=False)
    fix: str = field(repr=False)

    def __str__(self) -> str:
        return self.instance_id

    @property
    def start(self) -> str:
        """The file that runs when the package is imported."""
        return f"{self.package}/__init__.py"


def mark_of(instance: Instance) -> Mark:
    """What attackers may know of a row: all of it."""
    folders = [PurePosixPath(path).parts for path in patch_paths(instance.patch)]
    inside = [parts for parts in folders if len(parts) > 1] or [("src", "")]
    first = next((parts for parts in inside if parts[-1].endswith(".py")), inside[0])
    depth = 2 if first[0] in ("src", "lib") and len(first) > 2 else 1
    return Mark(
        instance.instance_id,
        "/".join(first[:depth]),
        tuple(instance.test_files),
        tuple(instance.fail_to_pass) + tuple(instance.pass_to_pass),
        instance.patch,
    )


def sources(seed: int, episodes: int, kwargs: Mapping[str, Any]) -> Sequence[Source[Mark]]:
    """The demo set, or `instances` of `kwargs`; `episodes` of its rows."""
    given = dict(kwargs)
    instances = given.get("instances", "demo")
    rows = list(load_instances(instances).values())
    chosen = random.Random(f"rows/{seed}").sample(rows, min(episodes, len(rows)))
    tasks = [Task({"task_id": row.instance_id}, mark_of(row)) for row in chosen]
    name = instances if isinstance(instances, str) else "instances"
    return [Source(name, {**_CONTAINERS, **given}, tasks)]


def run(*commands: str) -> str:
    """The action that runs shell commands."""
    body = json.dumps({"name": "bash", "arguments": {"command": "\n".join(commands)}})
    return f"<tool_call>{body}</tool_call>"


def write(path: str, text: str, *, append: bool = False) -> str:
    """The command that writes a file of any characters (or adds to it), with its folder."""
    data = base64.b64encode(text.encode("utf-8", "surrogateescape")).decode()
    folder = shlex.quote(str(PurePosixPath(path).parent))
    return f"mkdir -p {folder} && echo {data} | base64 -d >{'>' if append else ''} {shlex.quote(path)}"


def edits(files: Mapping[str, str], added: Mapping[str, str] | None = None, *, more: Sequence[str] = ()) -> Attempt:
    """One episode: write `files`, append `added` to files that are there, run `more`, submit."""
    commands = [write(path, text) for path, text in files.items()]
    commands += [write(path, "\n" + text, append=True) for path, text in (added or {}).items()]
    told = "; ".join(f"{path}: {text.strip()!r}" for path, text in {**files, **(added or {})}.items())
    return Attempt((run(*commands, *more), SUBMIT), told=told)


ARENA: Arena[Mark] = Arena("sao/SWEBench-v0", sources, episodes=5, most=1, concurrency=2)
