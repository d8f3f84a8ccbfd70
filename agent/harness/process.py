"""Running a harness once: a program with its whole process group, or a coroutine function inside this process."""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import inspect
import os
import signal
import sys
import tempfile
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any

import msgspec

from agent.child_processes import end_group, start_child, stop_child
from agent.harness.task import TASK_FILE, HarnessTask
from agent.runtime.settings import ConfigError, HarnessConfig

Solve = Callable[[HarnessTask], Awaitable[Any]]
"""Runs a harness to its end; what it returns is its reward (a number), its answer (a text), or nothing. Raises
`HarnessFailed`. Cancelled, it ends the harness, and all that it has started, before it leaves."""

_MOST_OUTPUT = 1 << 16
"""Bytes of a program's output that are kept, its last ones."""
_TOLD = 2000
_MOST_PROMPT = 1 << 16
"""A longer prompt is in the task's file only: the system limits what an environment variable may hold."""
_DRAIN_S = 5.0


class HarnessFailed(Exception):
    """The harness ended in another way than well; the message has the end of what it wrote."""


def harness_of(config: HarnessConfig) -> Solve:
    """How to run the harness of `config`; imports a `call`, and raises `ConfigError` for one that is not there."""
    if not config.call:
        return _Program(config, config.command)
    function = imported(config.call)
    if inspect.iscoroutinefunction(function):
        return _Inside(config.call, function)
    return _Program(config, (sys.executable, "-m", "agent.harness.call", config.call))


def imported(target: str) -> Callable[[HarnessTask], Any]:
    """The function `package.module:function`; raises `ConfigError`."""
    module, _, name = target.partition(":")
    try:
        function = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise ConfigError(
            f"`harness.call`: there is no {target}: {error}. Its module must be importable where the runtime runs: "
            "installed, or in the working folder"
        ) from error
    if not callable(function):
        raise ConfigError(f"`harness.call`: {target} is no function")
    return function


class _Inside:
    """A coroutine function of somebody's, on this event loop."""

    def __init__(self, name: str, function: Callable[[HarnessTask], Awaitable[Any]]) -> None:
        self._name, self._function = name, function

    async def __call__(self, task: HarnessTask) -> Any:
        try:
            return await self._function(task)
        except (Exception, SystemExit) as error:
            raise HarnessFailed(f"{self._name} raised {type(error).__name__}: {error}") from error


class _Program:
    """A program in a process group of its own, with its task in its environment."""

    def __init__(self, config: HarnessConfig, command: tuple[str, ...]) -> None:
        self._config, self._command = config, command

    async def __call__(self, task: HarnessTask) -> None:
        with tempfile.TemporaryDirectory(prefix="sao-harness-", ignore_cleanup_errors=True) as scratch:
            task_file = Path(scratch) / "task.json"
            task_file.write_bytes(msgspec.json.encode(task))
            (Path(scratch) / "scratch").mkdir()
            words = _placeholders(task, task_file)
            folder = self._config.folder
            command = [_filled(word, words) for word in self._command]
            added = {name: _filled(value, words) for name, value in self._config.environment.items()}
            # A pipe of our own: with one of asyncio's a program does not count as ended before its grandchildren have.
            ours, theirs = os.pipe()
            output = _Output()
            reading, _ = await asyncio.get_running_loop().connect_read_pipe(lambda: output, os.fdopen(ours, "rb", 0))
            try:
                process = await start_child(
                    *command,
                    log=theirs,
                    env={**program_environment(task, task_file, os.environ), **added},
                    cwd=None if folder is None else Path(_filled(folder, words)),
                    when_parent_dies=signal.SIGKILL,
                )
            except OSError as error:
                reading.close()
                raise HarnessFailed(f"cannot start {command[0]}: {error.strerror or error}") from error
            finally:
                os.close(theirs)
            try:
                code = await process.wait()
            finally:
                try:
                    # Shielded, so that a second cancellation leaves nothing behind either.
                    await asyncio.shield(asyncio.ensure_future(stop_child(process, grace_s=self._config.grace_s)))
                    end_group(process)  # what it has left in the background, also after a good end
                    with contextlib.suppress(TimeoutError):
                        await asyncio.wait_for(output.ended.wait(), _DRAIN_S)
                finally:
                    reading.close()
        if code != 0:
            said = bytes(output.kept).decode(errors="replace").strip()[-_TOLD:]
            raise HarnessFailed(f"{command[0]} ended with code {code}. The end of its output:\n{said or '(none)'}")


def program_environment(task: HarnessTask, task_file: Path, inherited: Mapping[str, str]) -> dict[str, str]:
    """The variables of a program: those of this process, those that clients read, and what the task is."""
    found = {name: value for name, value in inherited.items() if name != "ANTHROPIC_AUTH_TOKEN"}
    host = task.session_url.split("//", 1)[-1].split("/", 1)[0].rsplit(":", 1)[0]
    for name in ("no_proxy", "NO_PROXY"):  # a proxy of this machine's would not find the way back to it
        found[name] = ",".join(filter(None, [found.get(name, ""), host]))
    found |= {
        "OPENAI_BASE_URL": task.openai_base_url,
        "OPENAI_API_KEY": task.api_key,
        "ANTHROPIC_BASE_URL": task.anthropic_base_url,
        "ANTHROPIC_API_KEY": task.api_key,
        "SAO_SESSION_URL": task.session_url,
        "SAO_MODEL": task.model,
        "SAO_TASK_ID": task.task_id,
        TASK_FILE: str(task_file),
    }
    if len(task.prompt.encode()) <= _MOST_PROMPT and "\0" not in task.prompt:
        found["SAO_TASK"] = task.prompt
    return found


def _placeholders(task: HarnessTask, task_file: Path) -> dict[str, str]:
    return {
        "{task_id}": task.task_id,
        "{task_file}": str(task_file),
        "{scratch}": str(task_file.parent / "scratch"),
        "{python}": sys.executable,
        "{session_url}": task.session_url,
        "{openai_base_url}": task.openai_base_url,
        "{anthropic_base_url}": task.anthropic_base_url,
        "{api_key}": task.api_key,
        "{model}": task.model,
    }


def _filled(text: str, words: Mapping[str, str]) -> str:
    # Not str.format: braces of JSON and of shells are no placeholders.
    for name, value in words.items():
        text = text.replace(name, value)
    return text


class _Output(asyncio.Protocol):
    """Keeps the end of what a program writes; what is not read would block it."""

    def __init__(self) -> None:
        self.kept, self.ended = bytearray(), asyncio.Event()

    def data_received(self, data: bytes) -> None:
        self.kept += data
        del self.kept[:-_MOST_OUTPUT]

    def connection_lost(self, error: Exception | None) -> None:
        self.ended.set()
