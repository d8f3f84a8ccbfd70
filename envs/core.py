"""The asynchronous core of every environment here. `envs/facade.py` wraps one as an ordinary `gymnasium.Env`.

A core's life: new ──areset()──▶ in an episode ──astep()*──▶ ended ──areset()──▶ … ──aclose()──▶ closed.
Its five-tuples are Gymnasium's. A model's mistake is an observation or a reward; an infrastructure failure
raises `EnvironmentFault`, which is neither terminated nor truncated and is never a reward of 0.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

from envs.tool_calls import ToolFormat

Step = tuple[str, float, bool, bool, dict[str, Any]]

Message = dict[str, Any]
"""One chat message: role and content, maybe tool_calls or tool_call_id."""

TRUNCATIONS = ("turns", "context", "wall_clock", "turn_tokens")
"""The values of `info["truncation"]` where an episode was truncated: too many turns, the context full, out of time,
one turn too long."""


class EnvironmentFault(RuntimeError):
    """The environment's own machinery failed (sandbox, grader, judge, data). The episode is void, not wrong."""


class AsyncEnv(ABC):
    """One environment, one episode at a time.

    `info` of `areset` holds `messages` (chat messages that open the episode: system, user) and `tools` (OpenAI
    tool schemas, maybe empty), `task_id` and `segment == "prompt"`. `info` of `astep` holds `messages` (what the
    step adds after the action: tool or user messages, empty at the end), `segment == "observation"`, and after a
    truncation `truncation`, one of `TRUNCATIONS`. The end of an episode may add figures under `metrics`.

    `tool_format` is the form in which the policy writes tool calls (`envs.tool_calls`). Whoever runs an episode sets it
    before `areset`, from the model's chat template; an environment that reads calls reads them in this form.
    """

    tool_format: ToolFormat = "hermes"

    @property
    @abstractmethod
    def task_ids(self) -> Sequence[str]:
        """Every task of this environment, in a fixed order; the same configuration gives the same list."""

    @abstractmethod
    async def areset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[str, dict[str, Any]]:
        """Start an episode: of `options["task_id"]` if given, else of a task drawn with `seed`."""

    @abstractmethod
    async def astep(self, action: str) -> Step:
        """Carry out one action (the model's text of one turn)."""

    @abstractmethod
    async def atruncate(self, reason: str, action: str = "") -> Step:
        """End the episode from outside (`reason` of `TRUNCATIONS`) and grade it as it stands.

        `action` is the text of an action that was cut short; it is part of the episode, but no tool call in it is
        carried out.
        """

    @abstractmethod
    async def aclose(self) -> None:
        """Give everything back. May be called in any state, any number of times."""
