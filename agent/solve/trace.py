"""What a person sees of one episode while it runs: each turn as it is sampled, carried out and answered.

`TracedEngine` and `TracedEnv` stand in front of the real thing, pass everything through, and show it on the way.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.rule import Rule
from rich.text import Text

from agent.engines.base import Completion, Engine, EngineHealth, WeightStream
from agent.episode import Episode, SamplingParams
from envs.core import AsyncEnv, Model, Step
from envs.tool_calls import parse_calls

STYLES = {"system": "dim", "user": "cyan", "assistant": "bold", "tool": "green"}
_CONTRACT = ("messages", "tools", "task_id", "segment", "truncation", "metrics")
"""The keys of `info` that every environment has (`envs.core.AsyncEnv`); the others are an environment's own."""
_SHOWN_ANYWAY = ("turns", "generate_s", "environment_s")
"""Metrics that the last line says in its own words."""


class Trace:
    """Writes to a terminal. `shown_chars`: of a longer text its beginning and end are shown (0: all of it)."""

    def __init__(self, console: Console, *, shown_chars: int = 2000) -> None:
        self._console = console
        self._shown_chars = shown_chars

    def running(self, task_id: str) -> AbstractContextManager[object]:
        """A sign that something is going on, for as long as the context is open."""
        return self._console.status(f"{escape(task_id)}: running", spinner="dots")

    def message(self, role: str, text: str, note: str = "") -> None:
        """One chat message under a line with its role; `note` says what is known of it."""
        title = f"[{STYLES.get(role, 'bold')}]{escape(role)}[/]" + (f" [dim]{escape(note)}[/]" if note else "")
        self._console.print(Rule(title, align="left", style="dim"))
        # Text, not markup: what a model or a tool writes may look like either.
        self._console.print(Text(self._cut(text), style=STYLES.get(role, "")), soft_wrap=True)

    def calls(self, names: Sequence[str], error: str | None) -> None:
        """How an action was read: the tools it calls, or why it can't be read."""
        if error is not None:
            self._console.print(Text(f"unreadable call: {error}", style="red"), soft_wrap=True)
        else:
            self._console.print(Text(f"calls: {', '.join(names) or 'none'}", style="dim"))

    def end(self, episode: Episode, outcome: Mapping[str, Any]) -> None:
        """How the episode ended: what the environment says of it (`outcome`), its metrics, and the reward."""
        console, times = self._console, episode.timings
        console.print(Rule("[bold]end[/]", align="left", style="dim"))
        for name, value in outcome.items():
            if isinstance(value, Mapping):
                console.print(Text(f"{name}: {': '.join(map(str, value.values()))}", style="red"), soft_wrap=True)
            else:
                console.print(Text(f"{name}:", style="dim"))
                console.print(Text(self._cut(str(value))), soft_wrap=True)
        metrics = {name: value for name, value in episode.metrics.items() if name not in _SHOWN_ANYWAY}
        figures = " ".join(f"{name}={_figure(value)}" for name, value in metrics.items() if value not in (None, ""))
        if figures:
            console.print(Text(figures), soft_wrap=True)
        console.print(
            Text(
                f"reward {episode.reward:g}, {episode.stop_reason.value}, {len(episode.actions)} turns, "
                f"{episode.action_tokens} tokens sampled of {sum(len(s.token_ids) for s in episode.segments)}, "
                f"{times.finished_at - times.issued_at:.1f} s (engine {times.generate_s:.1f}, "
                f"environment {times.environment_s:.1f})",
                style="bold",
            ),
            soft_wrap=True,
        )

    def _cut(self, text: str) -> str:
        if not self._shown_chars or len(text) <= self._shown_chars:
            return text
        half = self._shown_chars // 2
        return f"{text[:half]}\n[... {len(text) - 2 * half} characters not shown ...]\n{text[-half:]}"


def _figure(value: Any) -> str:
    return f"{value:.3g}" if isinstance(value, float) else str(value)


class TracedEngine:
    """An engine whose last answer is kept, to be told beside the action it became."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self.note = ""

    async def generate(
        self,
        prompt_ids: Sequence[int],
        sampling: SamplingParams,
        *,
        request_id: str | None = None,
        timeout_s: float | None = None,
    ) -> Completion:
        """As the engine's own."""
        began = time.monotonic()
        completion = await self._engine.generate(prompt_ids, sampling, request_id=request_id, timeout_s=timeout_s)
        self.note = (
            f"{len(completion.token_ids)} tokens after {len(prompt_ids)}, {time.monotonic() - began:.1f} s, "
            f"version {completion.versions[-1] if completion.versions else '?'}"
            + ("" if completion.finish_reason == "stop" else f", ended by {completion.finish_reason}")
        )
        return completion

    async def publish(self, version: int, weights: Path | WeightStream) -> None:
        """As the engine's own."""
        await self._engine.publish(version, weights)

    async def abort(self, request_id: str) -> None:
        """As the engine's own."""
        await self._engine.abort(request_id)

    async def health(self) -> EngineHealth:
        """As the engine's own."""
        return await self._engine.health()

    async def close(self) -> None:
        """As the engine's own."""
        await self._engine.close()


class TracedEnv(AsyncEnv):
    """An environment whose messages are shown as they come.

    `outcome` holds what its last step said beyond what every environment says (for SWE-bench: patch and refusal).
    """

    def __init__(self, env: AsyncEnv, engine: TracedEngine, trace: Trace) -> None:
        self._env, self._engine, self._trace = env, engine, trace
        self.tool_format = env.tool_format
        self._tools: list[dict[str, Any]] = []
        self._turn = 0
        self.outcome: dict[str, Any] = {}

    @property
    def task_ids(self) -> Sequence[str]:
        """As the environment's own."""
        return self._env.task_ids

    def take_model(self, model: Model) -> bool:
        """As the environment's own."""
        return self._env.take_model(model)

    async def areset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[str, dict[str, Any]]:
        """As the environment's own; shows the messages that open the episode."""
        self._env.tool_format = self.tool_format
        observation, info = await self._env.areset(seed=seed, options=options)
        self._tools, self._turn = list(info.get("tools") or []), 0
        for message in info["messages"]:
            self._trace.message(message["role"], str(message["content"]))
        return observation, info

    async def astep(self, action: str) -> Step:
        """As the environment's own; shows the action before it is carried out, and then its results."""
        self._act(action)
        return self._answered(await self._env.astep(action))

    async def atruncate(self, reason: str, action: str = "") -> Step:
        """As the environment's own."""
        if action:
            self._act(action)
        return self._answered(await self._env.atruncate(reason, action))

    async def aclose(self) -> None:
        """As the environment's own."""
        await self._env.aclose()

    def _act(self, action: str) -> None:
        self._turn += 1
        self._trace.message("assistant", action, f"turn {self._turn}: {self._engine.note}")
        if self._tools:
            parsed = parse_calls(action, self._tools, self._env.tool_format)
            self._trace.calls([call.name for call in parsed.calls], parsed.error)

    def _answered(self, step: Step) -> Step:
        info = step[4]
        for message in info.get("messages") or []:
            self._trace.message(message["role"], str(message["content"]))
        self.outcome = {name: value for name, value in info.items() if name not in _CONTRACT and value}
        return step
