"""The environment of one episode, as a rollout calls it: each answer checked, each failure an `EnvironmentFault`.

An environment is other people's code. Whatever it raises or answers voids its own episode, never the ones beside it.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import msgspec

from agent.episode import StopReason
from agent.runtime.settings import StageLimits
from envs.core import AsyncEnv, EnvironmentFault, Message, Model
from envs.tool_calls import ToolFormat

log = logging.getLogger(__name__)

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Opening:
    """What an episode opens with: chat messages, and the tools that the policy may call."""

    messages: list[Message]
    tools: list[dict[str, Any]]


@dataclass(frozen=True, slots=True)
class Outcome:
    """What followed an action. `ended` is None while the episode goes on; `messages` are what it adds then."""

    reward: float
    ended: StopReason | None
    messages: list[Message] = field(default_factory=list)
    metrics: dict[str, Any] = field(default_factory=dict)


class EnvironmentCalls:
    """Calls `env` within the limits of a stage. `seconds` sums up the time spent in it.

    Every method raises `EnvironmentFault`, and nothing else, for whatever the environment does wrong.
    """

    def __init__(self, env: AsyncEnv, env_id: str, limits: StageLimits) -> None:
        self._env, self._env_id, self._limits = env, env_id, limits
        self.seconds = 0.0

    def task_ids(self) -> Sequence[str]:
        """The environment's tasks."""
        return self._checked(lambda: _task_ids(self._env.task_ids), "task_ids")

    async def reset(self, seed: int, task_id: str, tool_format: ToolFormat, model: Model | None = None) -> Opening:
        """Open an episode of `task_id` for a policy that writes its calls in `tool_format`.

        `model` is for an environment that asks one, and was given no other.
        """

        def reset() -> Awaitable[Any]:
            self._env.tool_format = tool_format
            if model is not None:
                self._env.take_model(model)
            return self._env.areset(seed=seed, options={"task_id": task_id})

        return await self._awaited(reset, _opening, self._limits.reset_s, "reset")

    async def step(self, action: str) -> Outcome:
        """Carry out one action."""
        return await self._awaited(lambda: self._env.astep(action), _outcome, self._limits.step_s, "step")

    async def truncate(self, reason: str, action: str) -> Outcome:
        """End the episode from outside, graded as it stands; `action` is the text that was cut, if one was."""
        outcome = await self._awaited(
            lambda: self._env.atruncate(reason, action), _outcome, self._limits.step_s, "atruncate"
        )
        if outcome.ended is None:
            raise EnvironmentFault(f"{self._env_id}: atruncate({reason!r}) did not end the episode")
        return outcome

    async def _awaited(
        self, call: Callable[[], Awaitable[Any]], read: Callable[[Any], T], limit_s: float, stage: str
    ) -> T:
        began = time.monotonic()
        try:
            async with asyncio.timeout(limit_s):
                answer = await call()
        except EnvironmentFault:
            raise
        except TimeoutError as error:
            raise EnvironmentFault(f"{self._env_id}: {stage} took longer than {limit_s:g} s") from error
        except Exception as error:
            raise self._raised(stage, error) from error
        finally:
            self.seconds += time.monotonic() - began
        return self._checked(lambda: read(answer), stage)

    def _checked(self, read: Callable[[], T], stage: str) -> T:
        try:
            return read()
        except _Malformed as error:
            raise EnvironmentFault(f"{self._env_id}: {stage}: {error}") from error
        except EnvironmentFault:
            raise
        except Exception as error:  # a property or a mapping of its own that raises when it is read
            raise self._raised(stage, error) from error

    def _raised(self, stage: str, error: Exception) -> EnvironmentFault:
        log.error("%s: %s raised", self._env_id, stage, exc_info=error)
        return EnvironmentFault(f"{self._env_id}: {stage} raised {type(error).__name__}: {error}")


class _Malformed(Exception):
    """An answer of another shape than `envs.core.AsyncEnv` says."""


def _task_ids(answer: Any) -> Sequence[str]:
    if isinstance(answer, str) or not isinstance(answer, Sequence):
        raise _Malformed(f"must be a sequence of names, not {_shown(answer)}")
    return answer


def _opening(answer: Any) -> Opening:
    if not isinstance(answer, tuple | list) or len(answer) != 2:
        raise _Malformed(f"must answer (observation, info), not {_shown(answer)}")
    info = _info(answer[1])
    tools = info.get("tools") or []
    if not isinstance(tools, list | tuple) or not all(isinstance(tool, dict) for tool in tools):
        raise _Malformed(f"info['tools'] must be a list of tool schemas, not {_shown(tools)}")
    return Opening(_messages(info), list(tools))


def _outcome(answer: Any) -> Outcome:
    if not isinstance(answer, tuple | list) or len(answer) != 5:
        raise _Malformed(f"must answer (observation, reward, terminated, truncated, info), not {_shown(answer)}")
    _, reward, terminated, truncated, found = answer
    info = _info(found)
    try:
        credit = float(reward)
        metrics = dict(info.get("metrics") or {})
        msgspec.msgpack.encode(metrics)  # what cannot be delivered must not cost more than this episode
    except (TypeError, ValueError, OverflowError) as error:
        raise _Malformed(f"a reward or a metric is no plain value: {error}") from error
    if not math.isfinite(credit):
        raise _Malformed(f"a reward must be a finite number, not {credit}")
    if terminated:
        return Outcome(credit, StopReason.TERMINATED, metrics=metrics)
    if not truncated:
        return Outcome(credit, None, _messages(info), metrics)
    try:
        ended = StopReason(f"truncated_{info['truncation']}")
    except (KeyError, ValueError) as error:
        raise _Malformed(
            f"a truncation must name its reason in info['truncation'], not {info.get('truncation')!r}"
        ) from error
    return Outcome(credit, ended, metrics=metrics)


def _info(info: Any) -> dict[str, Any]:
    if not isinstance(info, dict):
        raise _Malformed(f"info must be a dict, not {_shown(info)}")
    return info


def _messages(info: dict[str, Any]) -> list[Message]:
    messages = info.get("messages")
    if not isinstance(messages, list | tuple) or not all(
        isinstance(message, dict) and isinstance(message.get("role"), str) for message in messages
    ):
        raise _Malformed("info['messages'] must be a list of chat messages")
    return list(messages)


def _shown(answer: Any) -> str:
    if isinstance(answer, tuple | list):
        return f"{type(answer).__name__} of {len(answer)}"
    return type(answer).__name__
