"""The asynchronous core of every environment here. `envs/facade.py` wraps one as an ordinary `gymnasium.Env`.

A core's life: new ──areset()──▶ in an episode ──astep()*──▶ ended ──areset()──▶ … ──aclose()──▶ closed.
Its five-tuples are Gymnasium's. A model's mistake is an observation or a reward; an infrastructure failure
raises `EnvironmentFault`, which is neither terminated nor truncated and is never a reward of 0.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, Protocol

from envs.tool_calls import ToolFormat

Step = tuple[str, float, bool, bool, dict[str, Any]]

Message = dict[str, Any]
"""One chat message: role and content, maybe tool_calls or tool_call_id."""

TRUNCATIONS = ("turns", "context", "wall_clock", "turn_tokens")
"""The values of `info["truncation"]` where an episode was truncated: too many turns, the context full, out of time,
one turn too long."""


class EnvironmentFault(RuntimeError):
    """The environment's own machinery failed (sandbox, grader, judge, data). The episode is void, not wrong."""


class Model(Protocol):
    """A language model that an environment may ask: a judge, a user simulator, another role.

    What it writes belongs to the environment. It is no action, has no log-probs, and nothing is trained on it.
    """

    async def chat(
        self, messages: Sequence[Message], *, max_tokens: int = 512, temperature: float = 1.0, stop: Sequence[str] = ()
    ) -> str:
        """The next message of the conversation `messages`, at most `max_tokens` tokens, without its thinking.

        It ends before the first of the strings `stop`, and may be empty. Raises `EnvironmentFault` when there is none.
        """
        ...


class AsyncEnv(ABC):
    """One environment, one episode at a time.

    `info` of `areset` holds `messages` (chat messages that open the episode: system, user) and, if there are any,
    `tools` (OpenAI tool schemas). `info` of `astep` holds `messages` (what the step adds after the action: tool or user
    messages, empty at the end), and after a truncation `truncation`, one of `TRUNCATIONS`. The end of an episode may
    add figures under `metrics`. Ours also say `task_id` at reset, and `segment` ("prompt" or "observation"), for those
    who drive them by hand.

    `tool_format` is the form in which the policy writes tool calls (`envs.tool_calls`). Whoever runs an episode sets it
    before `areset`, from the model's chat template; an environment that reads calls reads them in this form.

    An environment that asks a language model says so with a class attribute, `model: Model | None = None`. Whoever runs
    an episode sets that too before `areset`; see `take_model`.
    """

    tool_format: ToolFormat = "hermes"

    def take_model(self, model: Model) -> bool:
        """Set the attribute `model`, if the class declares one; whether it does."""
        asks = getattr(type(self), "model", self) is None
        if asks:
            self.model: Any = model
        return asks

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

    async def atruncate(self, reason: str, action: str = "") -> Step:
        """End the episode from outside (`reason` of `TRUNCATIONS`) and grade it as it stands.

        `action` is the text of an action that was cut short; it is part of the episode, but no tool call in it is
        carried out. Without an override there is nothing to grade: the episode keeps the rewards that it has.
        """
        if reason not in TRUNCATIONS:
            raise ValueError(f"a truncation is one of {', '.join(TRUNCATIONS)}, not {reason!r}")
        return "", 0.0, False, True, {"messages": [], "segment": "observation", "truncation": reason}

    async def aclose(self) -> None:
        """Give everything back. May be called in any state, any number of times. Without an override: nothing."""
        return
