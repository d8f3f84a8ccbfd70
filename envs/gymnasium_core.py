"""`GymnasiumCore`: anybody's synchronous `gymnasium.Env` of text, as the asynchronous core that a runtime drives."""

from __future__ import annotations

import asyncio
import logging
import queue
import threading
from collections.abc import Callable, Sequence
from typing import Any

import gymnasium
from gymnasium.spaces import Text

from envs.asking.blocking import BlockingModel
from envs.core import TRUNCATIONS, AsyncEnv, EnvironmentFault, Message, Model, Step
from envs.spaces import Unicode

log = logging.getLogger(__name__)

CLOSE_S = 10.0
"""How long an environment may take to close before its thread is left to itself."""


class GymnasiumCore(AsyncEnv):
    """Runs `env` in a thread of its own, so that a slow step holds up nobody; no two calls at once.

    How it maps to an episode:

    - *Text.* Observations are text and become user messages. Where `info["messages"]` holds chat messages, these are
      used instead; an observation of what a tool says is `[{"role": "tool", "content": ...}]`. Actions are the policy's
      text, calls of tools included, as the model writes them. What is observed at the end is not shown to the policy.
    - *Tools.* `info["tools"]` of `reset`, OpenAI schemas. `envs.tool_calls.parse_action(action, tools, tool_format)`
      reads a call; if the class has an attribute `tool_format`, it is set to the policy's own form before `reset`.
    - *Rewards.* The reward of a step is credited to the action before it, that of each turn to its own. Nothing is
      scaled or clipped; one that is not finite makes the episode void.
    - *Ends.* `terminated` ends an episode. So does `truncated`, for the reason in `info["truncation"]`, or "turns" (as
      with Gymnasium's `TimeLimit`). `info["metrics"]` of the last step are the episode's figures, by name.
    - *Truncated from outside* (the context is full, a turn too long, out of time): `env.unwrapped.truncate(reason,
      action)` answers as `step` does, if there is such a method; else the episode ends with the rewards it has.
    - *Tasks.* `env.unwrapped.task_ids`, handed to `reset` as `options["task_id"]`; without them a task is a seed:
      `seeds["count"]` of them from `seeds["start"]` on. Training and evaluation need different ones.
    - *A model to ask.* If the class has an attribute `model = None`, it is set before `reset` to an object whose
      `chat(messages, max_tokens=..., temperature=..., stop=...)` waits for the answer (`envs.asking.blocking`).
    - *Failures.* What the environment raises makes the episode void, and a step that never returns is left to itself.

    Raises `ValueError` for an environment whose actions or observations are no text.
    """

    def __init__(self, env: gymnasium.Env[Any, Any], seeds: dict[str, int] | None = None) -> None:
        for what, space in (("actions", env.action_space), ("observations", env.observation_space)):
            if not isinstance(space, Text | Unicode):
                raise ValueError(
                    f"{env}: its {what} are {space}, and a language model reads and writes text: wrap it in one whose "
                    "spaces are gymnasium.spaces.Text, e.g. with gymnasium.wrappers.TransformObservation and "
                    "TransformAction"
                )
        wanted = {"start": 0, "count": 1000, **(seeds or {})}
        if set(wanted) != {"start", "count"} or wanted["count"] < 1 or wanted["start"] < 0:
            raise ValueError(f"seeds: {{start: 0, count: 1000}} is how they are given, not {seeds}")
        self._env, self._seeds = env, wanted
        self._thread: _Thread | None = None
        self._given: Model | None = None
        self._model: BlockingModel | None = None

    def take_model(self, model: Model) -> bool:
        """Give it to the environment as one that blocks, if its class has an attribute `model = None`."""
        own = self._env.unwrapped
        asks = getattr(type(own), "model", self) is None
        if asks:
            self._given = model
        return asks

    @property
    def task_ids(self) -> Sequence[str]:
        own = getattr(self._env.unwrapped, "task_ids", None)
        if own is not None:
            return list(own)
        return [f"seed-{self._seeds['start'] + i}" for i in range(self._seeds["count"])]

    async def areset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[str, dict[str, Any]]:
        task_id = (options or {}).get("task_id")
        if getattr(self._env.unwrapped, "task_ids", None) is None:
            if task_id is None:
                task_id = f"seed-{self._seeds['start'] + (seed or 0) % self._seeds['count']}"
            seed, options = int(str(task_id).removeprefix("seed-")), None
        own: Any = self._env.unwrapped
        if self._given is not None:
            own.model = self._model = BlockingModel(self._given)
        if hasattr(own, "tool_format"):
            own.tool_format = self.tool_format
        observation, info = await self._call(lambda: self._env.reset(seed=seed, options=options))
        found = {"messages": _said(observation, info), "tools": list(info.get("tools") or [])}
        return observation, {**info, **found, "task_id": task_id, "segment": "prompt"}

    async def astep(self, action: str) -> Step:
        return _step(await self._call(lambda: self._env.step(action)))

    async def atruncate(self, reason: str, action: str = "") -> Step:
        if reason not in TRUNCATIONS:
            raise ValueError(f"a truncation is one of {TRUNCATIONS}, not {reason!r}")
        truncate = getattr(self._env.unwrapped, "truncate", None)
        ended = {"messages": [], "segment": "observation", "truncation": reason}
        if truncate is None:
            return "", 0.0, False, True, ended
        observation, reward, _, _, info = await self._call(lambda: truncate(reason, action))
        return observation, float(reward), False, True, {**info, **ended}

    async def aclose(self) -> None:
        thread, self._thread = self._thread, None
        if thread is None:
            return
        try:
            async with asyncio.timeout(CLOSE_S):
                await thread.call(self._env.close)
        except (TimeoutError, EnvironmentFault) as error:
            log.error("%s did not close: %s", self._env, error or f"not within {CLOSE_S:g} s")
        thread.end()

    async def _call(self, work: Callable[[], Any]) -> Any:
        if self._thread is None:
            self._thread = _Thread(str(self._env))
        try:
            return await self._thread.call(work)
        except asyncio.CancelledError:
            if self._model is not None:
                self._model.give_up()  # or the thread would wait for an answer that nobody wants
            raise


class _Thread:
    """A thread for one environment. A daemon: one that hangs in a step must not hold the process at its end."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._work: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._busy = False
        threading.Thread(target=self._run, name=name, daemon=True).start()

    async def call(self, work: Callable[[], Any]) -> Any:
        """Run `work` in the thread. Cancelled, it lets go: the thread is busy until the work ends by itself."""
        if self._busy:
            raise EnvironmentFault(f"{self._name} is still in a call that ran out of time")
        self._busy = True
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[Any] = loop.create_future()

        def settle(value: Any, error: BaseException | None) -> None:
            self._busy = False
            if answer.done():
                return
            if error is None:
                answer.set_result(value)
            else:
                answer.set_exception(error)

        def run() -> None:
            value: Any = None
            error: Exception | None = None
            try:
                value = work()
            except StopIteration as stop:  # a future refuses it
                error = RuntimeError(f"StopIteration: {stop}")
            except Exception as raised:
                error = raised
            try:
                loop.call_soon_threadsafe(settle, value, error)
            except RuntimeError:  # the loop has ended meanwhile
                return

        self._work.put(run)
        return await answer

    def end(self) -> None:
        """Let the thread end once it is idle."""
        self._work.put(None)

    def _run(self) -> None:
        while (work := self._work.get()) is not None:
            work()


def _step(answer: Any) -> Step:
    observation, reward, terminated, truncated, info = answer
    ended = terminated or truncated
    messages = [] if ended else _said(observation, info)
    found: dict[str, Any] = {**info, "messages": messages, "segment": "observation"}
    if truncated and not terminated:
        found.setdefault("truncation", "turns")
    return observation, float(reward), bool(terminated), bool(truncated) and not terminated, found


def _said(observation: Any, info: dict[str, Any]) -> list[Message]:
    if info.get("messages") is not None:
        return list(info["messages"])
    if not isinstance(observation, str):
        raise EnvironmentFault(f"an observation must be text or come with info['messages'], not {type(observation)}")
    return [{"role": "user", "content": observation}]
